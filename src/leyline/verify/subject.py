"""The model under test, in an engine, and token sequences to try it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leyline.engine.engine import Config, Engine
from leyline.replay.turns import encode
from leyline.tiny import TINY, tiny_model
from leyline.traces import load_traces

LONGEST = 512
"""Tokens of the longest prompt, recorded sessions aside."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model in an engine. text: tokens to cut prompts from, int64: real conversation where the
    model has a tokenizer and real weights, else random."""

    name: str
    engine: Engine
    tokenizer: Any
    text: np.ndarray

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.store.planes.keys[0].dtype

    @property
    def speaks(self) -> bool:
        """Whether what it says can mean something."""
        return self.tokenizer is not None


def load(name: str, source: Path | str, memory_gib: float, dtype: str = "auto") -> Subject:
    """source: a model directory, or the name of a tiny random model, which takes any dtype.

    Raises Unsupported, with the reason, for a model that can't be spliced, and ValueError where
    there is no room for the prompts.
    """
    config = Config(memory_gib=memory_gib)
    if isinstance(source, str):
        kind = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        engine = Engine(tiny_model(source, kind), None, config, name)
    else:
        engine = Engine.load(source, dtype=dtype, config=config, name=name)
    if engine.max_tokens < LONGEST:
        engine.close()
        raise ValueError(
            f"{name}: prompts of {LONGEST} tokens are tried, but {memory_gib} GiB hold and the "
            f"model takes {engine.max_tokens}; give more --memory if the model takes more"
        )
    tokenizer = engine.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        return Subject(name, engine, None, random_text(engine.vocab_size))
    return Subject(name, engine, tokenizer, conversation(tokenizer))


def is_tiny(name: str) -> bool:
    return name in TINY


def random_text(vocab_size: int, n: int = 100_000) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, n)


def conversation(tokenizer: Any) -> np.ndarray:
    """The shipped sessions as one text; short ones first."""
    sessions = sorted(load_traces(), key=lambda s: sum(len(m["content"]) for m in s.messages))
    texts = [
        tokenizer.apply_chat_template(list(session.messages), tokenize=False)
        for session in sessions[:6]
    ]
    return encode(tokenizer, "".join(texts))
