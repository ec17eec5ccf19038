"""Tiny random models on disk, as SGLang loads them: a few MB, 512 tokens, made in a second."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leyline.tiny import VOCAB, tiny_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Recipe:
    """A recipe of leyline.tiny, what differs from it, and what the config says besides."""

    tiny: str
    changes: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = dict(
    max_position_embeddings=8192, bos_token_id=0, eos_token_id=2, initializer_range=0.2
)
RECIPES = {
    # SGLang reads these settings of DeepSeek-V2-Lite's own config; Transformers doesn't write them.
    "mla": Recipe(
        "deepseek_v2",
        dict(_COMMON, num_hidden_layers=4),
        dict(
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
        ),
    ),
    "gqa": Recipe("llama", dict(_COMMON, num_hidden_layers=4, max_position_embeddings=16384)),
}


def write_checkpoint(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    """One of RECIPES with the same random weights whatever the dtype, but for rounding."""
    recipe = RECIPES[kind]
    model: Any = tiny_model(recipe.tiny, torch.float32, **recipe.changes)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    if recipe.config:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config.pop("rope_parameters", None)
        file.write_text(json.dumps(config | recipe.config, indent=1))
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 tokens with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "nrst"]
    tokenizer.train_from_iterator([" ".join(words), "user assistant system tool"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[2], chat_template=TEMPLATE
    )
