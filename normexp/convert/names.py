"""State dicts of Hugging Face's models and ours: pure functions on dicts of tensors, which keep type and bits."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normexp.fields import UserError, suggest

State = dict[str, Tensor]

DERIVED = re.compile(
    r"(.+\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)"
)  # buffers of old files that follow from the config
TIED = "head.weight"  # of ours; their files leave it out where it is the embedding


@dataclass(frozen=True)
class Names:
    """Modules that ours and theirs both have; ours -> theirs."""

    outer: Mapping[str, str]
    layers: str  # theirs, in front of a layer's number; ours is `blocks`
    inner: Mapping[str, str]  # within a layer
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # theirs -> ours, output beside output
    transposed: frozenset[str] = frozenset()  # theirs whose weight is (in, out)
    base: str = "model."  # in front of all but the head; a file of the model without its head lacks it


ATTENTION = {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
GATED = {"mlp.gate": "mlp.gate_proj", "mlp.in": "mlp.up_proj", "mlp.out": "mlp.down_proj"}
OUTER = {"embed.token": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}

LLAMA = Names(
    OUTER,
    "model.layers",
    {"norm.attn_in": "input_layernorm", "norm.mlp_in": "post_attention_layernorm", **ATTENTION, **GATED},
)
GEMMA2 = Names(
    OUTER,
    "model.layers",
    {
        "norm.attn_in": "input_layernorm",
        "norm.attn_branch": "post_attention_layernorm",
        "norm.mlp_in": "pre_feedforward_layernorm",
        "norm.mlp_branch": "post_feedforward_layernorm",
        **ATTENTION,
        **GATED,
    },
)
OLMO2 = Names(
    OUTER,
    "model.layers",
    {
        "norm.attn_branch": "post_attention_layernorm",
        "norm.mlp_branch": "post_feedforward_layernorm",
        "attn.norm.q": "self_attn.q_norm",
        "attn.norm.k": "self_attn.k_norm",
        **ATTENTION,
        **GATED,
    },
)
GPT2 = Names(
    {
        "embed.token": "transformer.wte",
        "embed.position": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "transformer.h",
    {
        "norm.attn_in": "ln_1",
        "norm.mlp_in": "ln_2",
        "attn.o": "attn.c_proj",
        "mlp.in": "mlp.c_fc",
        "mlp.out": "mlp.c_proj",
    },
    fused={"attn.c_attn": ("attn.q", "attn.k", "attn.v")},
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    base="transformer.",
)


def to_theirs(names: Names, ours: Mapping[str, Tensor], tied: bool) -> State:
    """`tied`: the head is the embedding and left out. UserError for a tensor that their model has no place for."""
    left, theirs = dict(ours), State()
    if tied:
        left.pop(TIED, None)
    for target, sources, transposed in _pairs(names, _depth(ours, "blocks")):
        for kind in ("weight", "bias"):
            pieces = [left.pop(f"{source}.{kind}") for source in sources if f"{source}.{kind}" in left]
            if pieces:
                whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                theirs[f"{target}.{kind}"] = whole.t().contiguous() if transposed and kind == "weight" else whole
    for name in left:
        raise UserError(f"{name}: has no place in a model of this family")
    return theirs


def to_ours(names: Names, theirs: Mapping[str, Tensor], tied: bool) -> State:
    """The inverse; with `tied`, the head is the embedding's tensor. Of a file that holds every tensor (`check`)."""
    ours: State = {}
    for target, sources, transposed in _pairs(names, _depth(theirs, names.layers)):
        for kind in ("weight", "bias"):
            if f"{target}.{kind}" not in theirs:
                continue
            whole = theirs[f"{target}.{kind}"]
            whole = whole.t() if transposed and kind == "weight" else whole
            pieces = whole.chunk(len(sources))
            ours |= {f"{s}.{kind}": piece.contiguous() for s, piece in zip(sources, pieces, strict=True)}
    return ours | ({TIED: ours["embed.token.weight"]} if tied else {})


def canonical(names: Names, theirs: Mapping[str, Tensor]) -> State:
    """Under the names of the model with its head, and without what follows from the config."""
    kept = {name: tensor for name, tensor in theirs.items() if not DERIVED.fullmatch(name)}
    if any(name.startswith(names.base) for name in kept):
        return kept
    return {name if name.startswith("lm_head.") else names.base + name: tensor for name, tensor in kept.items()}


def check(given: Mapping[str, Tensor], expected: Mapping[str, Tensor], tied: bool) -> State:
    """What is given, if it has the names and shapes of what is expected; UserError for the first that has not."""
    kept = dict(given)
    if tied and (head := kept.pop("lm_head.weight", None)) is not None:
        embedding = [t for name, t in kept.items() if name.endswith(("wte.weight", "embed_tokens.weight"))]
        if embedding and not torch.equal(head, embedding[0]):
            raise UserError("lm_head.weight: differs from the embedding, though the config ties them")
    for name, tensor in expected.items():
        if name not in kept:
            raise UserError(f"{name}: is missing from the weights")
        if kept[name].shape != tensor.shape:
            shapes = f"{tuple(kept[name].shape)}, not {tuple(tensor.shape)}"
            raise UserError(f"{name}: has shape {shapes}, as the config asks")
    for name in kept:
        if name not in expected:
            raise UserError(f"{name}: is in the weights, but not in the model{suggest(name, expected)}")
    return kept


def _pairs(names: Names, depth: int) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """(theirs, ours, whether transposed) of each of their modules."""
    for ours, theirs in names.outer.items():
        yield theirs, (ours,), False
    inner = {theirs: (ours,) for ours, theirs in names.inner.items()} | dict(names.fused)
    for layer in range(depth):
        for theirs, sources in inner.items():
            ours_here = tuple(f"blocks.{layer}.{source}" for source in sources)
            yield f"{names.layers}.{layer}.{theirs}", ours_here, theirs in names.transposed


def _depth(state: Mapping[str, Tensor], layers: str) -> int:
    numbers = [re.match(rf"{re.escape(layers)}\.(\d+)\.", name) for name in state]
    return max((int(number[1]) + 1 for number in numbers if number), default=0)
