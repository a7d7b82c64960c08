"""What a choice names: a class, of this package or of the user's own, and the arguments that its yaml holds for it."""

import functools
import hashlib
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from normexp.fields import UserError, cast_arguments


def locate(dotted: str, path: str) -> Callable[..., Any]:
    """The class or function at `package.module.name`."""
    module, _, name = dotted.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's own code
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path}._target_={dotted}: cannot be imported ({reason}); give the dotted name of a class in a module "
            "that is installed or lies in the current directory"
        ) from error
    if not callable(target):
        raise UserError(f"{path}._target_={dotted}: is not a class or function")
    return target


def factory(
    node: Any, path: str, provided: Collection[str] = (), first_positional: bool = False
) -> functools.partial[Any]:
    if not isinstance(node, Mapping) or not isinstance(node.get("_target_"), str):
        raise UserError(f"{path}._target_: is missing; give the dotted name of a class")
    target = locate(node["_target_"], path)
    if first_positional:
        provided = list(inspect.signature(target).parameters)[:1]
    return functools.partial(target, **cast_arguments(node, target, path, provided))


def own_code(target: Callable[..., Any]) -> dict[str, str]:
    """The hash of the user's own module: a run is its config, and here its code is the config. None for this package,
    whose numbers have a version in `runs`."""
    if is_ours(target):
        return {}
    try:
        return {"_code_": hashlib.sha256(Path(str(inspect.getsourcefile(target))).read_bytes()).hexdigest()[:16]}
    except (OSError, TypeError):  # of a compiled module
        return {}


def is_ours(target: Callable[..., Any]) -> bool:
    return str(getattr(target, "__module__", "")).partition(".")[0] == "normexp"
