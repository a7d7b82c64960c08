"""PowerNorm: running statistics in the forward pass already, and a backward pass with a state of its own."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normexp.fields import NonNegativeInt, PositiveFloat, UnitInterval
from normexp.kernels import formula
from normexp.norms.common import Unfolded, ones, scaled, wide, zeros
from normexp.norms.per_token import RMSNorm


class PowerNorm(nn.Module):
    """x̂ = x / √(mean_C(x²) + ε) per token, then z = x̂ / √(φ + ε) and γ z + β per channel (2003.07845).

    In training φ is the running mean square of earlier batches, and φ ← α φ + (1 − α) φ_B once the batch is normalised,
    φ_B = mean(x̂²) over its real tokens (of all when `mask_padding` is false). In the first `warmup_steps` forward
    passes φ_B normalises, and φ is their mean so far before it moves by that rule. φ = 1 and ν = 0 at the start.

    The backward pass approximates the gradient through the running φ. With g the gradient of z:
    g̃ = g − (1 − α_b) ν z, at real tokens;  ν ← ν + mean(g̃ z) over real tokens;  dx̂ = g̃ / √(φ_B + ε).
    It moves ν, so each forward pass must have one backward pass and a step: see `restrictions`; differentiating it
    again, a second backward pass and activation checkpointing raise RuntimeError. In evaluation, and while `frozen`
    (φ_B then normalises), gradients are exact.

    Checked: authors' code, which is followed, but for pads, which enter its ν. Its training scripts take the mean of x²
    over the channels of one head, not over all, and the learning rate's warm-up as `warmup_steps`. Not checked: the
    paper's equations; from memory it divides dx̂ by a running value.
    """

    running_phi: Tensor
    nu: Tensor
    steps: Tensor
    restrictions: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "train.grad_accum": ((1,), "its backward pass keeps a state, which every micro-batch would move"),
        "train.dtype": (("float32", "bfloat16"), "its backward pass keeps gradients, and a scaled loss rescales them"),
        "model.moe_norm": (("shared",), "its warm-up counts forward passes, and an expert may have no token in one"),
        "train.compile": ((False,), "its backward pass keeps a state, which compiled code would not move"),
    }

    def __init__(
        self,
        dim: int,
        *,
        eps: PositiveFloat,
        alpha_forward: UnitInterval,
        alpha_backward: UnitInterval,
        warmup_steps: NonNegativeInt,
        affine: bool,
        mask_padding: bool,
    ) -> None:
        super().__init__()
        self.eps, self.alpha_forward, self.alpha_backward = eps, alpha_forward, alpha_backward
        self.warmup_steps, self.mask_padding = warmup_steps, mask_padding
        self.frozen = False  # normalise by the batch in hand and leave the running statistics alone
        self.weight, self.bias = ones(dim, affine), zeros(dim, affine)
        self.register_buffer("running_phi", torch.ones(dim))
        self.register_buffer("nu", torch.zeros(dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))  # training forward passes

    @property
    def causal(self) -> bool:
        """Whether the training output at t depends on tokens up to t only: after the warm-up it does."""
        return self.warmup_steps == 0

    def problem(self, rows: int, context: int) -> str | None:
        """Why a mean square over `rows` sequences of `context` tokens cannot be taken, or None."""
        if rows * context > 1 or self.warmup_steps == 0:
            return None
        return "PowerNorm would take its mean square from one value in its warm-up; use a larger batch"

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        values = wide(x)
        values = formula.rms_norm(values, None, None, self.eps, 0.0, "float32", values.dtype)
        real = torch.ones_like(values[..., :1])
        if mask is not None and self.mask_padding:
            real = mask.unsqueeze(-1).to(values.dtype)
        if self.training and not self.frozen:
            z = self._by_running_phi(values, real)
        else:
            z = values * torch.rsqrt((mean_over(values.square(), real) if self.frozen else self.running_phi) + self.eps)
        return scaled(z, self.weight, self.bias, x.dtype)

    def unfold(self, dim: int) -> Unfolded:
        """RMSNorm, then a scale and a shift."""
        plain = RMSNorm(dim, eps=self.eps, affine=False, cast="float32", kernel="torch", gain_offset=0.0)
        scale = torch.rsqrt(self.running_phi + self.eps)
        return plain, scale if self.weight is None else scale * self.weight, self.bias

    def _by_running_phi(self, x: Tensor, real: Tensor) -> Tensor:
        """z; moves φ and counts the step. No branch on the count, which is on the device."""
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass
            raise RuntimeError("PowerNorm: activation checkpointing would run its forward pass twice and move φ twice")
        self.steps += 1
        phi_batch = mean_over(x.detach().square(), real)
        phi = torch.where(self.steps <= self.warmup_steps, phi_batch, self.running_phi)
        z: Tensor = _ByRunningPhi.apply(x, real, phi + self.eps, phi_batch + self.eps, self.nu, self.alpha_backward)  # type: ignore[no-untyped-call]
        self._move_phi(phi_batch, real.sum() > 0)
        return z

    @torch.no_grad()
    def _move_phi(self, phi_batch: Tensor, seen: Tensor) -> None:
        """φ_B over no token leaves φ as it is."""
        averaging = seen * (self.steps < self.warmup_steps)
        self.running_phi += averaging / self.steps * (phi_batch - self.running_phi)
        self.running_phi += seen * (1 - self.alpha_forward) * (phi_batch - self.running_phi)


class _ByRunningPhi(torch.autograd.Function):
    """z = x / √φ, with the approximate gradient of PowerNorm's docstring. φ and φ_B hold ε already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, real: Tensor, phi: Tensor, phi_batch: Tensor, nu: Tensor, alpha: float) -> Tensor:
        z = x * torch.rsqrt(phi)
        ctx.save_for_backward(z, real, torch.rsqrt(phi_batch))
        ctx.nu, ctx.alpha, ctx.spent = nu, alpha, False
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("PowerNorm: its backward pass keeps a state and cannot be differentiated again")
        if ctx.spent:
            raise RuntimeError("PowerNorm: a second backward pass through one forward pass would move its state twice")
        ctx.spent = True
        z, real, inverse = ctx.saved_tensors
        corrected = gradients[0] - (1 - ctx.alpha) * ctx.nu * z * real
        ctx.nu += mean_over(corrected * z, real)
        return corrected * inverse, None, None, None, None, None


def mean_over(x: Tensor, real: Tensor) -> Tensor:
    """Mean (C) of x (B, T, C) over the tokens where `real` (B, T, 1) is 1; 0 without any."""
    return (x * real).sum((0, 1)) / real.sum().clamp(min=1)
