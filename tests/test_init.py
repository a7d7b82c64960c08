"""Initial weights: their scale by scheme, and that a name decides its numbers whatever else the model holds."""

import math

import pytest
import torch

from tests import tiny

WIDTH, DEPTH = 64, 3
SMALL = (2 / (5 * WIDTH)) ** 0.5


def stds(scheme: str, **changes) -> dict[str, float]:
    built = tiny.model(init=scheme, width=WIDTH, depth=DEPTH, context=256, **changes)
    return {name: parameter.std().item() for name, parameter in built.named_parameters() if parameter.ndim > 1}


@pytest.mark.parametrize(("scheme", "qkv", "o", "into", "out", "embed", "head"), [
    ("xavier", (2 / 128) ** 0.5, (2 / 128) ** 0.5, (2 / 320) ** 0.5, (2 / 320) ** 0.5, 1.0, 1 / 8),
    ("gpt2", 0.02, 0.02 / 6**0.5, 0.02, 0.02 / 6**0.5, 0.02, 0.02),
    ("small", SMALL, SMALL / 6**0.5, SMALL, SMALL / 6**0.5, SMALL, SMALL),
    ("torch", 1 / (8 * 3**0.5), 1 / (8 * 3**0.5), 1 / (8 * 3**0.5), 1 / (16 * 3**0.5), 1.0, 1 / (8 * 3**0.5)),
])  # fmt: skip
def test_standard_deviation_of_every_matrix(scheme, qkv, o, into, out, embed, head):
    got = stds(scheme)
    expected = {"embed.token.weight": embed, "embed.position.weight": embed, "head.weight": head}
    for layer in range(DEPTH):
        parts = {"attn.q": qkv, "attn.k": qkv, "attn.v": qkv, "attn.o": o, "mlp.in": into, "mlp.out": out}
        expected |= {f"blocks.{layer}.{name}.weight": std for name, std in parts.items()}
    assert set(got) == set(expected)
    for name, std in expected.items():  # the relative error of a standard deviation of n draws is 1/√(2n): 4 of them
        size = 700 if name in ("head.weight", "embed.token.weight") else 4096
        assert got[name] == pytest.approx(std, rel=4 / math.sqrt(2 * size)), name


def test_biases_are_zero_but_under_torch():
    for scheme in ("xavier", "gpt2", "small"):
        assert all(not p.any() for name, p in tiny.model(init=scheme).named_parameters() if name.endswith("bias"))
    assert tiny.model(init="torch").blocks[0].attn.q.bias.abs().max() > 0.05


def test_tied_embedding_is_drawn_as_a_head():
    assert stds("xavier", tied=True)["embed.token.weight"] == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize("scheme", ["xavier", "gpt2", "small", "torch"])
def test_cells_share_every_common_parameter(scheme):
    """Norm, placement and depth change; what keeps its name keeps its numbers (depth-scaled ones their direction)."""
    first = dict(tiny.model("ln", "pre", init=scheme).named_parameters())
    for norm, placement in tiny.CELLS:
        second = dict(tiny.model(norm, placement, init=scheme).named_parameters())
        shared = [name for name in first if name in second and ".norm." not in name and "final_norm" not in name]
        assert len(shared) >= 2 * 12 + 4
        assert all(torch.equal(first[name], second[name]) for name in shared)
    deeper = dict(tiny.model("rms", "post", init=scheme, depth=4).named_parameters())
    assert torch.equal(first["blocks.1.attn.q.weight"], deeper["blocks.1.attn.q.weight"])


def test_seed_and_name_both_matter():
    first, second = (dict(tiny.model(seed=seed).named_parameters()) for seed in (0, 1))
    assert not torch.equal(first["blocks.0.attn.q.weight"], second["blocks.0.attn.q.weight"])
    assert not torch.equal(first["blocks.0.attn.q.weight"], first["blocks.0.attn.k.weight"])
    assert not torch.equal(first["blocks.0.attn.q.weight"], first["blocks.1.attn.q.weight"])
