"""From overrides to a checked config: defaults, casts, cross-checks, paths, and the hash at the end of it."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from hydra.errors import HydraException

import normexp
from normexp import commandline, config, norms, placements, runs
from normexp.fields import UserError
from normexp.model import Transformer
from tests.test_data import KJV_TEXT_SHA256
from tests.tiny import load

MINE = """
import torch
from torch import nn

class MyNorm(nn.Module):
    def __init__(self, dim: int, *, eps: float, power: int = 2) -> None:
        super().__init__()
        self.dim, self.eps, self.power = dim, eps, power
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x, mask=None):
        return x / (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps) ** (1 / self.power) * self.weight
"""


def refusal(*overrides: str) -> str:
    """The one line that the command line would print."""
    with pytest.raises((UserError, HydraException)) as refused:
        load(*overrides)
    line = commandline.explain(refused.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def default() -> config.Config:
    return load()


def identity(*overrides: str) -> str:
    return runs.digest(load(*overrides).resolved, "corpus")


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["norm=rms"], "rms-pre-L6-w0-s0-0d10324103"),
        (["norm=ln", "placement=post"], "ln-post-L6-w0-s0-39e0053c8d"),
        (["norm=bn"], "bn-pre-L6-w0-s0-a8d5ce476a"),
    ],
)
def test_the_names_of_the_first_runs_are_golden(overrides, name):
    """A field added since then is neutral there. They may change only with NUMERICS, when a fix changes numbers."""
    assert runs.run_id(load(*overrides).resolved, KJV_TEXT_SHA256) == name


def test_the_defaults_tell_the_story(default):
    assert default.cell == {"norm": "ln", "placement": "pre", "model": "tiny", "data": "kjv", "optim": "adamw"}
    optim, train, model = default.optim, default.train, default.model
    assert (optim.name, optim.lr, optim.betas, optim.warmup_steps) == ("adamw", 3e-3, (0.9, 0.98), 0)
    assert (optim.decay, optim.weight_decay, train.clip, model.dropout) == ("constant", 0.0, 0.0, 0.0)
    assert (train.steps, train.batch_size, train.grad_accum, train.threads) == (400, 8, 1, 1)
    assert (model.depth, model.width, model.heads, model.context, model.init) == (6, 64, 4, 64, "xavier")
    assert default.seed == 0


def test_choices_are_factories(default):
    norm = default.norm(8)
    assert isinstance(norm, norms.LayerNorm)
    assert norm.eps == 1e-5
    assert default.placement.func is placements.PreNorm
    assert load("norm=rms").norm(8).eps == 1e-6
    assert load("norm=bn", "placement=post").norm(8).momentum == 0.1


def test_gpt2_is_the_124_million_model():
    loaded = load("model=gpt2")
    with torch.device("meta"):
        built = Transformer(loaded.model, 50257, norm=loaded.norm, placement=loaded.placement)
    assert sum(parameter.numel() for parameter in built.parameters()) == 124_439_808
    assert (loaded.model.heads, loaded.model.init, loaded.model.mlp) == (12, "gpt2", "gelu")


def test_resolved_holds_plain_cast_values(default):
    assert default.resolved["optim"]["betas"] == [0.9, 0.98]
    assert default.resolved["results"] == str(Path.cwd() / "results")
    assert default.resolved["data"]["context"] == 64
    assert default.resolved["cell"] == default.cell
    assert "hydra" not in default.resolved


@pytest.mark.parametrize("spelling", ["optim.lr=1e-3", "optim.lr=1E-3", "optim.lr=.001", "optim.lr='1e-3'"])
def test_a_float_is_a_float_however_it_is_spelt(spelling):
    lr = load(spelling).optim.lr
    assert lr == 1e-3
    assert type(lr) is float


def test_spelling_and_the_name_of_a_choice_do_not_change_a_run():
    assert identity("norm.eps=1") == identity("norm.eps=1.0") == identity("norm.eps='1e0'")
    assert identity("optim.lr=3e-3", "tracker.mode=disabled", "results=/elsewhere") == identity()
    assert identity("norm.kernel=torch") != identity()
    assert identity("telemetry=dense") != identity()


REFUSED = [
    ("norm=rsm", "norm=rsm: there is no such choice (did you mean rms or prms?)"),
    ("norm=foo", "norm=foo: there is no such choice (there are: bn, derf, dyt, ln, none, power, prms, rbn, rms, rms_"),
    (
        "placement=foo",
        "placement=foo: there is no such choice (there are: admin, admin_fixed, b2t, deepnorm, hybrid, hyb",
    ),
    ("plcement=pre", "plcement=pre: there is no such field (did you mean placement"),
    ("+placment=pre", "placment=pre: there is no such field (did you mean placement?)"),
    ("norm.epss=1e-6", "norm.epss=1e-6: the chosen norm has no such field (did you mean norm.eps"),
    ("+norm.epss=1e-6", "norm.epss=1e-06: there is no such field (did you mean eps?)"),
    ("lr=1", "lr=1: there is no such field; did you mean optim.lr?"),
    ("norm.momentum=1", "norm.momentum=1: the chosen norm has no such field; it belongs to norm=bn"),
    ("+norm=bn", "+norm: is there already; leave out the +"),
    ("norm=ln,bn", "norm=ln,bn: is more than one value; add -m"),
    ("optim.lr=1,2", "optim.lr=1,2: is more than one value; add -m"),
    ("norm=[ln,bn]", "norm: is not one choice; give norm=<name>"),
    ("~norm", "norm: is missing; give a choice of that group"),
    ("data=text", "data.path: is missing; give data.path=<value>"),
    ("data.path=a=b", "data.path=a=b: is not field=value; quote a value"),
    ("norm", "norm: is not field=value; quote a value"),
    ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
    ("optim.lr=nan", "optim.lr=nan: must be a finite number > 0"),
    ("optim.lr=inf", "optim.lr=inf: must be a finite number > 0"),
    ("optim.lr=-1", "optim.lr=-1: must be a finite number > 0"),
    ("optim.lr=abc", "optim.lr=abc: must be a finite number > 0"),
    ("norm.eps=abc", "norm.eps=abc: must be a finite number > 0"),
    ("optim.betas=[.9,.98,.99]", "optim.betas=[0.9,0.98,0.99]: must be a list of exactly 2 values"),
    (
        "model.mlp=rellu",
        "model.mlp=rellu: must be one of relu, gelu, gelu_tanh, swiglu, geglu, moe (did you mean relu?)",
    ),
    ("train.threads=100000", "train.threads=100000: must be an integer in [1, 1024]"),
    ("train.steps=0", "train.steps=0: must be an integer >= 1"),
    (
        "model.mlp_ratio=0.001",
        "model.mlp_ratio=0.001: leaves an MLP of width 64 no hidden channel; give 0.015625 or more",
    ),
    ("seed=-1", "seed=-1: must be an integer >= 0"),
    ("seed=9223372036854775808", "seed=9223372036854775808: is too large; give 9223372036854775807 or less"),
    ("model.bias=1", "model.bias=1: must be true or false"),
    ("telemetry.metrics=[grad_nrm]", "telemetry.metrics=grad_nrm: there is no such metric (did you mean grad_norm"),
    (
        "norm._target_=nowhere.MyNorm",
        "norm._target_=nowhere.MyNorm: cannot be imported (ModuleNotFoundError: No module named 'nowhere')",
    ),
    (
        "norm._target_=normexp.norms.Nope",
        "norm._target_=normexp.norms.Nope: cannot be imported (AttributeError: module",
    ),
    ("hydra/launcher=rayy", "hydra/launcher=rayy: there is no such choice"),
]


@pytest.mark.parametrize(("override", "line"), REFUSED)
def test_a_mistake_gets_one_line_with_field_value_and_remedy(override, line):
    assert refusal(override).startswith(line)


def test_warmup_longer_than_the_run_is_refused_and_as_long_is_not():
    line = refusal("optim.warmup_steps=900", "train.steps=500")
    assert line == "optim.warmup_steps=900: is longer than train.steps=500; give 500 or less"
    assert load("optim.warmup_steps=500", "train.steps=500").optim.warmup_steps == 500
    assert load("train.steps=1").train.steps == 1


def test_width_must_be_a_multiple_of_heads():
    line = refusal("model.width=100", "model.heads=3")
    assert line == "model.heads=3: does not divide model.width=100; give another number, or a width of 99 or 102"
    assert load("model.width=99", "model.heads=3").model.width == 99


def test_rotary_needs_an_even_head():
    assert refusal("model.position=rotary", "model.width=6", "model.heads=2").startswith("model.position=rotary")
    assert load("model.position=rotary", "model.width=8", "model.heads=2").model.width == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that the test asks for in vain")
def test_a_device_that_is_not_there_is_refused():
    assert refusal("device=cuda").startswith(
        "device=cuda: torch finds none on this machine; give device=auto or device="
    )
    assert refusal("norm.kernel=triton").startswith("norm.kernel=triton: ")
    assert load("device=auto").device.type in ("cpu", "mps")


def test_bfloat16_is_fine_on_a_cpu():
    assert load("device=cpu", "train.dtype=bfloat16").train.dtype == "bfloat16"


def test_batch_norm_over_one_value_is_refused():
    line = refusal("norm=bn", "train.batch_size=1", "model.context=1")
    assert line.startswith("norm=bn: ")
    assert "train.batch_size=1 model.context=1" in line
    assert refusal("norm=bn", "norm.stats=position", "train.batch_size=1").startswith("norm=bn: ")
    assert load("norm=bn", "train.batch_size=1").train.batch_size == 1  # 64 tokens


def test_the_context_is_said_once():
    assert refusal("norm=bn", "norm.context=32").startswith("norm.context=32: is not model.context=64")
    assert load("norm=bn", "norm.stats=position", "model.context=32").norm(4).running_mean.shape == (32, 4)


def test_relative_paths_start_from_the_directory_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load("data=text", "data.path=sub/../a.txt", "results=out")
    assert loaded.results == tmp_path / "out"
    assert loaded.data.keywords["path"] == loaded.resolved["data"]["path"] == str(tmp_path / "a.txt")
    assert load("results='~/out'").results == Path(os.environ["HOME"]) / "out"
    assert load("results=/absolute").results == Path("/absolute")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a=b.txt", "a,b.txt", "a b.txt", "[a].txt", "{a}.txt", "a:b.txt"])
def test_file_names_with_special_signs_work_when_quoted(name):
    loaded = load("data=text", f"data.path='/corpus/{name}'")
    assert loaded.data.keywords["path"] == f"/corpus/{name}"


@pytest.fixture
def my_folder(tmp_path, monkeypatch):
    """A directory with a norm of the user's own, as a command given in it would see it."""
    (tmp_path / "my_norms.py").write_text(MINE)
    (tmp_path / "my_conf" / "norm").mkdir(parents=True)
    choice = "_target_: my_norms.MyNorm\n_partial_: true\neps: 1\n"
    (tmp_path / "my_conf" / "norm" / "mine.yaml").write_text(choice)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_norm_of_the_users_own_is_cast_and_checked_like_ours(my_folder):
    loaded = load("norm=mine", config_dir="my_conf")
    assert loaded.cell["norm"] == "mine"
    assert loaded.norm(4).dim == 4
    code = hashlib.sha256(MINE.encode()).hexdigest()[:16]
    assert loaded.resolved["norm"] == {"_target_": "my_norms.MyNorm", "_partial_": True, "eps": 1.0, "_code_": code}
    assert type(loaded.norm(4).eps) is float


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["norm.eps=abc"], "norm.eps=abc: must be a finite number"),
        (["+norm.powr=3"], "norm.powr=3: there is no such field (did you mean power?)"),
        (["+norm.power=1.5"], "norm.power=1.5: must be an integer"),
        (["~norm.eps"], "norm.eps: is missing; MyNorm needs a finite number"),
        (["norm._target_=my_norms.MyNrm"], "norm._target_=my_norms.MyNrm: cannot be imported"),
        (["norm._target_=my_norms.torch"], "norm._target_=my_norms.torch: is not a class or function"),
    ],
)
def test_mistakes_about_a_norm_of_the_users_own(my_folder, overrides, line):
    with pytest.raises((UserError, HydraException)) as refused:
        load("norm=mine", *overrides, config_dir="my_conf")
    assert commandline.explain(refused.value).startswith(line)


