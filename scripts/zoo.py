"""Every norm and every placement at the tiny model, 200 steps, each with its own initial weights: runs, then reports.

python scripts/zoo.py [hydra/launcher=basic seed=0 …]    # 15 minutes on two cores; `python -m normexp.zoo` prints it
"""

import subprocess
import sys

from normexp import train, zoo

code = 0
for grid in zoo.grids():
    code = max(code, train.sweep(["-m", *grid, "hydra/launcher=local", *sys.argv[1:]])[0])
report = subprocess.call([sys.executable, "-m", "normexp.report", str(zoo.RESULTS)])
sys.exit(code or report or subprocess.call([sys.executable, "-m", "normexp.zoo"]))
