"""Normalisation layers: one class per norm, called as `norm(x_BTC, mask_BT)` and returning the shape and dtype of x.

B: sequences, T: positions, C: channels. `mask` is True at real tokens, None when every token is real. Statistics are
float32 whatever the dtype of x, and all else of a norm too, rounded once at the end, unless its `cast` says otherwise.
ε stands inside the square root; gain 1 and bias 0 at the start.

A norm whose statistics cross samples says in `problem` which micro-batches it cannot take, in `causal` whether its
training output sees later tokens, and while its attribute `frozen` is true it normalises by the batch in hand and
leaves its running statistics alone. One whose statistics can be rounded hands them to its `rounded` (`common.exact`)
before it applies them. A norm that cannot be trained under every setting names in `restrictions` the
fields of the config, the values that it takes, and why. `aux_loss` adds to the loss of the micro-batch just seen.
A norm that is, in evaluation, something without parameters times a scale plus a shift says so in `unfold`.

"Checked" in a docstring says what the equation was compared with; where a paper and its code differ, which is followed.
"""

from normexp.norms.batch import BatchNorm, batch_norms, batch_statistics
from normexp.norms.per_token import LayerNorm, PartialRMSNorm, RMSNorm, ScaleNorm, SeeDNorm
from normexp.norms.pointwise import DynamicErf, DynamicTanh, Identity
from normexp.norms.power import PowerNorm
from normexp.norms.regularized import RegularizedBatchNorm
from normexp.norms.switchable import SwitchableNorm

__all__ = [
    "BatchNorm",
    "DynamicErf",
    "DynamicTanh",
    "Identity",
    "LayerNorm",
    "PartialRMSNorm",
    "PowerNorm",
    "RMSNorm",
    "RegularizedBatchNorm",
    "ScaleNorm",
    "SeeDNorm",
    "SwitchableNorm",
    "batch_norms",
    "batch_statistics",
]
