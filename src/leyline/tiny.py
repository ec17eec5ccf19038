"""Tiny random models of the real architectures: real cache layout and rotary settings, small
everything else.

The sizes that decide how rows are cached and rotated (latent, rotary width, pairing, frequencies)
are those of the named model; depth, width and vocabulary are cut so that a model is built in well
under a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCAB = 512

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    max_position_embeddings=8192,
    initializer_range=0.1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)
_EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)
_LATENT: dict[str, Any] = dict(kv_lora_rank=512, qk_rope_head_dim=64)


@dataclass(frozen=True)
class Tiny:
    """A recipe: a Transformers model type, whose settings it copies, and what differs from the
    common ones."""

    model_type: str
    like: str
    settings: dict[str, Any] = field(default_factory=dict)


TINY: dict[str, Tiny] = {
    "deepseek_v2": Tiny(
        "deepseek_v2",
        "DeepSeek-V2-Lite: MLA, interleaved pairs, YaRN with mscale",
        dict(
            **_LATENT,
            **_EXPERTS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            topk_method="greedy",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            max_position_embeddings=163840,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=10000.0,
                factor=40.0,
                beta_fast=32.0,
                beta_slow=1.0,
                mscale=0.707,
                mscale_all_dim=0.707,
                original_max_position_embeddings=4096,
            ),
        ),
    ),
    "moonlight": Tiny(
        "deepseek_v3",
        "Moonlight-16B-A3B: MLA, cached as halves, no query latent",
        dict(
            **_LATENT,
            **_EXPERTS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            routed_scaling_factor=2.446,
            rope_interleave=True,
            rope_parameters=dict(rope_type="default", rope_theta=50000.0),
        ),
    ),
    "joyai_flash": Tiny(
        "deepseek_v3",
        "JoyAI-LLM-Flash: MLA, cached as halves, with a query latent and a long base",
        dict(
            **_LATENT,
            **_EXPERTS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=48,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            rope_interleave=True,
            max_position_embeddings=131072,
            rope_parameters=dict(rope_type="default", rope_theta=32000000.0),
        ),
    ),
    "glm4_moe_lite": Tiny(
        "glm4_moe_lite",
        "GLM-4.7-Flash: MLA, cached as halves, values wider than keys",
        dict(
            **_LATENT,
            **_EXPERTS,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=48,
            qk_nope_head_dim=24,
            v_head_dim=32,
            routed_scaling_factor=1.8,
            max_position_embeddings=202752,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "llama": Tiny(
        "llama",
        "Llama-3.2-1B: GQA, Llama-3 scaling",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=131072,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500000.0,
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
    "qwen3": Tiny(
        "qwen3",
        "Qwen3-0.6B: GQA, normed keys, heads wider than the hidden size's share",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=40960,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
    ),
    "phi": Tiny(
        "phi",
        "Phi-2: MHA, 40 % of each head rotates",
        dict(
            num_attention_heads=4,
            hidden_size=320,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.4
            ),
        ),
    ),
    "gpt_neox": Tiny(
        "gpt_neox",
        "Pythia: MHA, a quarter of each head rotates, parallel residual",
        dict(
            num_attention_heads=4,
            hidden_size=256,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25
            ),
        ),
    ),
    "glm4": Tiny(
        "glm4",
        "GLM-4-9B-0414: GQA, interleaved pairs in half of each head",
        dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=32768,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
            ),
        ),
    ),
    "smollm3": Tiny(
        "smollm3",
        "SmolLM3-3B: GQA, every fourth layer without positions",
        dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=65536,
            rope_parameters=dict(rope_type="default", rope_theta=5000000.0),
        ),
    ),
}


def tiny_config(name: str, **changes: Any) -> Any:
    """The Transformers config of a recipe in TINY, with `changes` on top. KeyError names the
    recipes."""
    from transformers import CONFIG_MAPPING

    if name not in TINY:
        raise KeyError(f"no tiny model {name!r}; there are {', '.join(sorted(TINY))}")
    recipe = TINY[name]
    return CONFIG_MAPPING[recipe.model_type](**{**_COMMON, **recipe.settings, **changes})


def tiny_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> nn.Module:
    """A random causal LM of a recipe in TINY, in evaluation mode; the same weights for the same
    seed.

    Frequencies stay fp32 whatever the dtype, as in a model loaded with `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(name, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
