"""Mixture of experts: an MLP of many, of which each token takes a few, and none is dropped.

B: sequences, T: positions, C: channels, E: experts, N = B·T: tokens.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normexp.kernels.formula import statistics_dtype
from normexp.layers import NOWHERE, Sites
from normexp.norms import Identity


def plain_name(name: str) -> str:
    """What a matrix of an expert is called in a plain MLP: `blocks.1.mlp.experts.3.out` -> `blocks.1.mlp.out`."""
    return re.sub(r"\bmlp\.experts\.\d+\.", "mlp.", name)


class MoE(nn.Module):
    """y = Σ_e g_e E_e(x) over the k experts of largest p_e, p = softmax(W_r x) in float32 and g_e = p_e (2409.02060).

    The gates are not renormalised over the chosen, as in OLMoE (Mixtral, 2401.04088, divides them by their sum).
    Whatever the load, every real token has its k experts; pads have none, their y is 0, and nothing counts them.
    With `own_norms`, E_e reads n_e(x) and the router n_r(x): each owns a norm, and that of e has the statistics of e's
    tokens alone (its mask is False at others, as at pads). Dropout is of y: its draws do not depend on the routing.

    `aux_loss` of a training forward pass: a E Σ_e f_e P_e + b mean(log² Σ_e exp(W_r x)_e), f_e the share of all k·n
    assignments that e has and P_e the mean of p_e over the n real tokens: a at perfect balance, a E at worst for k = 1
    (2101.03961; z-loss: 2202.08906). OLMoE takes the mean of both over the layers: a and b are to be given over depth.

    Tokens are grouped by expert, which needs their numbers on the host; in compiled code, whose shapes are fixed, every
    expert takes every token, at E / k times the arithmetic.

    Checked: y and E Σ f P against OLMoE's code in `transformers`, in a test (Mixtral's gates read there); f over k and
    the mean over layers of E Σ f P in the authors' fork of megablocks, of the z-loss in their OLMo-core. Not checked:
    the papers, and the weight of the z-loss, 1e-3, which is from secondary sources.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        per_token: int,
        *,
        expert: Callable[[], nn.Module],
        dropout: float,
        own_norms: bool,
        load_balance: float,
        z_loss: float,
    ) -> None:
        super().__init__()
        self.per_token, self.dropout, self.own_norms = per_token, dropout, own_norms
        self.load_balance, self.z_loss = load_balance, z_loss
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(experts))
        self.norm = nn.ModuleDict()
        self._loss: Tensor | None = None  # of the last training forward pass, until it is handed over
        self._seen: dict[str, Tensor] = {}

    def take_norm(self, norm: Callable[[], nn.Module]) -> nn.Module:
        """Moves the norm in front of this MLP into it, one for each expert and the router; returns what is left."""
        self.norm.update({name: norm() for name in ("router", *map(str, range(len(self.experts))))})
        return Identity(self.router.in_features)

    def forward(self, x: Tensor, mask: Tensor | None = None, sites: Sites = NOWHERE) -> Tensor:
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)  # a pad may be infinite
        logits_BTE = self._logits(x, mask)
        p_BTE = logits_BTE.softmax(-1)
        routed_BTE = torch.zeros_like(p_BTE, dtype=torch.bool).scatter(-1, p_BTE.topk(self.per_token).indices, True)
        if mask is not None:
            routed_BTE = routed_BTE & mask.unsqueeze(-1)
        self._observe(logits_BTE, p_BTE, routed_BTE, mask)
        combine = self._each_on_all if torch.compiler.is_compiling() else self._each_on_its_own
        y = combine(x, p_BTE.masked_fill(~routed_BTE, 0.0), routed_BTE, sites)
        return F.dropout(y, self.dropout, self.training)

    def aux_loss(self) -> Tensor:
        """A scalar; 0 where it was handed over already."""
        loss, self._loss = self._loss, None
        return self.router.weight.new_zeros(()) if loss is None else loss

    def observed(self) -> dict[str, Tensor]:
        """Of the last forward pass: f (E), whose sum is 1, and the mean of −Σ_e p_e ln p_e, ln E where p is uniform."""
        return self._seen

    def _logits(self, x: Tensor, mask: Tensor | None) -> Tensor:
        read = self.norm["router"](x, mask) if self.norm else x
        with torch.autocast(x.device.type, enabled=False):
            return self.router(read.to(statistics_dtype(read.dtype)))

    def _read(self, x: Tensor, expert: int, routed_BTE: Tensor) -> Tensor:
        return self.norm[str(expert)](x, routed_BTE[..., expert]) if self.norm else x

    def _each_on_its_own(self, x: Tensor, gates_BTE: Tensor, routed_BTE: Tensor, sites: Sites) -> Tensor:
        """An expert without tokens is called like the others, so that its gradient is 0 and not missing."""
        gates_NE = gates_BTE.flatten(0, 1)
        tokens = torch.split(routed_BTE.flatten(0, 1).T.nonzero()[:, 1], routed_BTE.sum((0, 1)).tolist())
        y = gates_NE.new_zeros(x.shape).flatten(0, 1)
        out = x
        for index, (expert, own) in enumerate(zip(self.experts, tokens, strict=True)):
            read = self._read(x, index, routed_BTE).flatten(0, 1)[own]
            out = expert(read.unsqueeze(0), None, sites).squeeze(0)
            y.index_add_(0, own, gates_NE[own, index].unsqueeze(-1) * out)
        return y.view(x.shape).to(out.dtype)

    def _each_on_all(self, x: Tensor, gates_BTE: Tensor, routed_BTE: Tensor, sites: Sites) -> Tensor:
        y: Any = 0
        out = x
        for index, expert in enumerate(self.experts):
            own_BT = routed_BTE[..., index]
            read = self._read(x, index, routed_BTE).masked_fill(~own_BT.unsqueeze(-1), 0.0)  # 0 · ∞ is no 0
            out = expert(read, own_BT, sites)
            y = y + gates_BTE[..., index : index + 1] * out
        return y.to(out.dtype)

    def _observe(self, logits_BTE: Tensor, p_BTE: Tensor, routed_BTE: Tensor, mask: Tensor | None) -> None:
        real_BT1 = torch.ones_like(p_BTE[..., :1]) if mask is None else mask.unsqueeze(-1).to(p_BTE.dtype)
        count = real_BT1.sum().clamp(min=1)
        load_E = routed_BTE.to(p_BTE.dtype).sum((0, 1)) / (self.per_token * count)
        mean_E = (p_BTE * real_BT1).sum((0, 1)) / count
        balance = len(self.experts) * (load_E * mean_E).sum()
        log_z = (logits_BTE.logsumexp(-1, keepdim=True).square() * real_BT1).sum() / count
        self._loss = self.load_balance * balance + self.z_loss * log_z if self.training else None
        entropy = (torch.special.entr(p_BTE.detach()) * real_BT1).sum() / count
        self._seen = {"expert_load": load_E, "router_entropy": entropy}
