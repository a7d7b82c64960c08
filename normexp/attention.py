"""Scores and sums of causal attention: heads that share keys, a window, a soft cap.

B: sequences, T: positions, H: heads, G: heads of k and v, H / G of q to each (2305.13245), K: channels per head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from normexp.kernels.formula import statistics_dtype


def attend(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, *, scale: float | None, window: int, softcap: float, dropout: float
) -> Tensor:
    """softmax(z + mask) v for the scores z = scale · q kᵀ, scale None being 1/√K; with a `softcap` s, z becomes
    s · tanh(z / s) (Gemma 2, 2408.00118).

    `window`: the newest tokens that a token sees, itself among them; 0: all so far. The scores under a soft cap are
    float32. Checked: the modelling code of Gemma 2 in transformers, whose scores keep the type of q.
    """
    length = q_BHTK.shape[-2]
    if softcap:
        return _capped(q_BHTK, k_BGTK, v_BGTK, scale, visible(length, window, q_BHTK.device), softcap, dropout)
    local = 0 < window < length
    return F.scaled_dot_product_attention(
        q_BHTK,
        k_BGTK,
        v_BGTK,
        attn_mask=visible(length, window, q_BHTK.device) if local else None,
        is_causal=not local,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q_BHTK.shape[1] != k_BGTK.shape[1],
    )


def visible(length: int, window: int, device: torch.device) -> Tensor:
    """(T, T): whether the token of the row sees that of the column."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen_TT: Tensor, softcap: float, dropout: float
) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    z = (q @ k.transpose(-1, -2)).to(statistics_dtype(q.dtype)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    z = softcap * torch.tanh(z / softcap)
    weights = z.masked_fill(~seen_TT, -torch.inf).softmax(-1)
    return F.dropout(weights, dropout).to(v.dtype) @ v