def test_a_norm_that_raises_when_built_is_named(my_folder):
    (my_folder / "broken_norms.py").write_text("def Broken(dim, *, eps):\n    raise RuntimeError(f'no {dim}')\n")
    with pytest.raises(UserError, match=r"^norm=mine: cannot be built for width 64 \(RuntimeError: no 64\)$"):
        load("norm=mine", "norm._target_=broken_norms.Broken", config_dir="my_conf")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def Odd(dim, *, eps):\n    return lambda x, mask: x\n", "must be a torch.nn.Module"),
        ("class Odd(nn.Module):\n def __init__(self, dim, *, eps): super().__init__()\n"
         " def forward(self, x): return x\n",
         "it fails (TypeError: Odd.forward() takes 2 positional arguments but 3 were given)"),
        ("class Odd(nn.Module):\n def __init__(self, dim, *, eps): super().__init__()\n"
         " def forward(self, x, mask=None): return x[..., :1]\n", "it returns [2,2,1]"),
    ],
)  # fmt: skip
def test_a_norm_that_cannot_be_one_is_refused_before_the_run(my_folder, code, fault, request):
    module = f"odd_{request.node.callspec.indices['code']}"
    (my_folder / f"{module}.py").write_text("from torch import nn\n" + code)
    with pytest.raises(
        UserError, match=r"^norm=mine: must be a torch\.nn\.Module called as norm\(x, mask\)"
    ) as refused:
        load("norm=mine", f"norm._target_={module}.Odd", config_dir="my_conf")
    assert fault in str(refused.value)


def test_the_code_of_the_users_own_norm_is_part_of_a_run(my_folder):
    (my_folder / "edited.py").write_text(MINE)
    given = ("norm=mine", "norm._target_=edited.MyNorm")
    before = load(*given, config_dir="my_conf").resolved
    (my_folder / "edited.py").write_text(MINE.replace("self.weight", "self.weight * 0"))
    after = load(*given, config_dir="my_conf").resolved
    assert runs.digest(before, "corpus") != runs.digest(after, "corpus")


def test_conf_is_found_inside_the_package_first_then_beside_it(tmp_path):
    package = tmp_path / "normexp"
    with pytest.raises(FileNotFoundError, match=f"neither {package / 'conf'} nor {tmp_path / 'conf'}"):
        normexp.find_conf(package)
    for folder in (tmp_path / "conf", package / "conf"):
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        assert normexp.find_conf(package) == folder


def test_a_norm_in_a_compiled_model_is_compiled_with_it():
    assert [config.norm_path(load("norm=rms", f"train.compile={wanted}")) for wanted in ("false", "true")] == [
        "native",
        "compile",
    ]
