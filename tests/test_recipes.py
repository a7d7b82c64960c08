"""Recipes: a published model by one word, whose parts the command line can still change."""

import subprocess
import sys

import pytest
import yaml

import normexp
from normexp import cell, commandline, results, runs
from normexp.report import study
from normexp.runs import RunFolder
from tests import fake_runs, tiny
from tests.tiny import load

RECIPES = sorted(path.stem for path in (normexp.CONF / "recipe").glob("*.yaml"))
SIZES = {"depth", "width", "heads", "head_width", "context", "dropout"}


def fields(name: str) -> dict:
    return yaml.safe_load((normexp.CONF / "recipe" / f"{name}.yaml").read_text())["model"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_a_model_is_and_not_how_large(name):
    """And no choice of size shows through: what model=small says beside its sizes is the recipe's to say."""
    plain, larger = (load(f"recipe={name}", f"model={size}").resolved["model"] for size in ("tiny", "small"))
    assert {field: plain[field] for field in SIZES} == {field: tiny.DEFAULTS[field] for field in SIZES}
    assert (larger["width"], larger["depth"]) == (256, 12)
    kept = set(plain) - SIZES
    assert {field: larger[field] for field in kept} == {field: plain[field] for field in kept}


PARTS = {  # norm and placement, and what an equation of the paper fixes
    "transformer2017": ("LayerNorm", "PostNorm", {"embed_scale": "sqrt", "position": "sinusoidal", "mlp": "relu"}),
    "gpt2": ("LayerNorm", "PreNorm", {"mlp": "gelu_tanh", "position": "learned", "tied": True, "init": "gpt2"}),
    "llama": ("RMSNorm", "PreNorm", {"mlp": "swiglu", "kv_heads": 2, "bias": False, "tied": False}),
    "gemma2": ("RMSNorm", "PeriNorm", {"attn_softcap": 50.0, "logit_softcap": 30.0, "local_layers": "even"}),
    "olmo2": ("RMSNorm", "Reordered", {"qk_norm": "full", "rotary_base": 500_000.0}),
    "deepnet": ("LayerNorm", "DeepNorm", {"init": "placement"}),
}
NORMS = {  # eps, cast, gain_offset
    "LayerNorm": (1e-5, "input", 0.0), "llama": (1e-6, "input", 0.0), "gemma2": (1e-6, "float32", 1.0),
    "olmo2": (1e-6, "float32", 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_parts_of_a_recipe(name):
    norm, placement, model = PARTS[name]
    resolved = load(f"recipe={name}").resolved
    assert resolved["norm"]["_target_"] == f"normexp.norms.{norm}"
    assert resolved["placement"]["_target_"] == f"normexp.placements.{placement}"
    assert model.items() <= resolved["model"].items()
    expected = NORMS.get(name, NORMS["LayerNorm"])
    assert tuple(resolved["norm"][field] for field in ("eps", "cast", "gain_offset")) == expected
    assert resolved["cell"]["recipe"] == name


def test_the_command_line_beats_a_recipe_in_any_order():
    for overrides in (
        ["recipe=gemma2", "norm=bn", "placement=post", "model.depth=2", "model.mlp=relu", "model.window=7"],
        ["model.window=7", "model.mlp=relu", "model.depth=2", "placement=post", "norm=bn", "recipe=gemma2"],
    ):
        loaded = load(*overrides)
        assert loaded.cell | {"norm": "bn", "placement": "post", "recipe": "gemma2"} == loaded.cell
        assert (loaded.model.depth, loaded.model.mlp, loaded.model.window) == (2, "relu", 7)
        assert loaded.model.attn_softcap == 50
        assert set(loaded.resolved["norm"]) == set(load("norm=bn").resolved["norm"])  # nothing of the recipe's norm


def test_a_run_is_its_values_and_not_the_name_of_a_recipe():
    spelt = ["norm=rms", "placement=pre", *(f"model.{field}={value}" for field, value in fields("llama").items())]
    plain, named = load(*spelt).resolved, load("recipe=llama").resolved
    assert "recipe" not in plain["cell"]
    assert runs.run_id(plain, "") == runs.run_id(named, "")


GOLDEN = {
    "deepnet": "2ae5200296", "gemma2": "c92eddc353", "gpt2": "053db22515", "llama": "015f12e7bc",
    "olmo2": "01c2380f33", "transformer2017": "94e0aaa975",
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_the_experts_of_a_recipe_are_its_mlp(name):
    """Whatever the size says; and without experts that is no part of a run's name, which is golden."""
    mlp = load(f"recipe={name}").model.mlp
    for size in ("tiny", "small"):
        assert load(f"recipe={name}", f"model={size}", "model.mlp=moe").model.expert_mlp == mlp
    assert runs.digest(load(f"recipe={name}").resolved, "c").startswith(GOLDEN[name])


@pytest.mark.parametrize(("override", "line"), [
    ("recipe=lama", "recipe=lama: there is no such choice (did you mean llama?)"),
    ("+recipe=llama", "+recipe: is there already; leave out the +"),
])  # fmt: skip
def test_mistakes(override, line):
    with pytest.raises(Exception) as raised:  # noqa: PT011 each is of a type of Hydra's own
        load(override)
    assert commandline.explain(raised.value).startswith(line)


def test_help_lists_recipes():
    command = [sys.executable, "-m", "normexp.train", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"recipe: {', '.join(RECIPES)}" in text
    assert "recipe=llama norm=ln" in text


def test_a_sweep_of_recipes_leaves_runs_that_name_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = commandline.parse(["-m", "recipe=gpt2,llama", "norm=ln,rms", *tiny.SHORT])
    composed = [config() for _, config in commandline.compose_grid(command).cells]
    assert [(one.choices["recipe"], one.choices["norm"]) for one in composed] == [
        ("gpt2", "ln"), ("gpt2", "rms"), ("llama", "ln"), ("llama", "rms"),
    ]  # fmt: skip
    loaded = load("recipe=llama", "norm=ln", *tiny.SHORT, "model.heads=2")
    folder = cell.run(loaded, cell.open_source(loaded), None, print, bar=False)
    assert RunFolder(folder.path).summary()["cell"]["recipe"] == "llama"
    row = results.read(results.locate(folder.path), results.re.compile("")).table.iloc[0]
    assert row["cell.recipe"] == "llama"


def test_a_report_tells_recipes_apart_by_their_name(tmp_path):
    """And a field that varies within a recipe by its own; without recipes, every field is told as before."""
    for recipe, mlp, ratios in (("gpt2", "gelu_tanh", (4.0,)), ("llama", "swiglu", (2.0, 3.0)), (None, "relu", (4.0,))):
        for ratio in ratios:
            node = fake_runs.config(
                "ln", "pre", 6, 0, 0, model__mlp=mlp, model__mlp_ratio=ratio, model__bias=not recipe
            )
            node["cell"] |= {"recipe": recipe} if recipe else {}
            fake_runs.write_run(tmp_path / "runs", node)
    found = study.study(results.read(results.locate(tmp_path), results.re.compile("")))
    assert found.factors[len(study.NAMED) :] == ("recipe", "model.mlp_ratio")
    cells = [(values["recipe"], values["model.mlp_ratio"]) for values, _ in found.cells()]
    assert cells == [("gpt2", 4.0), ("llama", 2.0), ("llama", 3.0), (None, 4.0)]


def test_a_report_tells_texts_apart_that_no_field_does(tmp_path):
    """A file that has changed between two seeds, or the user's own module, is another cell, and no twin."""
    for folder, told in (("text", "corpus"), ("code", "norm._code_")):
        for seed, version in ((0, "a"), (1, "b"), (0, "b")):
            node = fake_runs.config("ln", "pre", 6, 0, seed, data__path="c.txt")
            node["results"] = version  # another folder of what is otherwise one run
            node["norm"] |= {"_code_": version} if folder == "code" else {}
            known = {"corpus_sha256": version * 64} if folder == "text" else {}
            fake_runs.write_run(tmp_path / folder / "runs", node, **known)
        found = study.study(results.read(results.locate(tmp_path / folder), results.re.compile("")))
        assert found.factors[len(study.NAMED) :] == (told,)
        assert [len(rows) for _, rows in found.cells()] == [1, 2]
        assert not found.twins


def test_a_report_tells_corpora_apart_by_their_name(tmp_path):
    """A field that all have is told where it differs, one of one corpus's own where it differs within that corpus."""
    corpora = [("kjv", {}, "characters"), ("hf", {"name": "a", "split": "train"}, "bpe")]
    corpora += [("hf", {"name": "b", "split": "train"}, "bpe")]
    for names, told in ((1, ("data", "data.tokenizer")), (2, ("data", "data.tokenizer", "data.name"))):
        for choice, own, tokenizer in corpora[: names + 1]:
            node = fake_runs.config("ln", "pre", 6, 0, 0)
            node["data"] |= {"_target_": f"normexp.data.{choice}", "tokenizer": tokenizer, **own}
            node["cell"]["data"] = choice
            fake_runs.write_run(tmp_path / str(names) / "runs", node)
        found = study.study(results.read(results.locate(tmp_path / str(names)), results.re.compile("")))
        assert found.factors[len(study.NAMED) :] == told
