"""Tiny models of transformers with random weights, and their folders: nothing is downloaded."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
VOCABULARY, LENGTH = 29, 24
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 60}
ROTARY = SIZES | {"max_position_embeddings": 32, "num_key_value_heads": 2}
BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
CONFIGS = {
    "gpt2": {"n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0},
    "llama": ROTARY | BASE,
    "gemma2": ROTARY | {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0,
                        "final_logit_softcapping": 3.0, "pad_token_id": None},
    "olmo2": ROTARY | BASE | {"pad_token_id": None},
}  # fmt: skip
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def model(kind: str, **changes):
    """Weights far from where they start, so that no gain or bias can stand for another."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{"vocab_size": VOCABULARY, **CONFIGS[kind], **changes})
    source = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        built = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for parameter in built.parameters():
            parameter += (0.3 if parameter.ndim == 1 else 0.15) * torch.randn(parameter.shape, generator=source)
    return built
