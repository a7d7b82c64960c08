"""Whatever follows the command is a config or is refused in one line: random overrides, right and wrong."""

import random
import string

import pytest
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

import normexp
from normexp import commandline, config
from normexp.fields import UserError, show

TOLD = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError)  # what exit_code tells in one line
GROUPS = {path.name: [file.stem for file in path.glob("*.yaml")] for path in normexp.CONF.iterdir() if path.is_dir()}
VALUES = [
    "", "null", "true", "FALSE", "0", "1", "2", "-1", "3.5", "1e-3", ".001", "1e400", "-inf", "nan", "9" * 400, "0x10",
    "1_000", "abc", "'1'", '"quoted"', "'", '"', "[1,2]", "[", "[0.9,0.98]", "[0.9,0.98,1]", "[]", "{a:1}", "{}", "{",
    "${model.width}", "${nowhere}", "${oc.env:HOME}", "${oc.env:NO_SUCH_NAME}", "${", "$", "???", "1,2", "range(1,3)",
    "choice(1,2)", "glob(*)", "interval(1,2)", "a=b", "a b", "é", "\U0001f600", "\x00", "a\nb", "~", "~/x", "/", "..",
    "x" * 5000, "\\", "#", "%", "@", "1e-3 ", "float(1)", "int('3')", "str(4)", "null,null",
]  # fmt: skip


def defaults() -> dict[str, str]:
    """Every field of every choice, and those at the top, with its value there."""
    found = {"seed": "0", "device": "cpu"}
    for file in sorted(normexp.CONF.glob("*/*.yaml")):
        text, group = file.read_text(encoding="utf-8"), file.parent.name
        own = {} if "@package" in text else yaml.safe_load(text) or {}
        found |= {f"{group}.{name}": show(value) for name, value in own.items() if not name.startswith("_")}
    return found


def drawn(draw: random.Random, values: dict[str, str]) -> str:
    """A choice, a field with some value, or something mistyped."""
    kind, name = draw.random(), draw.choice(sorted(values))
    if kind < 0.2:
        group = draw.choice(sorted(GROUPS))
        return f"{group}={draw.choice([*GROUPS[group], *GROUPS[group], *VALUES, group.upper(), 'rsm'])}"
    if kind < 0.6:
        return f"{name}={values[name]}"
    value = draw.choice([*VALUES, str(draw.randint(-3, 600)), f"{draw.random():.4g}"])
    if draw.random() < 0.2:  # a slip of the finger
        place = draw.randrange(len(name))
        name = name[:place] + draw.choice([*string.ascii_lowercase, ".", "", "="]) + name[place + 1 :]
    prefix = draw.choice(["", "", "", "", "", "+", "++", "~"])
    return prefix + name + draw.choice(["=", "=", "=", "=", "=", "", ":", "==", " = "]) + value


def outcome(overrides: list[str], tmp_path) -> str:
    """`a config`, or the one line."""
    try:
        command = commandline.parse([*overrides, f"results='{tmp_path}'"])
        composed = commandline.compose(command.overrides)
        config.load(composed.values, composed.choices, composed.folder)
    except TOLD as error:
        line = commandline.explain(error)
        assert line
        assert "\n" not in line, line
        assert len(line) < 2000, line
        return line
    return "a config"


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_overrides_are_composed_or_refused_in_one_line(count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, values = random.Random(count), defaults()
    outcomes = []
    for _ in range(count):
        overrides = [drawn(draw, values) for _ in range(draw.choice([1, 1, 1, 2, 3]))]
        try:
            outcomes.append(outcome(overrides, tmp_path))
        except Exception as error:
            pytest.fail(f"{overrides}: {type(error).__name__}: {error}")
    composed = outcomes.count("a config")
    assert 0.1 * count < composed < 0.7 * count  # right and wrong ones
    assert list(tmp_path.iterdir()) == []
