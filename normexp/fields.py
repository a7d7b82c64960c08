"""Types of config fields, and the one generic cast from what a yaml or a command line holds to what code receives.

Pure Python: no config framework and no torch. Every refusal is a `UserError` of one line: field, value, remedy.
"""

import difflib
import inspect
import math
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class UserError(Exception):
    """A mistake in what the user gave. The message is one line: it names the field, the value, and the remedy."""


@dataclass(frozen=True)
class Range:
    """Interval of allowed numbers; an end is included unless it is declared open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, number: float) -> bool:
        above = number > self.low if self.open_low else number >= self.low
        below = number < self.high if self.open_high else number <= self.high
        return above and below

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return ""
        if self.high == math.inf:
            return f"{'>' if self.open_low else '>='} {self.low:g}"
        if self.low == -math.inf:
            return f"{'<' if self.open_high else '<='} {self.high:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


PositiveInt = Annotated[int, Range(low=1)]
NonNegativeInt = Annotated[int, Range(low=0)]
PositiveFloat = Annotated[float, Range(low=0.0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(low=0.0)]
UnitInterval = Annotated[float, Range(low=0.0, high=1.0, open_high=True)]
Fraction = Annotated[float, Range(low=0.0, high=1.0)]


def cast(value: Any, annotation: Any, path: str) -> Any:
    """`value` as `annotation` wants it. Text that spells a number is read as one; nan, inf, and a bool for a number
    are refused; an integer given for a float becomes a float, so that 1 and 1.0 are the same config."""
    try:
        return _cast(value, annotation, path)
    except ValueError:
        raise UserError(
            f"{path}={show(value)}: must be {describe(annotation)}{_near_literal(value, annotation)}"
        ) from None


def cast_dataclass(node: Mapping[str, Any], cls: type[T], path: str) -> T:
    """An instance of the dataclass `cls`, every field cast; unknown and missing fields are refused. `path`: where
    the node stands in the config, empty for the top."""
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    _refuse_unknown(node, names, path)
    missing = [name for name in names if name not in node]
    if missing:
        raise UserError(f"{_join(path, missing[0])}: is missing; give {describe(hints[missing[0]])}")
    return cls(**{name: cast(node[name], hints[name], _join(path, name)) for name in names})


def cast_arguments(
    node: Mapping[str, Any], target: Callable[..., Any], path: str, provided: Collection[str] = ()
) -> dict[str, Any]:
    """Keyword arguments for `target`, each cast by the annotation of its parameter.

    `_target_` and `_partial_` are skipped. `provided`: parameters that the program passes itself; a yaml may not set
    them. No other keyword-only parameter without a default may be missing.
    """
    given = {name: value for name, value in node.items() if name not in ("_target_", "_partial_")}
    parameters, closed = _parameters(target)
    allowed = [name for name in parameters if name not in provided]
    if closed:
        _refuse_unknown(given, allowed, path)
    for name in allowed:
        if parameters[name].required and name not in given:
            raise UserError(f"{path}.{name}: is missing; {_name(target)} needs {describe(parameters[name].annotation)}")
    hints = {name: parameter.annotation for name, parameter in parameters.items()}
    return {name: cast(value, hints.get(name, Any), f"{path}.{name}") for name, value in given.items()}


def suggest(name: str, options: Iterable[str]) -> str:
    """The options nearest to a mistyped `name` as the end of a sentence: " (did you mean rms?)", or all of a few."""
    options = sorted(set(options))
    near = difflib.get_close_matches(name, options, n=3, cutoff=0.5)
    if not near and len(options) <= 24:
        return f" (there are: {', '.join(options)})" if options else ""
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def show(value: Any) -> str:
    """A value as the command line would spell it, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    text = str(value).encode("unicode_escape").decode() if "\n" in str(value) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def describe(annotation: Any) -> str:
    """What an annotation accepts, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        ranges = " ".join(str(item) for item in arguments[1:] if isinstance(item, Range))
        return f"{describe(arguments[0])} {ranges}".rstrip()
    if origin is Literal:
        return f"one of {', '.join(show(item) for item in arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(item) for item in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of exactly {len(arguments)} values, each {describe(arguments[0])}"
    if origin is Mapping:
        return "a choice of that group"
    if origin in (tuple, list):
        return f"a list such as [a,b], each value {describe(arguments[0])}"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "text (quoted, if it looks like a number)",
    }
    return {**names, Path: "a path", type(None): "null"}.get(annotation, _name(annotation))


def _cast(value: Any, annotation: Any, path: str) -> Any:
    """As `cast`; ValueError where the value does not fit."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return value
    if origin is Annotated:
        number = _cast(value, arguments[0], path)
        return _checked(number, [item for item in arguments[1:] if isinstance(item, Range)])
    if origin is Literal:
        return _member(value, arguments)
    if origin in (Union, types.UnionType):
        return _first_that_fits(value, arguments, path)
    if origin in (tuple, list):
        return _sequence(value, origin, arguments, path)
    if is_dataclass(annotation) and isinstance(annotation, type) and isinstance(value, Mapping):
        return cast_dataclass(value, annotation, path)
    scalar = {bool: _bool, int: _int, float: _float, str: _str, Path: _path, type(None): _none}.get(annotation)
    return scalar(value) if scalar else value


