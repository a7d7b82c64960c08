"""What Hugging Face's config.json of a family says, as overrides of ours, and back.

A key is translated, or it may have one value only, or it is known to change no logit. Every other key is refused by
name: none is ignored. A recipe of ours is a family's form; what a key can say is what may differ from the recipe.
Checked: the configuration and modelling code of transformers 5.24, by parity in tests/test_parity.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from normexp.convert import names
from normexp.fields import PositiveFloat, PositiveInt, UnitInterval, UserError, cast, show, suggest

Values = dict[str, Any]

# Keys that change no logit.
SILENT = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path", "task_specific_params", "cache_implementation",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "vocab_size",
}  # fmt: skip
PLAIN = {"attention_bias": False, "attention_dropout": 0.0}
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

TYPES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"), PositiveInt),
    **dict.fromkeys(("max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"), PositiveInt),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window", "n_inner", "n_ctx"), PositiveInt | None),
    **dict.fromkeys(("rope_theta", "attn_logit_softcapping", "final_logit_softcapping"), PositiveFloat | None),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), PositiveFloat),
    **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), UnitInterval),
    "query_pre_attn_scalar": PositiveInt,
    "tie_word_embeddings": bool,
    "activation_function": Literal[tuple(ACTIVATIONS)],
    "layer_types": list[Literal["sliding_attention", "full_attention"]] | None,
}


@dataclass(frozen=True)
class Family:
    """`model_type` is also the name of the recipe."""

    model_type: str
    architecture: str
    names: names.Names
    keys: Mapping[str, str]  # field -> the key of the same value
    read: Callable[[Values], Values]  # the rest of their config -> ours
    write: Callable[[Values], Values]  # and back
    only: Mapping[str, Any]  # keys with the one value that ours has
    defaults: Mapping[str, Any]  # of keys that a file may leave out
    free: frozenset[str]  # fields that may differ from the recipe's: translated, or without a part in the logits

    def to_ours(self, config: Mapping[str, Any]) -> Values:
        """Fields of ours, by path. UserError names the key that ours has no place for, that is missing, or that is not
        of its type."""
        given = {**self.defaults, **config}
        for key, value in self.only.items():
            if given.get(key) not in (None, value):
                raise UserError(f"{key}={show(given[key])}: normexp has {show(value)} only")
        for field, key in self.keys.items():
            if given.get(key) is None:
                raise UserError(f"{key}: is missing from config.json, for {field}")
        used = Reader({key: cast(value, TYPES.get(key, Any), key) for key, value in given.items()})
        ours = {field: used[key] for field, key in self.keys.items()} | self.read(used)
        for key in sorted(set(config) - used.seen - set(self.only) - SILENT):
            if config[key] is not None:
                known = {*self.keys.values(), *self.only, *self.defaults}
                raise UserError(
                    f"{key}={show(config[key])}: normexp knows no such field of {self.model_type}{suggest(key, known)}"
                )
        return ours

    def to_theirs(self, ours: Mapping[str, Any], vocab_size: int) -> Values:
        """config.json. `ours`: fields by path."""
        about = {"architectures": [self.architecture], "model_type": self.model_type, "vocab_size": vocab_size}
        ends: Values = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return about | ends | dict(self.only) | {key: ours[f] for f, key in self.keys.items()} | self.write(dict(ours))


class Reader(dict[str, Any]):
    """Remembers which keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{key}: is missing from config.json")

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def _read_rotary(theirs: Values) -> Values:
    """Heads, MLP and rotary embedding of llama and its kin."""
    width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    shared, size = theirs.get("num_key_value_heads"), theirs.get("head_dim")
    return {
        "model.mlp_ratio": theirs["intermediate_size"] / width,
        "model.kv_heads": 0 if shared in (None, heads) else shared,
        "model.head_width": 0 if size is None or size * heads == width else size,
        "model.rotary_base": _rope(theirs),
        "model.tied": theirs["tie_word_embeddings"],
    }


def _rope(theirs: Values) -> float:
    """The base; rope_parameters is the form of transformers 5, rope_theta with rope_scaling the older one."""
    base: float = theirs.get("rope_theta") or 10_000.0
    for key in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(key)
        if not isinstance(rope, dict | None):
            raise UserError(f"{key}={show(rope)}: must be null or an object that holds rope_theta")
        for name, value in (rope or {}).items():
            if name == "rope_theta":
                base = cast(value, PositiveFloat, f"{key}.{name}")
            elif name not in ("rope_type", "type") or value != "default":
                raise UserError(f"{key}.{name}={show(value)}: normexp rotates by rope_theta alone")
    return base


def _write_rotary(ours: Values) -> Values:
    width, heads = ours["model.width"], ours["model.heads"]
    return {
        "intermediate_size": round(ours["model.mlp_ratio"] * width),
        "num_key_value_heads": ours["model.kv_heads"] or heads,
        "head_dim": ours["model.head_width"] or width // heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": ours["model.rotary_base"]},
        "rope_theta": ours["model.rotary_base"],
        "tie_word_embeddings": ours["model.tied"],
    }


