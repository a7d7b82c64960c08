"""How sensitive to the learning rate is which norm at which place: sweeps, then reports.

python scripts/sweep_lr.py [hydra/launcher=basic seed=0 …]
"""

import subprocess
import sys

from normexp import train

code, folder = train.sweep(["-m", "+sweep=lr", "hydra/launcher=local", *sys.argv[1:]])
report = subprocess.call([sys.executable, "-m", "normexp.report", str(folder)]) if folder else 0
sys.exit(code or report)
