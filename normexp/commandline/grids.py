"""What -m asks for: the cells of a grid, what each is called with, and their launch."""

import copy
import functools
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from normexp.commandline.base import Command, Composed, loader, make_importable, plain, quoted, search
from normexp.fields import UserError, cast

PROCESSES = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"  # of hydra/launcher=local


class WorkerDied(Exception):
    """A process that ran cells was killed, and the launcher ended the others with it."""


@dataclass(frozen=True)
class Grid:
    name: str | None  # of the sweep's file in conf/sweep/, None where the command spells the grid out
    results: str
    folder: Path  # the directory the command was given in
    launcher: str  # the choice of hydra/launcher
    processes: int | None  # that it starts on this machine, -1: as many as fit; None: it starts none
    missing: str | None  # the package that the launcher lacks, so that the cells run in sequence
    overrides: list[str]  # what all cells share
    cells: list[tuple[list[str], Callable[[], Composed]]]  # the overrides of each, and its config


def compose_grid(command: Command) -> Grid:
    """Every cell of a sweep, as Hydra's sweeper will make it; any mistake in a choice or a name is raised here."""
    make_importable(Path.cwd())
    with loader() as composer:
        given, missing = [*command.overrides, *search(command.config_dir)], None
        common = composer.load_configuration("config", given, RunMode.MULTIRUN)
        choices, launcher = common.hydra.runtime.choices, common.hydra.launcher
        if choices["hydra/sweeper"] != "basic":
            raise UserError("hydra/sweeper: this program lists the cells of a sweep; give hydra/sweeper=basic")
        if launcher._target_ == PROCESSES and not _installed(PROCESSES):
            own = ("hydra/launcher=", "hydra.launcher.", "+hydra.launcher.")
            given, missing = [o for o in given if not o.startswith(own)], "hydra-joblib-launcher"
        params = [f"{name}={value}" for name, value in (common.hydra.sweeper.params or {}).items()]
        overrides = OverridesParser.create(composer).parse_overrides([*params, *common.hydra.overrides.task])
        configs = Configs(composer, common)
        cells = [(cell, configs(cell)) for cell in BasicSweeper.split_arguments(overrides, None)[0]]
        return Grid(
            name=choices.get("sweep"),
            results=common.results,
            folder=Path(common.hydra.runtime.cwd),
            launcher=choices["hydra/launcher"],
            processes=_processes(launcher) if missing is None else None,
            missing=missing,
            overrides=given,
            cells=cells,
        )


def _processes(launcher: DictConfig) -> int | None:
    if launcher._target_ != PROCESSES:
        return None
    number: int = cast(launcher.get("n_jobs"), int, "hydra.launcher.n_jobs")
    if number != -1 and number < 1:
        raise UserError(f"hydra.launcher.n_jobs={number}: give a number of processes, or -1 for as many as fit")
    return number


def _installed(target: str) -> bool:
    try:
        return importlib.util.find_spec(target.rpartition(".")[0]) is not None
    except ModuleNotFoundError:
        return False


class Configs:
    """The configs of cells that differ in values more often than in choices. To compose files takes Hydra 70 ms, so
    each set of choices is composed once, and Hydra's own function then sets the values of a cell in a copy of it."""

    def __init__(self, composer: Any, common: DictConfig) -> None:
        self.composer, self.common = composer, common
        self.choices = set(common.hydra.runtime.choices)
        self.chosen: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
        self.parsed: dict[str, Override] = {}

    def __call__(self, cell: Sequence[str]) -> Callable[[], Composed]:
        """To be called for what may be refused in this cell alone."""
        choosing = tuple(override for override in cell if self._chooses(override))
        own, about = self._compose(choosing)
        try:
            rest = [self._parse(override) for override in cell if override not in choosing]
            own = copy.deepcopy(own)
            ConfigLoaderImpl._apply_overrides_to_config(rest, own)
        except Exception:  # in Hydra's words, which tell of the whole cell
            own, about = self._split(self.composer.load_sweep_config(self.common, list(cell)))
        return functools.partial(plain, own, about)

    def _chooses(self, override: str) -> bool:
        name = override.partition("=")[0]
        return name in self.choices or name.startswith(("+", "~", "hydra.")) or "@" in name

    def _compose(self, choosing: tuple[str, ...]) -> tuple[DictConfig, DictConfig]:
        if choosing not in self.chosen:
            self.chosen[choosing] = self._split(self.composer.load_sweep_config(self.common, list(choosing)))
        return self.chosen[choosing]

    @staticmethod
    def _split(cfg: DictConfig) -> tuple[DictConfig, DictConfig]:
        own = OmegaConf.masked_copy(cfg, [str(name) for name in cfg if name != "hydra"])
        OmegaConf.set_struct(own, True)  # as of the whole, so that an unknown field is refused
        return own, cfg.hydra

    def _parse(self, override: str) -> Override:
        if override not in self.parsed:
            self.parsed[override] = OverridesParser.create().parse_override(override)
        return self.parsed[override]


def launch_grid(
    grid: Grid, cells: Sequence[Sequence[str]], task: Callable[[Any], Any], folder: Path, processes: int | None
) -> list[Any]:
    """What `task` returned for each of the cells. It is a function of a module, for launchers that send it to other
    processes. `folder`: for what Hydra writes about the sweep. Raises WorkerDied."""
    own = [f"hydra.sweep.dir='{quoted(folder)}'", *([f"hydra.launcher.n_jobs={processes}"] if processes else [])]
    with loader() as composer:
        common = composer.load_configuration("config", [*grid.overrides, *own], RunMode.MULTIRUN)
        context = HydraContext(config_loader=composer, callbacks=Callbacks(common))
        launcher = Plugins.instance().instantiate_launcher(context, task, common)
        try:
            return [job.return_value for job in launcher.launch([list(cell) for cell in cells], initial_job_idx=0)]
        except BrokenProcessPool as error:
            raise WorkerDied from error
