"""BatchNorm and its relatives: running statistics, RBN's penalty, the shares of SwitchableNorm."""

import pytest
import torch
from torch import nn

from normexp.norms import batch_statistics
from tests.norm_cases import ALL, CONTEXT, DIM, STATISTICS, definition, inputs, maker, right_mask

batch = maker("bn")


@pytest.mark.parametrize("stats", STATISTICS)
def test_running_statistics_follow_torchs_rule(stats):
    """r ← 0.9 r + 0.1 s from (0, 1), unbiased variance, over two batches; evaluation uses them."""
    norm, mean, var = batch(DIM, stats=stats), 0.0, 1.0
    for seed in (0, 1):
        x = inputs(seed=seed)
        norm(x)
        tokens, axes = (x, (0,)) if stats == "position" else (x.reshape(-1, DIM), (0,))
        mean = 0.9 * mean + 0.1 * tokens.mean(axes)
        var = 0.9 * var + 0.1 * tokens.var(axes, correction=1)
    torch.testing.assert_close(norm.running_mean, mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(norm.running_var, var, atol=1e-5, rtol=1e-5)
    x = inputs(seed=3)[:, :5]
    mean, var = (mean[:5], var[:5]) if stats == "position" else (mean, var)
    torch.testing.assert_close(norm.eval()(x), (x - mean) / (var + 1e-5).sqrt(), atol=1e-5, rtol=1e-5)


def test_unmasked_batch_norm_is_polluted_by_pads():
    x, mask = inputs(), right_mask([6, 4, 5, 3])
    zeroed = x * mask.unsqueeze(-1)
    honest, polluted = batch(DIM)(zeroed, mask), batch(DIM, mask_padding=False)(zeroed, mask)
    assert (honest - polluted)[mask].abs().max() > 0.3


@pytest.mark.parametrize("stats", STATISTICS)
def test_batch_statistics_leave_the_running_ones_alone(stats):
    norm, x = batch(DIM, stats=stats), inputs()
    trained = batch(DIM, stats=stats)(x)
    before = [buffer.clone() for buffer in norm.buffers()]
    norm.eval()
    with batch_statistics(nn.Sequential(norm)):
        torch.testing.assert_close(norm(x), trained)
    assert all(torch.equal(a, b) for a, b in zip(before, norm.buffers(), strict=True))
    assert not torch.allclose(norm(x), trained)


@pytest.mark.parametrize(("stats", "rows", "context", "fine"), [
    ("batch_time", 1, 1, False), ("batch_time", 1, 2, True), ("batch_time", 2, 1, True),
    ("position", 1, 64, False), ("position", 2, 64, True), ("cumulative", 1, 64, False), ("cumulative", 2, 1, True),
])  # fmt: skip
def test_batch_norm_names_the_batches_it_cannot_take(stats, rows, context, fine):
    problem = batch(DIM, stats=stats).problem(rows, context)
    assert (problem is None) == fine
    assert fine or f"norm.stats={stats}" in problem


@pytest.mark.parametrize("stats", STATISTICS)
def test_variance_survives_a_large_mean(stats):
    """Mean 1e4, spread 1e-1: E[x²] − E[x]² would have no digit left in float32."""
    x = 1e4 + 0.125 * torch.randn(8, CONTEXT, DIM, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    mask = torch.ones(8, CONTEXT, dtype=torch.bool)
    expected = definition(f"bn-{stats}", batch(DIM, stats=stats), x.double(), None)
    # one ulp of 1e4 in float32 is 1e-3, and x − μ is divided by σ = 0.125
    torch.testing.assert_close(batch(DIM, stats=stats)(x, mask).double(), expected, atol=0.03, rtol=0)


def test_an_all_pad_position_keeps_its_running_statistics():
    norm, x = batch(DIM, stats="position"), inputs()
    norm(x, right_mask([6, 4, 5, 3]))
    assert torch.equal(norm.running_mean[6:], torch.zeros(CONTEXT - 6, DIM))
    assert torch.equal(norm.running_var[5:], torch.ones(CONTEXT - 5, DIM))  # one token gives no variance
    assert norm.running_mean[0].abs().min() > 0
    assert torch.isfinite(norm(x, right_mask([6, 4, 5, 3]))).all()


def regularized(**changes):
    return maker("rbn", **{"mean_penalty": 0.7, "spread_penalty": 0.3} | changes)(DIM)


@pytest.mark.parametrize("spread", ["std", "variance"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_penalty_of_rbn_by_hand(spread, padded):
    """Over the second of two batches, its gradient with the running statistics as constants, in float64."""
    mask = right_mask([12, 7, 9, 5]) if padded else torch.ones(4, CONTEXT, dtype=torch.bool)
    norm = regularized(spread=spread).double()
    norm(inputs(seed=1).double())
    x = inputs(shift=-1.0).double().requires_grad_()
    norm(x, mask)
    tokens = x[mask]
    mean, var = tokens.mean(0), tokens.var(0, correction=0)
    first, n = inputs(seed=1).double().flatten(0, 1), len(tokens)
    running_mean = 0.95 * 0.05 * first.mean(0) + 0.05 * mean.detach()
    running_var = 0.95 * (0.95 + 0.05 * first.var(0)) + 0.05 * tokens.detach().var(0)
    apart = (var.sqrt() - running_var.sqrt()) ** 2 if spread == "std" else (var - running_var).abs()
    expected = (0.7 * ((mean - running_mean) ** 2).sum() + 0.3 * apart.sum()) / n
    penalty = norm.aux_loss()
    torch.testing.assert_close(penalty, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(value, x)[0] for value in (penalty, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
    assert gradients[0].abs().max() > 1e-4


def test_the_penalty_of_rbn_is_of_one_training_forward_pass():
    norm, x = regularized(), inputs()
    assert norm.aux_loss() == 0
    norm(x)
    first = norm.aux_loss()
    assert first > 0
    assert norm.aux_loss() == 0  # handed over
    norm.eval()(x)
    assert norm.aux_loss() == 0
    norm.train()
    with batch_statistics(norm):
        norm(x)
    assert norm.aux_loss() == 0
    norm(x)
    norm(inputs(seed=1))
    norm.eval()(x)  # an evaluation in between takes nothing away
    alone = regularized()
    for seed in (0, 0, 1):
        alone(inputs(seed=seed))
    torch.testing.assert_close(norm.aux_loss(), alone.aux_loss())


@pytest.mark.parametrize("spread", ["std", "variance"])
def test_a_constant_channel_has_a_finite_penalty_gradient(spread):
    norm, x = regularized(spread=spread), inputs()
    x[..., 3] = 1.5
    x.requires_grad_()
    norm(x)
    norm.aux_loss().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad[..., 3].any()  # of its mean


@pytest.mark.parametrize("choice", ["rbn", "switch"])
def test_its_running_statistics_are_batch_norms(choice):
    """Masked, over two batches; and evaluation uses them."""
    mask = right_mask([12, 7, 9, 5])
    norm, plain = maker(choice, momentum=0.2)(DIM), batch(DIM, momentum=0.2)
    for seed in (0, 1):
        for each in (norm, plain):
            each(inputs(seed=seed), mask)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    before = norm.running_mean.clone()
    if choice == "switch":
        with torch.no_grad():
            norm.mean_logits.copy_(torch.tensor([-100.0, 100.0]))
            norm.var_logits.copy_(torch.tensor([-100.0, 100.0]))
    torch.testing.assert_close(norm.eval()(inputs(seed=2)), plain.eval()(inputs(seed=2)))
    assert torch.equal(before, norm.running_mean)


@pytest.mark.parametrize("choice", ["rbn", "switch", "power"])
def test_unmasked_statistics_are_polluted_by_pads(choice):
    x, mask = inputs(), right_mask([6, 4, 5, 3])
    zeroed = x * mask.unsqueeze(-1)
    honest, polluted = maker(choice)(DIM)(zeroed, mask), maker(choice, mask_padding=False)(DIM)(zeroed, mask)
    assert (honest - polluted)[mask].abs().max() > 0.3


@pytest.mark.parametrize(("choice", "name"), [
    ("rbn", "RegularizedBatchNorm"), ("switch", "SwitchableNorm"), ("power", "PowerNorm")
])  # fmt: skip
def test_a_batch_of_one_token_is_refused(choice, name):
    norm = maker(choice)(DIM)
    assert norm.problem(1, 1).startswith(f"{name} would take its")
    assert norm.problem(1, 2) is None
    assert norm.problem(2, 1) is None


def test_the_ends_of_switchable_norm():
    x = inputs()
    for member, other in ((0, ALL["ln"]), (1, batch)):
        norm = ALL["switch"](DIM)
        with torch.no_grad():
            for logits in (norm.mean_logits, norm.var_logits):
                logits[member] += 100
        torch.testing.assert_close(norm(x), other(DIM)(x), atol=1e-5, rtol=1e-5)


def test_the_shares_of_switchable_norm():
    norm = ALL["switch"](DIM)
    assert {path: float(share.detach()) for path, share in norm.observed().items()} == {
        "ln_share_of_mean": 0.5,
        "ln_share_of_var": 0.5,
    }
    with torch.no_grad():
        norm.mean_logits[0] += 1
    torch.testing.assert_close(norm.observed()["ln_share_of_mean"], torch.tensor(1.0).sigmoid())
    assert float(norm.observed()["ln_share_of_var"].detach()) == 0.5


@pytest.mark.parametrize("name", [f"bn-{stats}" for stats in STATISTICS])
def test_an_infinite_pad_does_not_reach_real_tokens(name):
    """Statistics of a single token blow pads up from norm to norm, and 0 · ∞ is no 0."""
    norm, x, mask = ALL[name](DIM).train(), inputs(), right_mask([12, 7, 9, 12])
    clean = norm(x, mask)
    blown = x.masked_fill(~mask.unsqueeze(-1), torch.inf).requires_grad_()
    y = norm(blown, mask)
    assert torch.equal(y[mask], clean[mask])
    y[mask].sum().backward()
    assert torch.isfinite(blown.grad[mask]).all()
