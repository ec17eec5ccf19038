"""Tiny random models on disk, as SGLang loads them: a few MB, 512 tokens, made in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_bpe import tiny_bpe
from transformers import PreTrainedTokenizerFast

from leyline.sglang.cpu.checkpoint import write_tiny

TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


_COMMON: dict[str, Any] = dict(
    num_hidden_layers=4, bos_token_id=0, eos_token_id=2, initializer_range=0.2
)
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mla": ("deepseek_v2", dict(_COMMON, max_position_embeddings=8192)),
    # Experts are chosen by a threshold: where two are a tie, rounding changes an answer by much.
    "mla without experts": (
        "deepseek_v2",
        dict(
            _COMMON,
            max_position_embeddings=8192,
            first_k_dense_replace=_COMMON["num_hidden_layers"],
        ),
    ),
    "gqa": ("llama", dict(_COMMON, max_position_embeddings=16384)),
}
"""Recipes of leyline.tiny, and what differs from them."""


def write_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """One of RECIPES."""
    name, changes = RECIPES[kind]
    return write_tiny(folder, name, tiny_tokenizer(), dtype, **changes)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens with a chat template."""
    return tiny_bpe(TEMPLATE)
