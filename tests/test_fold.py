"""Folded norms: the same logits without a norm's parameters, or a refusal by name."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from normexp.fold import fold_norms
from normexp.model import ModelConfig, Transformer
from normexp.placements import PostNorm, PreNorm
from tests import tiny

TOKENS = torch.randint(0, tiny.VOCABULARY, (3, tiny.CONTEXT), generator=torch.Generator().manual_seed(0))


def trained(norm="ln", placement="pre", **changes):
    """A model whose gains, biases and running statistics are no longer what they were at the start."""
    trainer = tiny.trainer(norm, placement, **changes)
    for _ in range(3):
        trainer.take_step()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.model.named_parameters():
        if parameter.ndim <= 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        assert "norm" not in name or parameter.ndim == 0 or parameter.std() > 0.1
    return trainer.model.eval()


@pytest.mark.parametrize("norm", ["ln", "rms", "bn", "prms", "scale", "rbn", "power"])
@pytest.mark.parametrize("changes", [{}, {"mlp": "swiglu", "bias": False}, {"tied": True}, {"position": "rotary"}])
def test_folded_logits_are_the_same(norm, changes):
    model = trained(norm, **changes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = fold_norms(model)
    torch.testing.assert_close(folded(TOKENS), model(TOKENS), atol=2e-5, rtol=1e-4)  # float32 rounds differently
    wide = copy.deepcopy(model).double()
    torch.testing.assert_close(fold_norms(wide)(TOKENS), wide(TOKENS), atol=1e-10, rtol=1e-10)
    assert not [name for name, _ in folded.named_parameters() if "norm" in name]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(folded.embed.token.weight.float(), model.embed.token.weight)


@pytest.mark.parametrize("norm", ["ln", "rms"])
def test_a_gain_offset_is_folded_with_its_gain(norm):
    torch.manual_seed(0)
    norm = partial(tiny.NORMS[norm], gain_offset=1.0)
    model = Transformer(ModelConfig(**tiny.CONFIG), tiny.VOCABULARY, norm=norm, placement=PreNorm).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    torch.testing.assert_close(fold_norms(model)(TOKENS), model(TOKENS), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("norm", ["ln", "bn"])
def test_padded_rows_too(norm):
    model, mask = trained(norm), torch.arange(tiny.CONTEXT) < torch.tensor([[16], [9], [4]])
    torch.testing.assert_close(fold_norms(model)(TOKENS, mask)[mask], model(TOKENS, mask)[mask], atol=2e-5, rtol=1e-4)


def test_batch_norm_is_gone():
    kinds = {type(module).__name__ for module in fold_norms(trained("bn")).modules()}
    assert "BatchNorm" not in kinds
    assert "Identity" in kinds


def test_post_norm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.attn_residual: its output in PostNorm"):
        fold_norms(trained("ln", "post"))


def test_statistics_by_position_are_refused_by_name():
    norm = partial(tiny.NORMS["bn"], stats="position")
    model = Transformer(ModelConfig(**tiny.CONFIG), tiny.VOCABULARY, norm=norm, placement=PreNorm)
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.attn_in: cannot be folded: its running statistics"):
        fold_norms(model)


def test_a_norm_that_cannot_be_unfolded_is_refused_by_name():
    class Mine(nn.Module):
        def forward(self, x, mask=None):
            return x

    model = Transformer(ModelConfig(**tiny.CONFIG), tiny.VOCABULARY, norm=lambda dim: Mine(), placement=PreNorm)
    with pytest.raises(ValueError, match="Mine does not say how to `unfold`"):
        fold_norms(model)


@pytest.mark.parametrize("norm", ["dyt", "derf", "seednorm", "switch"])
def test_norms_that_are_more_than_a_scale_and_a_shift_are_refused_by_name(norm):
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.attn_in: \w+ does not say how to `unfold`"):
        fold_norms(tiny.model(norm))


def test_the_sites_that_a_placement_may_fold():
    assert set(PreNorm.feeds) == set(PreNorm.sites)
    assert PostNorm.feeds == {}  # the stream itself is normalised
