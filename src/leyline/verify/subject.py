"""The model under test, in an engine, and token sequences to try it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leyline.engine.engine import Config, Engine
from leyline.replay.turns import encode, render
from leyline.tiny import TINY, tiny_model
from leyline.traces import load_traces

LONGEST = 768
"""Tokens of the longest prompt, recorded sessions aside."""


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A model in an engine. text: tokens to cut prompts from, int64: real conversation where the
    model has a tokenizer, else random."""

    name: str
    engine: Engine
    tokenizer: Any
    text: np.ndarray

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.store.planes.keys[0].dtype

    @property
    def speaks(self) -> bool:
        """Whether it can be asked to go on with a recorded session."""
        return self.tokenizer is not None and renders(self.tokenizer)


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
    if engine.tokenizer is None:
        return Subject(name, engine, None, random_text(engine.vocab_size))
    return Subject(name, engine, engine.tokenizer, conversation(engine.tokenizer))


def is_tiny(name: str) -> bool:
    return name in TINY


def random_text(vocab_size: int, n: int = 100_000) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab_size, n)


def conversation(tokenizer: Any) -> np.ndarray:
    """The six shortest shipped sessions as one text, rendered by the model's template if it has one
    that takes them."""
    sessions = sorted(load_traces(), key=lambda s: sum(len(m["content"]) for m in s.messages))
    if renders(tokenizer):
        texts = [render(tokenizer, list(session.messages)) for session in sessions[:6]]
    else:
        texts = [m["content"] + "\n" for session in sessions[:6] for m in session.messages]
    return encode(tokenizer, "".join(texts))


def renders(tokenizer: Any) -> bool:
    """Whether the chat template takes tool outputs. Templates raise whatever they like."""
    try:
        render(tokenizer, list(load_traces()[0].messages[:3]))
    except Exception:
        return False
    return True
