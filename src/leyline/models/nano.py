"""`nano`: a trained DeepSeek-V2 (MLA) language model of four million parameters, in the package.

Trained by `scripts/train_nano.py` on the Python standard library. It is no use as an assistant; it
is there because its cache rows are those of the real models (latent 512, rotary 64, YaRN), and what
it says depends on its context.
"""

from __future__ import annotations

from pathlib import Path

NANO = "nano"


def nano_path() -> Path:
    """Directory with config, bf16 safetensors and tokenizer, as Transformers, SGLang and vLLM load
    it."""
    return Path(__file__).parent.parent / "data" / "nano"
