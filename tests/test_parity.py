"""Recipes against the published models' own code, with random weights mapped over: logits, and every gradient."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normexp import commandline
from normexp.convert import FAMILIES, files, load_model, names
from normexp.convert.files import import_folder
from tests import hub, tiny, zoo

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = hub.model(request.param)
    theirs.save_pretrained(folder / "theirs")
    import_folder(folder / "theirs", folder / "ours")
    return FAMILIES[request.param], load_model(folder / "ours"), theirs


def test_logits(pair):
    """The same to 1e-5 in float32: both sum the same few dozen products, in other orders."""
    _, ours, theirs = pair
    expected = theirs(hub.TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours(hub.TOKENS), expected, atol=1e-5, rtol=1e-5)


def test_gradients(pair):
    """Of the loss by every parameter, to 1e-4 of the largest of its entries."""
    family, ours, theirs = pair
    for logits in (ours(hub.TOKENS), theirs(hub.TOKENS).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), hub.TOKENS[:, 1:].flatten()).backward()
    tied = ours.config.tied
    mapped = names.to_theirs(family.names, {n: p.grad for n, p in ours.named_parameters(remove_duplicate=False)}, tied)
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert set(mapped) == set(expected)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        # an exact 0 (of a key's bias, which a softmax does not see) is rounding on both sides
        torch.testing.assert_close(mapped[name], gradient, atol=max(1e-4 * scale, 1e-7), rtol=0, msg=name)


@pytest.mark.parametrize(("kind", "parameters"), [
    ("gpt2", 124_439_808), ("llama", 6_738_415_616), ("gemma2", 2_614_341_888), ("olmo2", None),
])  # fmt: skip
def test_published_sizes(kind, parameters):
    """The README's overrides give as many parameters as the family's default config, which is the published one."""
    transformers = pytest.importorskip("transformers")
    (row,) = re.findall(rf"^\| `{kind}` \|.*`\w+(?:LMHeadModel|ForCausalLM)` \|.*", README.read_text(), re.M)
    overrides = re.findall(r"model\S*?=[^ `]+", row.split("|")[-2])
    assert overrides
    config = transformers.AutoConfig.for_model(kind)
    composed = commandline.compose([f"recipe={kind}", *overrides]).values
    ours = files.build({part: composed[part] for part in files.PARTS}, config.vocab_size, "meta")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters()) == (parameters or count)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_the_block_of_2017_is_torchs(placement, activation):
    ours = zoo.disturbed(tiny.model("ln", zoo.PLACEMENTS[placement], mlp=activation)).blocks[0]
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0.0, activation=activation, batch_first=True, norm_first=placement == "pre"
    )
    suffix = {"post": "residual", "pre": "in"}[placement]
    norms = {"norm1": ours.norm[f"attn_{suffix}"], "norm2": ours.norm[f"mlp_{suffix}"]}
    linears = {"self_attn.out_proj": ours.attn.o, "linear1": getattr(ours.mlp, "in"), "linear2": ours.mlp.out}
    parts = [getattr(ours.attn, name) for name in "qkv"]
    state = {
        f"{name}.{kind}": getattr(module, kind)
        for name, module in (norms | linears).items()
        for kind in ("weight", "bias")
    }
    state |= {f"self_attn.in_proj_{kind}": torch.cat([getattr(p, kind) for p in parts]) for kind in ("weight", "bias")}
    theirs.load_state_dict(state)
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [ours(inputs[0], None), theirs(inputs[1], src_mask=mask, is_causal=True)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.attn.q.weight.grad, theirs.self_attn.in_proj_weight.grad[:16], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.mlp.out.weight.grad, theirs.linear2.weight.grad, atol=1e-4, rtol=1e-4)
