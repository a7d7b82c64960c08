"""The command line: Hydra composes and launches; this module knows Hydra, and words its errors in one line.

The only importer of hydra and omegaconf. A command is one cell, or with -m (or +sweep=name) a sweep of them.
"""

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

import normexp
from normexp.fields import UserError, suggest

HYDRA = {"version_base": "1.3"}
MODES = ("-m", "--multirun")


@dataclass(frozen=True)
class Command:
    flags: list[str]
    overrides: list[str]
    config_dir: str | None
    multirun: bool


@dataclass(frozen=True)
class Composed:
    values: dict[str, Any]  # interpolations resolved
    choices: dict[str, Any]  # name of the chosen file, by group; None where none is
    folder: Path  # the directory the command was given in
    sweep: str | None  # name of the sweep that this is a cell of


@dataclass(frozen=True)
class Grid:
    """What -m asks for."""

    name: str | None  # of the sweep's file in conf/sweep/, None where the command spells the grid out
    results: str
    folder: Path  # the directory the command was given in
    cells: list[tuple[list[str], DictConfig]]  # the overrides of each cell, and what its task will receive


def parse(arguments: Sequence[str]) -> Command:
    """Flags and overrides may come in any order."""
    parser = get_args_parser()
    parser.error = _refuse_flag  # type: ignore[method-assign,assignment]
    given = parser.parse_intermixed_args(list(arguments))
    flags = [argument for argument in arguments if argument not in (*given.overrides, *MODES)]
    if given.config_dir is not None and not Path(given.config_dir).is_dir():
        raise UserError(
            f"--config-dir={given.config_dir}: there is no such folder as {Path(given.config_dir).absolute()}"
        )
    names = [override.partition("=")[0].lstrip("+") for override in given.overrides]
    shows = given.help or given.hydra_help or given.cfg or given.info is not None or given.shell_completion
    multirun = not shows and (given.multirun or "sweep" in names or "hydra.mode=MULTIRUN" in given.overrides)
    return Command(flags, given.overrides, given.config_dir, multirun)


def _refuse_flag(message: str) -> None:
    raise UserError(f"{message}; see --help")


