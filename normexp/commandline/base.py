"""A command's flags and overrides, one cell's config, and the launch of one cell."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

import normexp
from normexp.fields import UserError

HYDRA = {"version_base": "1.3"}
LONGEST = 200  # name of a file
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
    if given.resolve and not given.cfg:
        raise UserError("--resolve: belongs to --cfg; give --cfg job --resolve")
    wanted = [_as_text(override) for override in given.overrides]
    for override in wanted:
        _refuse_what_is_no_choice(*override.partition("="))
    overrides = [_without_tilde(override) for override in wanted]
    names = [override.partition("=")[0].lstrip("+") for override in overrides]
    shows = given.help or given.hydra_help or given.cfg or given.info is not None or given.shell_completion
    multirun = not shows and (given.multirun or "sweep" in names or "hydra.mode=MULTIRUN" in overrides)
    return Command(flags, overrides, given.config_dir, multirun)


def _refuse_what_is_no_choice(name: str, sign: str, value: str) -> None:
    if (not sign and not name.startswith("~")) or not name.strip("+~ "):
        raise UserError(f"{name}{sign}{value}: is not field=value")
    group, _, field = name.lstrip("+~").partition(".")
    if field in ("_target_", "_partial_"):  # else a run would bear the name of a choice that it is not
        raise UserError(f"{name}={value}: is set by the choice; give {group}=<name>, of a yaml of your own if need be")
    if not field and sign and (normexp.CONF / group[:LONGEST]).is_dir() and not _may_choose(value.strip()):
        raise UserError(f"{name}={value}: is not a choice; give {group}=<name>, one of those that --help lists")


def _may_choose(value: str) -> bool:
    """Whether it is a name or, under -m, several. Hydra has no words for a number, and none for a list."""
    with suppress(yaml.YAMLError):
        if not isinstance(yaml.safe_load(value), str):
            return False
    with suppress(ValueError):
        float(value)
        return False
    return len(value) <= LONGEST and not value.startswith(("int(", "float(", "bool(", "json_str("))


def _as_text(override: str) -> str:
    """A choice whose name YAML takes for a truth value, such as telemetry=off."""
    name, _, value = override.partition("=")
    if value in ("on", "off", "yes", "no") and (normexp.CONF / name.lstrip("+")[:LONGEST] / f"{value}.yaml").exists():
        return f"{name}='{value}'"
    return override


def _without_tilde(override: str) -> str:
    """A path below the home directory, which Hydra wants quoted."""
    name, _, value = override.partition("=")
    return f"{name}='{quoted(Path(value).expanduser())}'" if value.startswith("~") else override


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


def _main(task: Callable[[Any], object], arguments: list[str]) -> None:
    make_importable(Path.cwd())
    with _full_errors(), _argv([sys.argv[0], *arguments]):
        hydra.main(config_path=str(normexp.CONF), config_name="config", **HYDRA)(task)()


def make_importable(folder: Path) -> None:
    """A user's own norm lies in the directory of the command."""
    if str(folder) not in sys.path and "" not in sys.path:
        sys.path.append(str(folder))


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
    return plain(cfg, cfg.hydra if "hydra" in cfg else HydraConfig.get())


def plain(cfg: DictConfig, about: Any) -> Composed:
    """`about`: the node `hydra` that belongs to `cfg`, which may lack it."""
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
    with loader() as composer:
        return read(composer.load_configuration("config", [*overrides, *search(config_dir)], RunMode.RUN))


@contextmanager
def loader() -> Iterator[Any]:
    with hydra.initialize_config_dir(str(normexp.CONF), job_name="normexp", **HYDRA):
        yield GlobalHydra.instance().config_loader()


def search(config_dir: str | None) -> list[str]:
    return [] if config_dir is None else [f"hydra.searchpath=['file://{quoted(Path(config_dir).absolute())}']"]


def quoted(path: Path) -> str:
    """For use between single quotes in an override."""
    return str(path).replace("\\", "\\\\").replace("'", "\\'")
