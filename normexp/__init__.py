"""A training-stability laboratory for normalisation in Transformers."""

from pathlib import Path

__version__ = "0.1.0"


def find_conf(package: Path) -> Path:
    """The folder of defaults: inside the package (a wheel), else beside it (a checkout)."""
    candidates = (package / "conf", package.parent / "conf")
    for candidate in candidates:
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(
        f"normexp needs its conf/ folder: neither {candidates[0]} nor {candidates[1]} has config.yaml"
    )


def __getattr__(name: str) -> Path:
    # Looked up when asked for, so that `import normexp` works even where the folder is missing.
    if name == "CONF":
        return find_conf(Path(__file__).resolve().parent)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
