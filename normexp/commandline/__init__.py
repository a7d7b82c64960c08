"""The command line: Hydra composes and launches; this package knows Hydra, and words its errors in one line.

The only importer of hydra and omegaconf. A command is one cell, or with -m (or +sweep=name) a sweep of them.
"""

from normexp.commandline.base import Command, Composed, compose, launch, parse, read
from normexp.commandline.errors import exit_code, explain
from normexp.commandline.grids import Grid, WorkerDied, compose_grid, launch_grid

__all__ = [
    "Command",
    "Composed",
    "Grid",
    "WorkerDied",
    "compose",
    "compose_grid",
    "exit_code",
    "explain",
    "launch",
    "launch_grid",
    "parse",
    "read",
]
