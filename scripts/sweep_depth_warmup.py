"""Which norm trains at which place, how deep, and after how much warmup: sweeps, then reports.

python scripts/sweep_depth_warmup.py [hydra/launcher=basic seed=0 …]
"""

import subprocess
import sys

from normexp import train

code, folder = train.sweep(["-m", "+sweep=depth_warmup", "hydra/launcher=local", *sys.argv[1:]])
report = subprocess.call([sys.executable, "-m", "normexp.report", str(folder)]) if folder else 0
sys.exit(code or report)
