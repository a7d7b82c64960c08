"""Attention and MLP: norm-free, except for the sites that a placement hands them.

B: sequences, T: positions, H: heads, K: channels per head, C = H·K.
`sites` maps the name of a place inside a sublayer (`q`, `k`, `v`, `attn_out`, `mlp_hidden`) to the norm that sits
there; a name that is missing is the identity.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Sites = Mapping[str, nn.Module]
NOWHERE: Sites = {}
Activation = Literal["relu", "gelu", "swiglu"]


def at(site: str, sites: Sites, x: Tensor, mask: Tensor | None) -> Tensor:
    norm = sites.get(site)
    return x if norm is None else norm(x, mask)


class Attention(nn.Module):
    """Causal multi-head attention, softmax(q kᵀ / √K + causal mask) v, projected by `o` (1706.03762).

    Padding stands on the right, so the causal mask already keeps real tokens from seeing pads.
    """

    def __init__(self, width: int, heads: int, *, bias: bool, dropout: float, rotary_context: int | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(width, width, bias=bias)
        self.v = nn.Linear(width, width, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.rotary = Rotary(width // heads, rotary_context) if rotary_context else None

    def forward(self, x: Tensor, mask: Tensor | None = None, sites: Sites = NOWHERE) -> Tensor:
        q, k, v = (self._heads(at(name, sites, getattr(self, name)(x), mask)) for name in "qkv")
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y_BTC = at("attn_out", sites, y.transpose(1, 2).flatten(2), mask)
        return F.dropout(self.o(y_BTC), self.dropout, self.training)

    def _heads(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.view(*x_BTC.shape[:2], self.heads, -1).transpose(1, 2)


class Rotary(nn.Module):
    """Rotates the pair (x_i, x_{i + K/2}) at position t by t · 10000^(−2i/K) (2104.09864, pairs as in GPT-NeoX)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, context: int) -> None:
        super().__init__()
        angle = torch.outer(torch.arange(context).float(), 10_000.0 ** (-torch.arange(0, size, 2).float() / size))
        angle = torch.cat([angle, angle], dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x_BHTK: Tensor) -> Tensor:
        first, second = x_BHTK.chunk(2, dim=-1)
        length = x_BHTK.shape[-2]
        cos, sin = self.cos[:length].to(x_BHTK.dtype), self.sin[:length].to(x_BHTK.dtype)
        return x_BHTK * cos + torch.cat([-second, first], dim=-1) * sin


class MLP(nn.Module):
    """out(act(in(x))); with `swiglu`, out(silu(gate(x)) · in(x)) (2002.05202)."""

    def __init__(self, width: int, hidden: int, *, activation: Activation, bias: bool, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = activation, dropout
        if activation == "swiglu":
            self.gate = nn.Linear(width, hidden, bias=bias)
        self.add_module("in", nn.Linear(width, hidden, bias=bias))  # `in` is a keyword: no attribute of that name
        self.out = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, sites: Sites = NOWHERE) -> Tensor:
        hidden = getattr(self, "in")(x)
        if self.activation == "swiglu":
            hidden = F.silu(self.gate(x)) * hidden
        else:
            hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden)
        return F.dropout(self.out(at("mlp_hidden", sites, hidden, mask)), self.dropout, self.training)
