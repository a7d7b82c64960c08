"""Normalisation layers: one class per norm, called as `norm(x_BTC, mask_BT)` and returning the shape and dtype of x.

B: sequences, T: positions, C: channels. `mask` is True at real tokens, None when every token is real. Statistics are
float32 whatever the dtype of x; ε stands inside the square root; gain 1 and bias 0 at the start.
A norm whose statistics cross samples says in `problem` which micro-batches it cannot take, and while its attribute
`frozen` is true it normalises by the batch in hand and leaves its running statistics alone.
A norm that is, in evaluation, something without parameters times a scale plus a shift says so in `unfold`.
"""

from normexp.norms.batch import BatchNorm, batch_norms, batch_statistics
from normexp.norms.per_token import LayerNorm, RMSNorm
from normexp.norms.pointwise import Identity

__all__ = ["BatchNorm", "Identity", "LayerNorm", "RMSNorm", "batch_norms", "batch_statistics"]
