"""What stands in a norm's place and takes no statistics: every element for itself, or nothing at all."""

import torch
from torch import Tensor, nn

from normexp.fields import PositiveFloat
from normexp.norms.common import ones, scaled, wide, zeros


class Identity(nn.Module):
    """x, for placements that do without a norm."""

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class DynamicTanh(nn.Module):
    """γ · tanh(α x) + β, α a learned scalar (DyT, 2503.10622).

    Checked: paper, form and α₀, one value here for all sites. α₀ is 0.5 in its vision models; in its language models,
    by width, before the attention / elsewhere: 2048: 1 / 0.5, 4096: 0.8 / 0.2, 8192: 0.2 / 0.05, and 1 / 1 up to 1024,
    which for widths far below is our extrapolation. Its language models have no β and scale the embedding by a learned
    scalar, √d at the start; without the latter they are other models.
    """

    def __init__(self, dim: int, *, alpha: PositiveFloat, affine: bool, bias: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight = ones(dim, affine)
        self.bias = zeros(dim, affine and bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled(torch.tanh(self.alpha * wide(x)), self.weight, self.bias, x.dtype)


class DynamicErf(nn.Module):
    """γ · erf(α x + s) + β, α and s learned scalars, s = 0 at the start (Derf, 2512.10938).

    Checked: authors' code, which is followed. There α₀ is 0.5 in vision and 1 in the GPT-2, which also has β, and
    scales the embedding by a learned scalar, √d at the start.
    """

    def __init__(self, dim: int, *, alpha: PositiveFloat, affine: bool, bias: bool) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.shift = nn.Parameter(torch.tensor(0.0))
        self.weight = ones(dim, affine)
        self.bias = zeros(dim, affine and bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled(torch.erf(self.alpha * wide(x) + self.shift), self.weight, self.bias, x.dtype)
