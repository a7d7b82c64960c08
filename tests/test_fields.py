"""The cast from config values to typed fields: right values, and refusals of one line."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from normexp.fields import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    UserError,
    cast,
    cast_arguments,
    cast_dataclass,
    describe,
    show,
    suggest,
)

GOOD = [
    (1, float, 1.0),
    ("1e-3", PositiveFloat, 1e-3),
    ("1E-3", PositiveFloat, 1e-3),
    (".001", PositiveFloat, 1e-3),
    (0, NonNegativeFloat, 0.0),
    (0.0, UnitInterval, 0.0),
    (1, Fraction, 1.0),
    (3, PositiveInt, 3),
    ("3", PositiveInt, 3),
    (4e2, PositiveInt, 400),
    (0, NonNegativeInt, 0),
    (2**62 + 1, NonNegativeInt, 2**62 + 1),  # not by way of a float, which would round it
    (True, bool, True),
    ("false", bool, False),
    ("9007199254740993", int, 9007199254740993),  # one more than a float can hold
    ("text", str, "text"),
    (2024, str, "2024"),
    (None, str | None, None),
    ("x", str | None, "x"),
    (2, int | float, 2),
    (2.5, int | float, 2.5),
    ("relu", Literal["relu", "gelu"], "relu"),
    ([0.9, 1], tuple[float, float], (0.9, 1.0)),
    ([], tuple[str, ...], ()),
    (["a", "b"], tuple[str, ...], ("a", "b")),
    ([1, 2], list[float], [1.0, 2.0]),
    ("a/b", Path, Path("a/b")),
    ({"free": 1}, Any, {"free": 1}),
]


@pytest.mark.parametrize(("value", "annotation", "expected"), GOOD)
def test_cast_gives_the_value_and_its_type(value, annotation, expected):
    result = cast(value, annotation, "field")
    assert result == expected
    assert type(result) is type(expected)


BAD = [
    (float("nan"), float),
    (float("inf"), PositiveFloat),
    ("nan", float),
    ("-inf", float),
    ("abc", PositiveFloat),
    ("", float),
    (None, float),
    (10**400, float),
    (-1, PositiveFloat),
    (0, PositiveFloat),
    (0, PositiveInt),
    (-1, NonNegativeInt),
    (1.5, PositiveInt),
    (1.0, UnitInterval),
    (1.01, Fraction),
    (True, int),
    (True, float),
    (1, bool),
    ("yes", bool),
    (1.5, str),
    (True, str),
    ("rellu", Literal["relu", "gelu"]),
    (True, Literal[1, 2]),
    ([0.9], tuple[float, float]),
    ([0.9, 0.98, 0.99], tuple[float, float]),
    (0.9, tuple[float, float]),
    ("grad_norm", tuple[str, ...]),
    ("a", int | None),
]


@pytest.mark.parametrize(("value", "annotation"), BAD)
def test_cast_refuses_in_one_line_with_field_and_value(value, annotation):
    with pytest.raises(UserError) as refused:
        cast(value, annotation, "optim.lr")
    message = str(refused.value)
    assert message.startswith(f"optim.lr={show(value)}: must be {describe(annotation)}")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (PositiveFloat, "a finite number > 0"),
        (PositiveInt, "an integer >= 1"),
        (UnitInterval, "a finite number in [0, 1)"),
        (Literal["relu", "gelu"], "one of relu, gelu"),
        (tuple[UnitInterval, UnitInterval], "a list of exactly 2 values, each a finite number in [0, 1)"),
        (str | None, "text (quoted, if it looks like a number) or null"),
    ],
)
def test_describe(annotation, words):
    assert describe(annotation) == words


def test_an_element_of_a_list_is_named():
    with pytest.raises(UserError, match=r"optim\.betas\[1\]=1: must be a finite number in \[0, 1\)"):
        cast([0.9, 1], tuple[UnitInterval, UnitInterval], "optim.betas")


def test_a_literal_nearly_hit_is_suggested():
    with pytest.raises(UserError, match=r"must be one of relu, gelu \(did you mean relu\?\)"):
        cast("rellu", Literal["relu", "gelu"], "model.mlp")


def test_show_spells_values_as_the_command_line_does():
    assert show([None, True, 1e-3, "a\nb"]) == "[null,true,0.001,a\\nb]"
    assert len(show("x" * 1000)) < 250


def test_suggest_names_near_options_or_all_of_a_few():
    assert suggest("rsm", ["bn", "ln", "rms"]) == " (did you mean rms?)"
    assert suggest("zzz", ["bn", "ln"]) == " (there are: bn, ln)"
    assert suggest("zzz", [f"option{i}" for i in range(100)]) == ""


@dataclass(frozen=True)
class Inner:
    rate: PositiveFloat


@dataclass(frozen=True)
class Outer:
    depth: PositiveInt
    inner: Inner
    free: Mapping[str, Any]


def test_cast_dataclass_casts_nested_fields():
    node = {"depth": "6", "inner": {"rate": 1}, "free": {"_target_": "a.B"}}
    assert cast_dataclass(node, Outer, "") == Outer(6, Inner(1.0), {"_target_": "a.B"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dept": 3}, r"dept=3: there is no such field \(did you mean depth\?\)"),
        ({"inner": {}}, r"inner\.rate: is missing; give a finite number > 0"),
        ({"inner": {"rate": 0}}, r"inner\.rate=0: must be a finite number > 0"),
        ({"inner": {"rate": 1, "rat": 2}}, r"inner\.rat=2: there is no such field \(did you mean rate\?\)"),
    ],
)
def test_cast_dataclass_refuses(change, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        cast_dataclass({"depth": 6, "inner": {"rate": 1}, "free": {}} | change, Outer, "")


class Norm:
    def __init__(self, dim: int, *, eps: PositiveFloat, cast: Literal["input", "float32"] = "input") -> None: ...


class Wrapper(Norm):
    def __init__(self, *args: Any, gain: NonNegativeFloat, **kwargs: Any) -> None: ...


class Unannotated:
    def __init__(self, dim, eps=1e-5, affine=True): ...


class Deferred:
    def __init__(self, dim: "Unknown", *, eps: float) -> None: ...  # noqa: F821


class Bare:
    pass


def test_cast_arguments_casts_by_the_constructor():
    node = {"_target_": "x.Norm", "_partial_": True, "eps": "1e-6"}
    assert cast_arguments(node, Norm, "norm", ["dim"]) == {"eps": 1e-6}


def test_cast_arguments_follows_kwargs_into_the_base_class():
    assert cast_arguments({"eps": 1, "gain": 2}, Wrapper, "norm", ["dim"]) == {"eps": 1.0, "gain": 2.0}
    with pytest.raises(UserError, match=r"norm\.epss=1: there is no such field \(did you mean eps\?\)"):
        cast_arguments({"epss": 1, "eps": 1, "gain": 2}, Wrapper, "norm", ["dim"])


def test_cast_arguments_without_annotations_goes_by_the_defaults():
    result = cast_arguments({"eps": 1}, Unannotated, "norm", ["dim"])
    assert type(result["eps"]) is float
    with pytest.raises(UserError, match=r"norm\.eps=abc"):
        cast_arguments({"eps": "abc"}, Unannotated, "norm", ["dim"])


def test_cast_arguments_bears_annotations_that_cannot_be_resolved():
    assert cast_arguments({"eps": 1}, Deferred, "norm", ["dim"]) == {"eps": 1.0}


@pytest.mark.parametrize(
    ("target", "node", "message"),
    [
        (Norm, {"eps": "abc"}, r"norm\.eps=abc: must be a finite number > 0"),
        (Norm, {}, r"norm\.eps: is missing; Norm needs a finite number > 0"),
        (Norm, {"eps": 1, "dim": 3}, r"norm\.dim=3: there is no such field"),
        (Bare, {"eps": 1}, r"norm\.eps=1: there is no such field"),
    ],
)
def test_cast_arguments_refuses(target, node, message):
    with pytest.raises(UserError, match=message):
        cast_arguments(node, target, "norm", ["dim"])


def test_a_function_with_kwargs_takes_any_name():
    def build(dim: int, **kwargs: Any) -> None: ...

    assert cast_arguments({"anything": "x"}, build, "norm", ["dim"]) == {"anything": "x"}
