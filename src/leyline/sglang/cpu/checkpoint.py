"""Tiny random models on disk, as SGLang loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_DEEPSEEK_V2: dict[str, Any] = dict(
    rope_theta=10000,
    rope_scaling=dict(
        type="yarn",
        factor=40,
        beta_fast=32,
        beta_slow=1,
        mscale=0.707,
        mscale_all_dim=0.707,
        original_max_position_embeddings=4096,
    ),
    moe_layer_freq=1,
    ep_size=1,
    seq_aux=True,
    aux_loss_alpha=0.001,
    scoring_func="softmax",
)
"""What SGLang reads in DeepSeek-V2-Lite's own config, and Transformers doesn't write."""


def write_tiny(
    folder: Path, name: str, tokenizer: Any, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A recipe of `leyline.tiny` with `changes` of its config, and the tokenizer beside it. The
    weights are the same whatever the dtype, but for rounding. Its answers mean nothing."""
    from leyline.tiny import tiny_model

    model: Any = tiny_model(name, torch.float32, **changes)
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if name == "deepseek_v2":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config.pop("rope_parameters", None)
        file.write_text(json.dumps(config | _DEEPSEEK_V2, indent=1))
    return folder
