"""A user's own norm and placement, tried before anything is created."""

import pytest
import torch

from normexp import train
from normexp.config import probes
from normexp.fields import UserError
from tests.tiny import SHORT, load


@pytest.fixture
def my_folder(tmp_path, monkeypatch):
    """A directory that a command is given in, with a choice of the user's own for norm and placement."""
    for group, target in (("norm", "my_norms.MyNorm"), ("placement", "my_blocks.MyBlock")):
        (tmp_path / "my_conf" / group).mkdir(parents=True)
        (tmp_path / "my_conf" / group / "mine.yaml").write_text(f"_target_: {target}\n_partial_: true\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


LEAKY = """
import torch
from torch import nn

class Leaky(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, mask=None):
        self.calls += 1
        return (1 + torch.rand(())) * x / (x.square().MEAN + 1e-5).sqrt()
"""
OVER_POSITIONS, CAUSAL = "mean(1, keepdim=True)", "cumsum(1)"


@pytest.mark.parametrize(
    ("mean", "training_only", "declared", "refused"),
    [
        (OVER_POSITIONS, False, "", True),
        (OVER_POSITIONS, True, "", True),
        (OVER_POSITIONS, False, "causal = False", False),
        ("roll(-1, 1)", False, "", True),
        ("roll(-9, 1)", False, "causal = True", True),
        ("mean((1, 2), keepdim=True)", False, "", True),
        ("mean(-1, keepdim=True)", False, "", False),
        ("mean(0, keepdim=True)", False, "", False),
        (CAUSAL, False, "", False),
    ],
)
def test_a_norm_of_the_users_own_that_sees_later_tokens_says_so(
    my_folder, request, mean, training_only, declared, refused
):
    """Whatever it draws, and whatever it keeps from call to call; and neither random numbers nor strictness are left
    changed."""
    module = f"leaky_{request.node.callspec.indices['mean']}"
    code = LEAKY.replace("MEAN", mean).replace("Leaky(nn.Module):", f"Leaky(nn.Module):\n    {declared}")
    if training_only:
        code = code.replace("self.calls += 1", "if not self.training: return x")
    (my_folder / f"{module}.py").write_text(code)
    before = torch.get_rng_state()
    given = ("norm=mine", f"norm._target_={module}.Leaky", "device=cpu")
    if not refused:
        assert load(*given, config_dir="my_conf").norm(4).calls == 0
    else:
        with pytest.raises(UserError, match=r"^norm=mine: its training output changes with later .*`causal = False`"):
            load(*given, config_dir="my_conf")
        assert load(*given, "model.context=1", config_dir="my_conf")  # there is no later token
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["bn", "rbn", "switch", "power", "ln", "rms", "prms", "dyt"])
def test_the_probe_finds_what_our_own_norms_declare(name):
    made = load(f"norm={name}").norm
    sees = probes.sees_later_tokens(made, name, 64, probes.LENGTH, torch.device("cpu"))
    assert sees != getattr(made(64), "causal", True)


def test_a_norm_that_gives_two_outputs_is_not_taken_for_one_that_sees_ahead(my_folder):
    code = LEAKY.replace("torch.rand(())", "__import__('random').random()").replace("MEAN", "mean(-1, keepdim=True)")
    (my_folder / "moody_norms.py").write_text(code)
    made = load("norm=mine", "norm._target_=moody_norms.Leaky", config_dir="my_conf").norm
    x = torch.ones(1, 2, 4)
    assert not torch.equal(made(4)(x), made(4)(x))


def test_a_gain_that_begins_at_0_hides_nothing(my_folder):
    code = LEAKY.replace("MEAN", OVER_POSITIONS).replace("(1 + torch.rand(()))", "self.gain")
    code = code.replace(
        "        self.register", "        self.gain = nn.Parameter(torch.zeros(dim))\n        self.register"
    )
    (my_folder / "closed_norms.py").write_text(code)
    with pytest.raises(UserError, match=r"^norm=mine: its training output changes with later"):
        load("norm=mine", "norm._target_=closed_norms.Leaky", config_dir="my_conf")


