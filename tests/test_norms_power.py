"""PowerNorm: its two running values against a hand-written loop, and what its stateful backward pass refuses."""

import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from normexp import commandline, config
from normexp.fields import UserError
from normexp.norms import PowerNorm
from tests.norm_cases import CONTEXT, DIM, inputs, maker, right_mask

EPS, ALPHA, BACKWARD = 1e-5, 0.8, 0.7
power = maker("power", alpha_forward=ALPHA, alpha_backward=BACKWARD)


class ByHand:
    """The definition, token by token and channel by channel, with Python's numbers."""

    def __init__(self, warmup_steps, gain):
        self.warmup_steps, self.gain = warmup_steps, gain
        self.phi, self.nu, self.step = [1.0] * DIM, [0.0] * DIM, 0

    def pass_through(self, x, mask, dy):
        """z, and the gradient that reaches the per-token scaling in front, given that of the output."""
        self.step += 1
        tokens = [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1])]
        real = [token for token in tokens if mask[token]]
        z, dx = np.zeros_like(x), np.zeros_like(x)
        for c in range(DIM):
            phi_batch = sum(x[token][c] ** 2 for token in real) / len(real)
            phi = phi_batch if self.step <= self.warmup_steps else self.phi[c]
            moved = 0.0
            for token in tokens:
                z[token][c] = x[token][c] / math.sqrt(phi + EPS)
                g = dy[token][c] * self.gain[c]
                if mask[token]:
                    g -= (1 - BACKWARD) * self.nu[c] * z[token][c]
                    moved += g * z[token][c] / len(real)
                dx[token][c] = g / math.sqrt(phi_batch + EPS)
            if self.step < self.warmup_steps:
                self.phi[c] = (self.phi[c] * (self.step - 1) + phi_batch) / self.step
            self.phi[c] = ALPHA * self.phi[c] + (1 - ALPHA) * phi_batch
            self.nu[c] += moved
        return z, dx


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_power_norm_is_its_loop(padded, warmup_steps):
    """Five steps in float64: output, gradients of input, gain and bias, φ and ν."""
    mask = right_mask([12, 7, 9, 5]) if padded else torch.ones(4, CONTEXT, dtype=torch.bool)
    norm = power(DIM, warmup_steps=warmup_steps).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.7, DIM))
        norm.bias.copy_(torch.linspace(-1, 1, DIM))
    by_hand = ByHand(warmup_steps, norm.weight.tolist())
    for seed in range(5):
        x = (inputs(seed=seed) * torch.linspace(0.2, 3, DIM)).double().requires_grad_()
        dy = inputs(seed=10 + seed, shift=0.1).double()
        y = norm(x, mask if padded else None)
        gradients = torch.autograd.grad(y, (x, norm.weight, norm.bias), dy)
        unit = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        z, dunit = map(torch.from_numpy, by_hand.pass_through(unit.detach().numpy(), mask.numpy(), dy.numpy()))
        exact = {"rtol": 1e-6, "atol": 1e-6}  # 1 − α is rounded to float32 where it meets a 0-dim mask
        torch.testing.assert_close(y, z * norm.weight + norm.bias, **exact)
        torch.testing.assert_close(gradients[0], torch.autograd.grad(unit, x, dunit)[0], **exact)
        torch.testing.assert_close(gradients[1], (dy * z).sum((0, 1)), **exact)
        torch.testing.assert_close(gradients[2], dy.sum((0, 1)), **exact)
        torch.testing.assert_close(norm.running_phi, torch.tensor(by_hand.phi).double(), **exact)
        torch.testing.assert_close(norm.nu, torch.tensor(by_hand.nu).double(), **exact)
    assert norm.nu.abs().max() > 0.1
    assert norm.steps == 5
    norm.eval()
    torch.testing.assert_close(norm(x), unit / (norm.running_phi + EPS).sqrt() * norm.weight + norm.bias)


def test_after_its_warmup_it_is_causal():
    x = inputs()
    changed = x.clone()
    changed[:, 7:] *= -3
    norms = [power(DIM, warmup_steps=2) for _ in range(2)]
    same = [torch.equal(norms[0](x)[:, :7], norms[1](changed)[:, :7]) for _ in range(2)]
    assert same == [False, False]
    norms[1].load_state_dict(norms[0].state_dict())
    assert torch.equal(norms[0](x)[:, :7], norms[1](changed)[:, :7])


def test_a_batch_without_a_real_token_leaves_it_alone():
    for warmup_steps in (0, 40):
        norm = power(DIM, warmup_steps=warmup_steps)
        norm(inputs()).sum().backward()
        before = [norm.running_phi.clone(), norm.nu.clone()]
        x = inputs().requires_grad_()
        norm(x, torch.zeros(4, CONTEXT, dtype=torch.bool)).sum().backward()
        assert torch.equal(before[0], norm.running_phi)
        assert torch.equal(before[1], norm.nu)
        assert torch.isfinite(x.grad).all()


def test_evaluation_moves_nothing():
    norm = power(DIM)
    norm(inputs()).sum().backward()
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    norm.eval()
    norm(inputs(seed=1).requires_grad_()).sum().backward()
    norm.train()
    norm.frozen = True
    norm(inputs(seed=1).requires_grad_()).sum().backward()
    assert before.keys() == {"running_phi", "nu", "steps"} == norm.state_dict().keys() - {"weight", "bias"}
    assert all(torch.equal(before[name], buffer) for name, buffer in norm.named_buffers())


def test_its_backward_pass_cannot_be_differentiated():
    norm, x = power(DIM), inputs().requires_grad_()
    with pytest.raises(RuntimeError, match="PowerNorm: its backward pass keeps a state and cannot be differentiated"):
        torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    assert not norm.nu.any()


def test_a_second_backward_pass_is_refused():
    norm, x = power(DIM), inputs().requires_grad_()
    y = norm(x).square().sum()
    y.backward(retain_graph=True)
    moved = norm.nu.clone()
    with pytest.raises(RuntimeError, match="PowerNorm: a second backward pass through one forward pass"):
        y.backward()
    assert torch.equal(moved, norm.nu)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused(reentrant):
    norm, x = power(DIM), inputs().requires_grad_()
    y = checkpoint(norm, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="PowerNorm: activation checkpointing would run its forward pass twice"):
        y.square().sum().backward()


@pytest.mark.parametrize(("override", "line"), [
    ("train.grad_accum=2", "train.grad_accum=2: norm=power takes 1 only: its backward pass keeps a state, which"),
    ("train.dtype=float16", "train.dtype=float16: norm=power takes float32 or bfloat16 only: its backward pass keeps"),
    ("train.compile=true", "train.compile=true: norm=power takes false only: its backward pass keeps a state, which"),
])  # fmt: skip
def test_what_would_break_its_state_is_refused_in_one_line(override, line):
    composed = commandline.compose(["norm=power", override])
    with pytest.raises(UserError) as refused:
        config.load(composed.values, composed.choices, composed.folder)
    assert commandline.explain(refused.value).startswith(line)
    assert "\n" not in commandline.explain(refused.value)


def test_it_needs_more_than_one_value_only_in_its_warmup():
    assert isinstance(power(DIM), PowerNorm)
    assert power(DIM, warmup_steps=0).problem(1, 1) is None