def _checked(number: Any, ranges: list[Range]) -> Any:
    if number is not None and any(number not in allowed for allowed in ranges):
        raise ValueError
    return number


def _member(value: Any, allowed: tuple[Any, ...]) -> Any:
    for item in allowed:
        if type(item) is type(value) and item == value:
            return item
    raise ValueError


def _first_that_fits(value: Any, alternatives: tuple[Any, ...], path: str) -> Any:
    for alternative in alternatives:
        try:
            return _cast(value, alternative, path)
        except (ValueError, UserError):
            continue
    raise ValueError


def _sequence(value: Any, origin: type, arguments: tuple[Any, ...], path: str) -> Any:
    items = value if isinstance(value, list | tuple) else _refuse()
    kinds = arguments if Ellipsis not in arguments and origin is tuple else (arguments[0],) * len(items)
    if len(items) != len(kinds):
        raise ValueError
    return origin(cast(item, kind, f"{path}[{i}]") for i, (item, kind) in enumerate(zip(items, kinds, strict=True)))


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "false": False}[value.lower()] if _is_bool_text(value) else _refuse()


def _is_bool_text(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in ("true", "false")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d+\s*", value):
        return int(value)  # exactly: a float has 53 bits
    number = _float(value)
    return int(number) if number.is_integer() else _refuse()


def _float(value: Any) -> float:
    try:
        number = float(value if isinstance(value, int | float | str) and not isinstance(value, bool) else _refuse())
    except OverflowError:
        raise ValueError from None
    return number if math.isfinite(number) else _refuse()


def _str(value: Any) -> str:
    # An integer is taken as its digits (a folder named 2024); a float or bool would not come back as it was typed.
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else _refuse()


def _path(value: Any) -> Path:
    return value if isinstance(value, Path) else Path(_str(value) or _refuse())


def _none(value: Any) -> None:
    if value is not None:
        raise ValueError


def _refuse() -> Any:
    raise ValueError


def _near_literal(value: Any, annotation: Any) -> str:
    if get_origin(annotation) is not Literal or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, [str(item) for item in get_args(annotation)], n=1, cutoff=0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refuse_unknown(node: Mapping[str, Any], names: Collection[str], path: str) -> None:
    for name, value in node.items():
        if name not in names:
            raise UserError(f"{_join(path, name)}={show(value)}: there is no such field{suggest(name, names)}")


def _name(target: Any) -> str:
    return str(getattr(target, "__qualname__", target))


@dataclass(frozen=True)
class _Parameter:
    annotation: Any
    required: bool  # keyword-only and without a default


def _parameters(target: Callable[..., Any]) -> tuple[dict[str, _Parameter], bool]:
    """Parameters that can be passed by keyword, and whether these are all. A class whose constructor hands `**kwargs`
    on also takes what its base takes."""
    lineage = inspect.getmro(target) if isinstance(target, type) else ()
    functions = [vars(c)["__init__"] for c in lineage if "__init__" in vars(c)] or [target]
    found: dict[str, _Parameter] = {}
    for function in functions:
        signature = inspect.signature(function).parameters
        found = {**_keywords(function, signature), **found}
        if not any(p.kind is p.VAR_KEYWORD for p in signature.values()):
            return found, True
    return found, bool(lineage)  # what reaches `object` by way of **kwargs, nothing takes


def _keywords(function: Callable[..., Any], signature: Mapping[str, inspect.Parameter]) -> dict[str, _Parameter]:
    hints = _annotations(function, signature)
    return {
        name: _Parameter(hints.get(name, Any), p.kind is p.KEYWORD_ONLY and p.default is p.empty)
        for name, p in signature.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name != "self"
    }


def _annotations(function: Callable[..., Any], signature: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Annotation by parameter. Where one is absent or cannot be resolved, the type of a plain default stands in."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError):  # names that exist only for a type checker
        hints = {name: p.annotation for name, p in signature.items() if not isinstance(p.annotation, str)}
    hints = {name: hint for name, hint in hints.items() if hint is not inspect.Parameter.empty}
    defaults = {name: type(p.default) for name, p in signature.items() if isinstance(p.default, bool | float | str)}
    return {**defaults, **hints}