BLOCK = """
from normexp.placements import Block

class MyBlock(Block):
    sites = ("attn_in", "mlp_hidden")
    final_norm = True

    def forward(self, x, mask):
        x = x + self.attn(self.norm["attn_in"](x, mask), mask)
        return x + self.mlp(x, mask, self.norm)
"""
FORWARD = BLOCK[BLOCK.index("    def forward") :]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            'sites = ("attn_in", "mlp_hidden")',
            "",
            "cannot be built (AttributeError: 'MyBlock' object has no attribute 's",
        ),
        (
            "final_norm = True",
            "",
            "cannot be built (AttributeError: 'MyBlock' object has no attribute 'final_norm'); it",
        ),
        (
            FORWARD,
            "",
            "cannot be called (NotImplementedError: MyBlock has no forward); it must be a Block with `sites`",
        ),
        ('self.norm["attn_in"]', 'self.norm["attn"]', "cannot be called (KeyError: 'attn'); it must be a Block with"),
        (
            '"mlp_hidden"',
            '"mlp_hiden"',
            "no block calls its norm at mlp_hiden; call it, or give one of the names inside",
        ),
        ("self.mlp(x, mask, self.norm)", "self.mlp(x, mask, self.norm)[:, :0]", "cannot be called (RuntimeError: "),
        ("MyBlock(Block)", "MyBlock(__import__('torch').nn.Module)", "cannot be built (TypeError: "),
    ],
)
def test_a_placement_of_the_users_own_that_cannot_be_one_is_refused_before_the_run(
    my_folder, request, capfd, old, new, line
):
    """By one line that nothing stands beside, and no folder is left."""
    assert old in BLOCK
    module = f"blocks_{request.node.callspec.indices['old']}"
    (my_folder / f"{module}.py").write_text(BLOCK.replace(old, new))
    (my_folder / "my_conf" / "placement" / "mine.yaml").write_text(f"_target_: {module}.MyBlock\n_partial_: true\n")
    before = {*my_folder.iterdir()}
    command = ["--config-dir=my_conf", "placement=mine", *SHORT]
    assert train.main(command) == 2
    (told,) = capfd.readouterr().err.splitlines()
    assert told.startswith(f"error: placement=mine: {line}")
    assert {path for path in my_folder.iterdir() if path.name != "__pycache__"} == before


ALONE = "return x + self.mlp(x, mask, self.norm)"


@pytest.mark.parametrize(
    ("mixing", "declared", "norm", "refused"),
    [
        ("x.mean(1, keepdim=True)", "", "ln", True),
        ("self.gate * x.roll(-1, 1)", "", "ln", True),
        ("x.mean(1, keepdim=True)", "causal = False", "ln", False),
        ("x.cumsum(1)", "", "ln", False),
        ("x.mean(-1, keepdim=True)", "", "bn", False),  # the norm says it itself
    ],
)
def test_a_placement_of_the_users_own_that_mixes_positions_says_so(my_folder, request, mixing, declared, norm, refused):
    module = "mixing_" + "_".join(map(str, request.node.callspec.indices.values()))
    code = BLOCK.replace(ALONE, f"{ALONE} + {mixing}").replace(
        "final_norm = True", f"final_norm = True\n    {declared}"
    )
    code += """
    def __init__(self, **given):
        super().__init__(**given)
        import torch
        self.gate = torch.nn.Parameter(torch.zeros(()))
"""
    (my_folder / f"{module}.py").write_text(code)
    given = (f"norm={norm}", "placement=mine", f"placement._target_={module}.MyBlock", "model.mlp=gelu")
    if refused:
        with pytest.raises(UserError, match=r"^placement=mine: a token's logits change with later tokens"):
            load(*given, config_dir="my_conf")
    else:
        load(*given, config_dir="my_conf")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("x = x + self.attn", "if self.layer % 3 == 2: x = x + self.attn", ""),
        ("x = x + self.attn", "if 0 < self.layer < self.depth - 1: x = x + self.attn", ""),
        ('self.norm["attn_in"]', 'self.norm["attn_in" if self.layer != 2 else "attn"]', "KeyError: 'attn'"),
    ],
)
def test_every_block_of_a_placement_is_tried(my_folder, request, old, new, fault):
    module = f"by_depth_{request.node.callspec.indices['old']}"
    (my_folder / f"{module}.py").write_text(BLOCK.replace(old, new))
    given = ("placement=mine", f"placement._target_={module}.MyBlock", "model.depth=6")
    if fault:
        with pytest.raises(UserError, match=f"^placement=mine: cannot be called .{fault}"):
            load(*given, config_dir="my_conf")
    else:
        load(*given, config_dir="my_conf")


def test_a_placement_is_tried_once_for_all_cells_that_share_it(my_folder, monkeypatch):
    (my_folder / "tried.py").write_text(BLOCK)
    tried, attempt = [], probes._try
    monkeypatch.setattr(probes, "_try", lambda *given: tried.append(None) or attempt(*given))
    given = ("placement=mine", "placement._target_=tried.MyBlock")
    for other in ("seed=0", "seed=1", "optim.lr=1e-2", "model.depth=3", "norm=rms", "seed=2"):
        load(*given, other, config_dir="my_conf")
    assert len(tried) == 3


def test_a_placement_of_the_users_own_may_differ_by_block(my_folder):
    """A site that one block calls is called; random numbers are left as they were."""
    (my_folder / "differing.py").write_text(BLOCK.replace("x = x + self.attn", "if self.layer: x = x + self.attn"))
    before = torch.get_rng_state()
    given = ("placement=mine", "placement._target_=differing.MyBlock", "norm=bn", "model.mlp=gelu", "device=cpu")
    assert load(*given, config_dir="my_conf").cell["placement"] == "mine"
    assert torch.equal(torch.get_rng_state(), before)
