"""Attention and MLP: norm-free, except for the sites that a placement hands them, and norms of q and k.

B: sequences, T: positions, H: heads, K: channels per head, C: channels; H·K, unless the model says otherwise.
`sites` maps the name of a place inside a sublayer, one of INSIDE, to the norm that sits there; a name that is missing
is the identity.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.attention import attend

Sites = Mapping[str, Callable[..., Any]] | nn.ModuleDict
NOWHERE: Sites = {}
Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu"]
QKNorm = Literal["none", "head", "full"]

# The places inside a sublayer, in forward order, and how wide each is.
INSIDE: Mapping[str, Literal["query", "key", "head", "hidden"]] = {
    "q": "query",  # before the heads are split
    **dict.fromkeys(("k", "v"), "key"),
    **dict.fromkeys(("q_head", "k_head", "v_head"), "head"),  # of each head, before the rotary embedding
    "q_rotated": "query",  # after it, the heads side by side
    "k_rotated": "key",
    "attn_out": "query",  # what `o` reads
    **dict.fromkeys(("mlp_up", "mlp_gate"), "hidden"),  # what `in` and `gate` write
    "mlp_hidden": "hidden",  # what `out` reads
}


def site_width(site: str, *, width: int, hidden: int, heads: int, kv_heads: int, head_width: int) -> int:
    """Channels at a site; one that is not INSIDE lies in the stream."""
    query, key = heads * head_width, kv_heads * head_width
    widths = {"width": width, "query": query, "key": key, "head": head_width, "hidden": hidden}
    return widths[INSIDE.get(site, "width")]


def at(site: str, sites: Sites, x: Tensor, mask: Tensor | None) -> Tensor:
    return sites[site](x, mask) if site in sites else x


def at_heads(site: str, sites: Sites, x_BHTK: Tensor, mask: Tensor | None) -> Tensor:
    """Each head as if it were a sequence of its own, so that the norm meets (B, T, C): one gain (K,) for all heads."""
    if site not in sites:
        return x_BHTK
    heads = x_BHTK.shape[1]
    y = sites[site](x_BHTK.flatten(0, 1), None if mask is None else mask.repeat_interleave(heads, 0))
    return y.unflatten(0, (-1, heads))


def merged(x_BHTK: Tensor) -> Tensor:
    return x_BHTK.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Causal multi-head attention, softmax(q kᵀ / √K + causal mask) v, projected by `o` (1706.03762).

    `kv_heads`, `scale`, `window` and `softcap` are those of `attention.attend`.
    Padding stands on the right, so the causal mask already keeps real tokens from seeing pads.
    `norms` makes norms of the attention's own, by site, which are there whatever the placement has.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int,
        head_width: int,
        bias: bool,
        dropout: float,
        rotary: Callable[[int], nn.Module] | None,
        scale: float | None,
        window: int,
        softcap: float,
        norms: Callable[[], Mapping[str, nn.Module]] = dict,
    ) -> None:
        super().__init__()
        self.head_width, self.dropout = head_width, dropout
        self.scores: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        self.q = nn.Linear(width, heads * head_width, bias=bias)
        self.k = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.v = nn.Linear(width, kv_heads * head_width, bias=bias)
        self.o = nn.Linear(heads * head_width, width, bias=bias)
        self.rotary = rotary(head_width) if rotary else None
        self.norm = nn.ModuleDict(norms())

    def forward(self, x: Tensor, mask: Tensor | None = None, sites: Sites = NOWHERE) -> Tensor:
        if self.norm:
            sites = {**dict(sites.items()), **dict(self.norm.items())}
        q, k, v = (self._heads(at(name, sites, getattr(self, name)(x), mask)) for name in "qkv")
        q, k, v = (at_heads(f"{name}_head", sites, part, mask) for name, part in zip("qkv", (q, k, v), strict=True))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        if "q_rotated" in sites:
            q, k = (self._heads(at(f"{n}_rotated", sites, merged(part), mask)) for n, part in (("q", q), ("k", k)))
        y = attend(q, k, v, dropout=self.dropout if self.training else 0.0, **self.scores)
        y_BTC = at("attn_out", sites, merged(y), mask)
        return F.dropout(self.o(y_BTC), self.dropout, self.training)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], -1, self.head_width).transpose(1, 2)


def qk_norms(kind: QKNorm, norm: Callable[[int], nn.Module], **sizes: int) -> dict[str, nn.Module]:
    """Norms of q and k before the rotary embedding: over each head (`head`, 2302.05442 and 2309.14322), or over the
    whole width before the heads are split (`full`, OLMo 2). `sizes`: those of `site_width`."""
    sites = {"none": (), "head": ("q_head", "k_head"), "full": ("q", "k")}[kind]
    return {site: norm(site_width(site, **sizes)) for site in sites}


class Rotary(nn.Module):
    """Rotates the pair (x_i, x_{i + K/2}) at position t by t · base^(−2i/K) (2104.09864, pairs as in GPT-NeoX)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, context: int, base: float) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(context).float(), base ** (-torch.arange(0, size, 2).float() / size))
        angle = torch.cat([angle, angle], dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        first, second = x_BHTK.chunk(2, dim=-1)
        length = x_BHTK.shape[-2]
        cos, sin = self.cos[:length].to(x_BHTK.dtype), self.sin[:length].to(x_BHTK.dtype)
        return x_BHTK * cos + torch.cat([-second, first], dim=-1) * sin


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),  # GPT-2's gelu_new
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),  # with the tanh of Gemma; the paper's is exact
}
GATED = ("swiglu", "geglu")


class MLP(nn.Module):
    """out(act(in(x))); of the GATED, out(act(gate(x)) · in(x)) (2002.05202)."""

    def __init__(self, width: int, hidden: int, *, activation: Activation, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[activation], dropout
        if activation in GATED:
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.add_module("in", nn.Linear(width, hidden, bias=bias))  # `in` is a keyword: no attribute of that name
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, sites: Sites = NOWHERE) -> Tensor:
        hidden = at("mlp_up", sites, getattr(self, "in")(x), mask)
        if hasattr(self, "gate"):
            hidden = self.activation(at("mlp_gate", sites, self.gate(x), mask)) * hidden
        else:
            hidden = self.activation(hidden)
        return F.dropout(self.out(at("mlp_hidden", sites, hidden, mask)), self.dropout, self.training)
