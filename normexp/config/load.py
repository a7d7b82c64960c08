"""From a composed config to a checked one."""

import functools
import glob
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from normexp.choices import factory, own_code
from normexp.config import combinations, sizes
from normexp.config.tree import BY_BLOCK, CELL, Config, Tree
from normexp.fields import UserError, cast_dataclass


def load(node: Mapping[str, Any], choices: Mapping[str, Any], folder: Path) -> Config:
    """`node`: interpolations resolved. `choices`: names of the chosen files, by group. `folder`: the directory the
    command was given in, which relative paths start from."""
    tree = cast_dataclass(node, Tree, "")
    for group in CELL:
        if not isinstance(choices.get(group), str):  # a list such as norm=[ln,bn]
            raise UserError(f"{group}: is not one choice; give {group}=<name>")
    arguments = {
        "norm": factory(tree.norm, "norm", first_positional=True),
        "placement": factory(tree.placement, "placement", provided=BY_BLOCK),
        "data": factory(tree.data, "data", provided=("cache",)),
    }
    for name in ("path", "name"):
        given = arguments["data"].keywords.get(name)
        if given and (name == "path" or os.path.exists(absolute(given, folder)) or glob.has_magic(given)):
            arguments["data"].keywords[name] = str(absolute(given, folder))
    config = Config(
        **{**vars(tree), **arguments, "device": _device(tree.device), "results": absolute(tree.results, folder)},
        cell={group: choices[group] for group in (*CELL, "recipe") if choices.get(group) is not None},
        resolved={},
    )
    config.resolved.update(_resolved(tree, arguments, config))
    sizes.check(config)
    combinations.check(config)
    return config


def absolute(path: str | Path, folder: Path) -> Path:
    """`path` as seen from `folder`; `~` is the home directory."""
    return Path(os.path.normpath(folder / Path(path).expanduser()))


def _resolved(tree: Tree, choices: Mapping[str, functools.partial[Any]], config: Config) -> dict[str, Any]:
    """Plain values only; paths absolute. `device` stays as given, since `auto` is no fact about the run."""
    plain: dict[str, Any] = asdict(tree) | {"results": config.results, "cell": config.cell}
    for group, chosen in choices.items():
        target = getattr(tree, group)["_target_"]
        plain[group] = {"_target_": target, "_partial_": True, **chosen.keywords, **own_code(chosen.func)}
    resolved: dict[str, Any] = _plain(plain)
    return resolved


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _device(name: str) -> torch.device:
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, present in available.items() if present))
    if not available[name]:
        there = " or ".join(f"device={kind}" for kind, present in available.items() if present)
        raise UserError(f"device={name}: torch finds none on this machine; give device=auto or {there}")
    return torch.device(name)