def launch(command: Command, task: Callable[[Any], object]) -> None:
    """One cell. What the task raises is raised here, and not printed by Hydra on the way."""
    raised: list[BaseException] = []

    def caught(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except BaseException as error:
            raised.append(error)

    _main(caught, [*command.flags, *command.overrides])
    if raised and isinstance(raised[0], SystemExit):
        raise RuntimeError(f"the cell called sys.exit({raised[0].code})") from raised[0]
    if raised:
        raise raised[0]


def launch_grid(command: Command, task: Callable[[Any], object], folder: Path) -> None:
    """All cells, by the launcher that the command names. `task` is a function of a module, for launchers that send it
    to other processes. `folder`: for what Hydra writes about the sweep."""
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    _main(task, ["--multirun", *command.flags, *command.overrides, f"hydra.sweep.dir='{quoted}'"])


def _main(task: Callable[[Any], object], arguments: list[str]) -> None:
    importable = str(Path.cwd())
    if importable not in sys.path and "" not in sys.path:
        sys.path.append(importable)  # a user's own norm lies in the directory of the command
    with _full_errors(), _argv([sys.argv[0], *arguments]):
        hydra.main(config_path=str(normexp.CONF), config_name="config", **HYDRA)(task)()


@contextmanager
def _argv(arguments: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, arguments
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _full_errors() -> Iterator[None]:
    """Without it, Hydra prints its errors itself, over several lines, and exits with code 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def read(cfg: DictConfig) -> Composed:
    """What a task receives from Hydra, or `compose` from its loader, as plain values."""
    about = cfg.hydra if "hydra" in cfg else HydraConfig.get()
    own = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
    try:
        values = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: is missing; give {error.full_key}=<value>") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    sweep = None if OmegaConf.is_missing(about.job, "num") else Path(about.sweep.dir).name
    return Composed(values, dict(about.runtime.choices), Path(about.runtime.cwd), sweep)  # type: ignore[arg-type]


def compose(overrides: Sequence[str], config_dir: str | None = None) -> Composed:
    """One cell without running it."""
    with _loader() as loader:
        return read(loader.load_configuration("config", [*overrides, *_search(config_dir)], RunMode.RUN))


def compose_grid(command: Command) -> Grid:
    """Every cell of a sweep, as Hydra's sweeper will make it; any mistake in a choice or a name is raised here."""
    with _loader() as loader:
        given = [*command.overrides, *_search(command.config_dir)]
        common = loader.load_configuration("config", given, RunMode.MULTIRUN)
        runtime = common.hydra.runtime
        if runtime.choices["hydra/sweeper"] != "basic":
            raise UserError("hydra/sweeper: this program lists the cells of a sweep; give hydra/sweeper=basic")
        params = [f"{name}={value}" for name, value in (common.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create(loader).parse_overrides([*params, *common.hydra.overrides.task])
        cells = BasicSweeper.split_arguments(overrides, None)[0]
        composed = [(cell, loader.load_sweep_config(common, cell)) for cell in cells]
        return Grid(runtime.choices.get("sweep"), common.results, Path(runtime.cwd), composed)


@contextmanager
def _loader() -> Iterator[Any]:
    with hydra.initialize_config_dir(str(normexp.CONF), **HYDRA):
        yield GlobalHydra.instance().config_loader()


def _search(config_dir: str | None) -> list[str]:
    if config_dir is None:
        return []
    quoted = str(Path(config_dir).absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def exit_code(run: Callable[[], int]) -> int:
    """What `run` returns; 2 after one line for a user's mistake, 1 after the traceback of a fault, 130 for Ctrl-C."""
    try:
        return run()
    except (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        return 1


def explain(error: BaseException) -> str:
    """One line that names the field, the value, and what would be right."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, UserError):
        return " ".join(lines)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return f"{group}={name}: there is no such choice{suggest(name, error.options)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: is not field=value; quote a value with special signs, as in field='\"a=b, c.txt\"'"
    if ambiguous := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", lines[0]):
        return f"{ambiguous[1]}: is more than one value; add -m to run a cell for each, or write a list as [a,b]"
    if unknown := re.match(r"Could not override '(.*?)'", lines[0]):
        given = re.search(r"use \+(.*)", "\n".join(lines))
        return f"{given[1] if given else unknown[1]}: {_near(unknown[1])}"
    if present := re.match(
        r"(?:Multiple values for|Could not append to config. An item is already at) '?([\w./]+)", lines[0]
    ):
        return f"+{present[1].rstrip('.')}: is there already; leave out the +"
    cause = str(error.__cause__).splitlines()[:1] if error.__cause__ else []
    return "; ".join([lines[0].rstrip("."), *cause]) if not isinstance(error, yaml.YAMLError) else " ".join(lines)


def _near(name: str) -> str:
    """What a mistyped field may mean: one of the same last part elsewhere, else its nearest neighbours."""
    fields = _fields()
    if name in fields:
        return f"the chosen {name.partition('.')[0]} has no such field; it belongs to {', '.join(fields[name])}"
    namesakes = [field for field in fields if field.rpartition(".")[2] == name.rpartition(".")[2]]
    if namesakes:
        return f"there is no such field; did you mean {' or '.join(namesakes)}?"
    parent = name.rpartition(".")[0]
    neighbours = [field for field in fields if field.rpartition(".")[0] == parent]
    return f"there is no such field{suggest(name, neighbours or fields)}"


def _fields() -> dict[str, list[str]]:
    """Groups, top-level fields and the fields of all choices, read from the files; and the choices that have each."""
    top = yaml.safe_load((normexp.CONF / "config.yaml").read_text(encoding="utf-8"))
    found: dict[str, list[str]] = {name: [] for name in top if name not in ("defaults", "hydra")}
    for file in sorted(normexp.CONF.glob("*/*.yaml")):
        text, group = file.read_text(encoding="utf-8"), file.parent.name
        own = yaml.safe_load(text) if "@package" not in text else {}
        for name in [group, *(f"{group}.{field}" for field in own if not field.startswith("_"))]:
            found.setdefault(name, []).append(f"{group}={file.stem}")
    return found
