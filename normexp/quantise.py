"""Low precision as a study: what stands at a norm is rounded to eight bits and back (fake quantisation).

Nothing but what is rounded has few bits: parameters, their gradients and all other arithmetic are what they were.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normexp.fields import UserError
from normexp.kernels.formula import statistics_dtype
from normexp.norms import Identity

Quant = Literal["none", "e4m3", "int8"]
Granularity = Literal["tensor", "token"]
Place = Literal["norm_input", "norm_output", "norm_statistics"]
LARGEST = {"e4m3": 448.0, "int8": 127.0}


def to_format(x: Tensor, quant: Quant) -> Tensor:
    """The nearest number of the format, of two the even one; beyond the largest that one; NaN stays NaN.

    `int8`: the integers from −127 to 127, so that 0 is in the middle. `e4m3`: 0 and ± (1 + m/8) · 2^e, e from −6 to 8,
    below that ± m/8 · 2^−6, m from 0 to 7; the largest is 448, and there is no infinity (2209.05433).
    Checked: int8 against numpy; e4m3 against a list of its numbers written out from this definition, not the paper.
    """
    bounded = x.clamp(-LARGEST[quant], LARGEST[quant])
    return bounded.round() if quant == "int8" else bounded.to(torch.float8_e4m3fn).to(x.dtype)


def scale(x: Tensor, mask: Tensor | None, quant: Quant, granularity: Granularity) -> Tensor:
    """max|x| / the format's largest number, over all real tokens or over each; 1 where that is 0."""
    size = x.abs() if mask is None else x.abs().masked_fill(~mask.unsqueeze(-1), 0.0)
    largest = size.amax(-1, keepdim=True) if granularity == "token" else size.amax()
    found = largest / LARGEST[quant]
    return torch.where(found == 0, 1.0, found)


def fake_quantise(x: Tensor, mask: Tensor | None, quant: Quant, granularity: Granularity) -> Tensor:
    """x̂ = s · round(x / s), in float32, returned in the type of x; `mask` is True at the real tokens of x (…, C).

    Straight-through (1308.3432): ∂x̂/∂x = 1, the scale s counting as a constant. One s for a whole tensor sees all of
    its tokens, later ones too. What is not finite makes all that shares its scale NaN.
    """
    values = x.detach().to(statistics_dtype(x.dtype))
    s = scale(values, mask, quant, granularity)
    rounded = s * to_format(values / s, quant)
    return rounded.to(x.dtype) + (x - x.detach())  # + 0, with the gradient of x


@torch.no_grad()
def relative_error(rounded: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    """‖x̂ − x‖₂ / ‖x‖₂ over the real tokens, 0-dim, in float32; 0 where ‖x‖² is 0 there."""
    exact = x.to(statistics_dtype(x.dtype))
    apart = rounded.to(exact.dtype) - exact
    if mask is not None:
        exact, apart = (part.masked_fill(~mask.unsqueeze(-1), 0.0) for part in (exact, apart))
    size = torch.linalg.vector_norm(exact)
    return torch.linalg.vector_norm(apart) / torch.where(size == 0, 1.0, size)


class Rounding:
    """What is rounded at one norm, and the relative error of its last forward pass (of several statistics the largest).

    Not a module around the norm but hooks on it: names, parameters and attributes stay the norm's own.
    """

    def __init__(self, norm: Any, quant: Quant, granularity: Granularity, place: Place) -> None:
        self.quant, self.granularity = quant, granularity
        self.error: Tensor | None = None
        self.others: Callable[[], dict[str, Tensor]] = getattr(norm, "observed", dict)
        norm.observed = self.observed
        if place == "norm_input":
            norm.register_forward_pre_hook(self.enter, with_kwargs=True)
        elif place == "norm_output":
            norm.register_forward_hook(self.leave, with_kwargs=True)
        else:
            norm.rounded = self.statistics

    def enter(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x, *others = args
        return (*self.statistics(mask_of(args, kwargs), x), *others), kwargs

    def leave(self, norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> Tensor:
        return self.statistics(mask_of(args, kwargs), y)[0]

    def statistics(self, mask: Tensor | None, *exact: Tensor) -> tuple[Tensor, ...]:
        """Each rounded by a scale of its own."""
        rounded = tuple(fake_quantise(x, mask, self.quant, self.granularity) for x in exact)
        errors = [relative_error(*pair, mask) for pair in zip(rounded, exact, strict=True)]
        self.error = torch.stack(errors).amax()
        return rounded

    def observed(self) -> dict[str, Tensor]:
        return self.others() | ({} if self.error is None else {"quant_error": self.error})


def mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    mask: Tensor | None = args[1] if len(args) > 1 else kwargs.get("mask")
    return mask


def quantised(
    norm: Callable[[int], nn.Module], quant: Quant, granularity: Granularity, place: Place
) -> Callable[[int], nn.Module]:
    """A factory of norms with rounding at `place`; `norm` itself for `none`. UserError, when it makes a norm, for one
    that has nothing there to round."""
    return norm if quant == "none" else partial(_made, norm, quant, granularity, place)


def _made(factory: Callable[[int], nn.Module], quant: Quant, granularity: Granularity, place: Place, dim: int) -> Any:
    norm = factory(dim)
    if isinstance(norm, Identity):
        raise UserError(f"model.quant={quant}: rounds at the norms, and norm=none is none; give model.quant=none")
    if place == "norm_statistics" and not hasattr(norm, "rounded"):
        raise UserError(
            f"model.quant_at={place}: {type(norm).__name__} hands over no statistics to be rounded; give norm_input or "
            "norm_output"
        )
    if place == "norm_statistics" and granularity == "token":
        raise UserError(
            f"model.quant_granularity=token: a token has one number of a statistic, which would be its own scale, so "
            f"that model.quant_at={place} rounds nothing; give tensor"
        )
    Rounding(norm, quant, granularity, place)
    return norm