def _read_gemma2(theirs: Values) -> Values:
    ours = _read_rotary(theirs)
    scalar, size = theirs["query_pre_attn_scalar"], theirs["head_dim"]
    window, local = theirs["sliding_window"] or 0, "all"
    even = [f"{kind}_attention" for kind in ("sliding", "full")]
    depth = theirs["num_hidden_layers"]
    alternating = (even * depth)[:depth]
    types = alternating if theirs.get("layer_types") is None else theirs["layer_types"]
    if len(types) != depth:
        raise UserError(f"layer_types={show(types)}: has {len(types)} layers, not num_hidden_layers={depth}")
    if types == alternating:
        local = "even"
    elif set(types) == {even[1]}:
        window = 0
    elif set(types) != {even[0]}:
        raise UserError(
            f"layer_types={show(types)}: normexp has local layers at all, at every second from the first, or none"
        )
    return ours | {
        "model.query_scale": 0.0 if scalar == size else scalar**-0.5,
        "model.window": window,
        "model.local_layers": local,
        "model.attn_softcap": theirs["attn_logit_softcapping"] or 0.0,
        "model.logit_softcap": theirs["final_logit_softcapping"] or 0.0,
    }


def _write_gemma2(ours: Values) -> Values:
    theirs = _write_rotary(ours)
    scale = ours["model.query_scale"]
    scalar = round(scale**-2) if scale else theirs["head_dim"]
    if scale and scalar**-0.5 != scale:
        raise UserError(f"model.query_scale={scale!r}: is no 1/√n of an integer n, as query_pre_attn_scalar has to be")
    window, layers = ours["model.window"], range(ours["model.depth"])
    local = [window and (ours["model.local_layers"] == "all" or layer % 2 == 0) for layer in layers]
    return theirs | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or ours["model.context"],
        "layer_types": ["sliding_attention" if here else "full_attention" for here in local],
        "attn_logit_softcapping": ours["model.attn_softcap"] or None,
        "final_logit_softcapping": ours["model.logit_softcap"] or None,
    }


def _read_gpt2(theirs: Values) -> Values:
    dropouts = {theirs[key] for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")}
    if len(dropouts) > 1:
        raise UserError(
            f"attn_pdrop={theirs['attn_pdrop']}: normexp has one dropout; resid_pdrop and embd_pdrop differ"
        )
    if theirs.get("n_ctx") not in (None, theirs["n_positions"]):
        raise UserError(f"n_ctx={theirs['n_ctx']}: is not n_positions={theirs['n_positions']}")
    width = theirs["n_embd"]
    return {
        "model.mlp_ratio": (theirs["n_inner"] or 4 * width) / width,
        "model.mlp": ACTIVATIONS[theirs["activation_function"]],
        "model.dropout": dropouts.pop(),
    }


def _write_gpt2(ours: Values) -> Values:
    activation = next(theirs for theirs, kind in ACTIVATIONS.items() if kind == ours["model.mlp"])
    return {
        "n_inner": round(ours["model.mlp_ratio"] * ours["model.width"]),
        "activation_function": activation,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), ours["model.dropout"]),
    }


ROTARY_KEYS = {
    "model.width": "hidden_size", "model.depth": "num_hidden_layers", "model.heads": "num_attention_heads",
    "model.context": "max_position_embeddings", "norm.eps": "rms_norm_eps",
}  # fmt: skip
GPT2_KEYS = {
    "model.width": "n_embd", "model.depth": "n_layer", "model.heads": "n_head", "model.context": "n_positions",
    "norm.eps": "layer_norm_epsilon",
}  # fmt: skip
ROTARY = {"model.mlp_ratio", "model.kv_heads", "model.head_width", "model.rotary_base", "model.tied"} | set(ROTARY_KEYS)
GEMMA2 = {"model.query_scale", "model.window", "model.local_layers", "model.attn_softcap", "model.logit_softcap"}
TRAINING = {"model.init", "model.dropout", "norm.kernel"}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "gpt2", "GPT2LMHeadModel", names.GPT2, GPT2_KEYS, _read_gpt2, _write_gpt2,
            only={
                "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
                "add_cross_attention": False, "tie_word_embeddings": True,
            },
            defaults={
                "n_inner": None, "activation_function": "gelu_new", "attn_pdrop": 0.1, "resid_pdrop": 0.1,
                "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
            },
            free=frozenset(GPT2_KEYS) | TRAINING | {"model.mlp_ratio", "model.mlp", "norm.cast"},
        ),
        Family(
            "llama", "LlamaForCausalLM", names.LLAMA, ROTARY_KEYS, _read_rotary, _write_rotary,
            only=PLAIN | {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1},
            defaults={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
            free=frozenset(ROTARY | TRAINING),
        ),
        Family(
            "gemma2", "Gemma2ForCausalLM", names.GEMMA2, ROTARY_KEYS, _read_gemma2, _write_gemma2,
            only=PLAIN | {
                "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh",
                "use_bidirectional_attention": False,
            },
            defaults={
                "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256,
                "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
            },
            free=frozenset(ROTARY | GEMMA2 | TRAINING),
        ),
        Family(
            "olmo2", "Olmo2ForCausalLM", names.OLMO2, ROTARY_KEYS, _read_rotary, _write_rotary,
            only=PLAIN | {"hidden_act": "silu"},
            defaults={"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
            free=frozenset(ROTARY | TRAINING),
        ),
    )
}  # fmt: skip
