"""`python -m normexp.report PATH [--out DIR]`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from normexp.results import NothingToRead


def main(arguments: list[str] | None = None) -> int:
    """0: written; 1: written, but no run could be counted; 2: the user's mistake, in one line."""
    parser = argparse.ArgumentParser(prog="python -m normexp.report", description="Tables, figures and pages of runs.")
    parser.add_argument("path", type=Path, help="a sweep folder, a results folder, a folder of runs, or one run")
    parser.add_argument("--out", type=Path, help="folder to write into (default: PATH)")
    given = parser.parse_args(arguments)
    out = given.out or given.path
    command = shlex.join(
        ["python", "-m", "normexp.report", str(given.path)] + (["--out", str(out)] if given.out else [])
    )
    from normexp.report.build import build  # the figures' library takes a second that `--help` need not wait for

    try:
        built = build(given.path, out, command)
    except NothingToRead as mistake:
        print(f"normexp.report: {mistake}", file=sys.stderr)
        return 2
    except OSError as mistake:
        print(f"normexp.report: cannot write into {out}: {mistake.strerror}", file=sys.stderr)
        return 2
    aside = [*built.uncounted, *((figure.name, f"not drawn: {figure.why}") for figure in built.missing)]
    told = [f"{built.counted} of {built.read} readable runs counted", *(f"  {what}: {why}" for what, why in aside)]
    try:
        print(*told, *built.files, sep="\n", flush=True)
    except BrokenPipeError:  # a reader that has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if built.counted else 1


if __name__ == "__main__":
    sys.exit(main())
