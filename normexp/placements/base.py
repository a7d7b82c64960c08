"""What every placement has: its norms by site, its two sublayers, and what it asks of the model around it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from normexp.layers import site_width

NormFactory = Callable[[int], nn.Module]


@dataclass(frozen=True)
class Init:
    """Initial weights that a paper asks for; `model.init=placement` draws by them (normexp/init.py).

    A matrix of a block starts at the standard deviation that `base` gives it, times its gain. `plain`: N(0, 0.02),
    residual projections included; the other bases are those of `model.init`.
    """

    base: Literal["xavier", "gpt2", "small", "torch", "plain"]
    gains: Mapping[str, float] = field(default_factory=dict)  # matrix of a block (`attn.v`) -> factor; 1 for the others
    embed: float | None = None  # standard deviation of token and position embeddings in the stream; None: the base's
    truncated: float | None = None  # bound of every draw, in standard deviations

    def __str__(self) -> str:
        parts = [self.base] + ([f"truncated at {self.truncated:g}σ"] if self.truncated else [])
        for gain in sorted(set(self.gains.values())):
            parts.append(f"{' '.join(name for name, g in self.gains.items() if g == gain)} × {gain:.4g}")
        return ", ".join(parts + ([f"embeddings {self.embed:.4g}"] if self.embed else []))


class Block(nn.Module):
    """One Transformer block of `depth` blocks; `layer` counts from 0. `forward` takes and gives the stream, (B, T, C).

    Where the norms of a placement differ by layer, its constructor sets `sites` before that of Block runs.
    A sublayer F ends in its dropout, so that a norm of F's output comes after it.
    """

    sites: tuple[str, ...]  # names of norms: in `layers.INSIDE` for places inside a sublayer, free for others
    final_norm: ClassVar[bool]
    feeds: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # site -> the linear layers that alone read its norm's output
    norm_free: ClassVar[bool] = False  # takes norm=none only
    needs_norm: ClassVar[bool] = False  # takes any but norm=none
    normalises_qk: ClassVar[bool] = False  # leaves no place for model.qk_norm
    unit_matrices: ClassVar[bool] = False  # every matrix is kept at unit length along the stream's channels
    scaled_logits: ClassVar[bool] = False  # a learned factor for each logit
    plain_heads: ClassVar[bool] = False  # takes as many heads of k as of q, width / heads wide, and their own scale

    def __init__(
        self,
        *,
        norm: NormFactory,
        attention: Callable[[], nn.Module],
        mlp: Callable[[], Any],
        width: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        layer: int,
        depth: int,
    ) -> None:
        super().__init__()
        self.width, self.layer, self.depth = width, layer, depth
        sizes = {"width": width, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_width": head_width}
        self.norm = nn.ModuleDict({site: norm(site_width(site, **sizes)) for site in self.sites})
        self.attn, self.mlp = attention(), mlp()
        if "mlp_in" in self.norm and getattr(self.mlp, "own_norms", False):
            self.norm["mlp_in"] = self.mlp.take_norm(partial(norm, width))

    def forward(self, x: Any, mask: Tensor | None) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def enter(self, x: Tensor) -> Any:
        """The stream that the first block takes, from the embeddings."""
        return x

    def leave(self, stream: Any, norm: nn.Module | None, mask: Tensor | None) -> Tensor:
        """What the head reads, from the stream of the last block. `norm`: the final one."""
        x: Tensor = stream if norm is None else norm(stream, mask)
        return x

    def initial(self) -> Init | None:
        """The paper's own initial weights; None where it has none."""
        return None
