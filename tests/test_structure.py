"""The floors of the house: who may import whom, and which module alone knows a framework."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = [
    {"kernels", "fields"},
    {"norms", "attention"},
    {"layers", "quantise"},
    {"experts"},
    {"placements"},
    {"model"},
    {
        "arithmetic",
        "choices",
        "init",
        "fold",
        "data",
        "optim",
        "telemetry",
        "verdict",
        "trackers",
        "checkpoint",
        "interruption",
    },
    {"trainer", "runs", "summary", "commandline", "results", "stats", "progress", "workers"},
    {"config", "sweeps"},
    {"cell"},
    {"launching"},
    {"train", "report", "convert", "zoo"},
]
SOLE_IMPORTERS = {
    "hydra": "commandline",
    "omegaconf": "commandline",
    "wandb": "trackers",
    "triton": "kernels",
    "datasets": "data.hub",
    "huggingface_hub": "data.hub",
    "tokenizers": "data.bpe",
    "pyarrow": "data.files",
    "matplotlib": "report",
    "rich": "progress",
    "safetensors": "convert",
}
TORCH_FREE = {"fields", "verdict", "summary", "results", "stats", "report", "progress", "commandline", "sweeps", "runs"}
MODULES = sorted((ROOT / "normexp").rglob("*.py"))


def unit(path: Path) -> str:
    """The module or package directly under normexp/ that a file belongs to."""
    return path.relative_to(ROOT / "normexp").parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "normexp").with_suffix("").parts)


def imports(path: Path) -> set[str]:
    """Dotted names of everything imported anywhere in the file, for `from normexp import x` normexp.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imported_units(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("normexp.")} - {"CONF", "__version__"}


def floor(name: str) -> int:
    return next(number for number, units in enumerate(FLOORS) if name in units)


def test_every_module_has_a_floor():
    assert {unit(path) for path in MODULES} - {"__init__"} <= set.union(*FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    here = unit(path)
    for other in imported_units(path) - {here}:
        assert here != "__init__", "importing normexp must stay light"
        assert floor(other) < floor(here), f"{here} imports {other}"


@pytest.mark.parametrize(("framework", "sole"), SOLE_IMPORTERS.items())
def test_one_module_knows_each_framework(framework, sole):
    importers = [path for path in MODULES if any(name.split(".")[0] == framework for name in imports(path))]
    assert all(f"{dotted(path)}.".startswith(f"{sole}.") for path in importers), importers


def test_the_reading_side_knows_no_torch():
    for path in MODULES:
        if unit(path) in TORCH_FREE:
            assert not any(name.split(".")[0] == "torch" for name in imports(path)), path


def test_producing_and_reading_share_no_import():
    """Nothing of the program but stats and each other is imported by the readers."""
    for path in MODULES:
        if unit(path) in {"results", "stats", "report"}:
            assert imported_units(path) <= {"results", "stats", "report", "claims", "fields"}, path


def test_files_and_functions_stay_short():
    for path in [*MODULES, *sorted((ROOT / "scripts").glob("*.py"))]:
        text = path.read_text()
        assert text.count("\n") <= 300, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno:
                assert node.end_lineno - node.lineno < 45, f"{path}: {node.name}"


def test_dependencies_are_declared():
    """Every third-party package that the program imports stands in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = " ".join(project["dependencies"]).replace("hydra-core", "hydra")
    known = {"yaml": "omegaconf", "pyarrow": "pyarrow"}  # PyYAML comes with OmegaConf
    for name in {name.split(".")[0] for path in MODULES for name in imports(path)}:
        if name not in {"normexp", "joblib"} and name not in STDLIB:
            assert known.get(name, name) in declared, name


STDLIB = set(__import__("sys").stdlib_module_names)
