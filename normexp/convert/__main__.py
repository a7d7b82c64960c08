"""`python -m normexp.convert FROM TO`: a folder of Hugging Face's to ours, or a run to one of Hugging Face's."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from normexp import commandline
from normexp.convert.files import export_folder, import_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """0: written; 2: the user's mistake, in one line."""
    parser = argparse.ArgumentParser(prog="python -m normexp.convert", description="Weights of published models.")
    parser.add_argument("source", type=Path, help="a folder with config.json and model.safetensors, or a run folder")
    parser.add_argument("out", type=Path, help="a new folder; from Hugging Face's, also a new .safetensors file")
    given = parser.parse_args(arguments)
    return commandline.exit_code(lambda: _run(given.source, given.out))


def _run(source: Path, out: Path) -> int:
    if (source / "config.json").exists():
        print(shlex.join(import_folder(source, out)))
    else:
        print(f"{out}: a {export_folder(source, out)} for transformers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
