"""A look into an engine at a quiet moment: what it has cached, and what the model says over it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from leyline.channel import Channel, Report
from leyline.engine.cache import Chunk, forward
from leyline.engine.engine import Engine
from leyline.engine.request import Sampling
from leyline.lineage import MARK_BITS

Rows = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, `[tokens, heads, columns]`."""


def prefill(engine: Engine, tokens: np.ndarray, channel: Channel | None = None) -> Report:
    """Cache a prompt as a session, or for everybody. Raises RuntimeError if it had to fall back."""
    report = engine.generate(tokens, Sampling(max_tokens=0), channel).report
    assert report is not None
    if report.fallback is not None:
        raise RuntimeError(f"the engine could not splice ({report.fallback}): more --memory")
    return report


def session_key(engine: Engine, session: str) -> np.ndarray:
    """The key under which a session's sequence is cached: its tokens, with a mark where edited."""
    lineage = engine.call(lambda: engine.store.lineages.get("", session))
    if lineage is None:
        raise KeyError(f"no session {session!r}")
    return lineage.key


def rows(engine: Engine, key: np.ndarray) -> Rows:
    """Copies of a sequence's cached rows. Raises RuntimeError if some are no longer there."""

    def read() -> Rows:
        slots = torch.from_numpy(_slots(engine, key)).to(engine.model.device)
        both = zip(engine.store.planes.keys, engine.store.planes.values, strict=True)
        return [(keys[slots].cpu(), values[slots].cpu()) for keys, values in both]

    return engine.call(read)


def logits(engine: Engine, key: np.ndarray, start: int) -> Tensor:
    """What the model says behind each of the tokens from `start` on, fp32
    `[len(key) - start, vocab]`: these tokens run once more over the rows cached before them. Their
    own rows are written again, to the same values."""

    def run() -> Tensor:
        slots = _slots(engine, key)
        positions = np.arange(start, len(key))
        tokens = key[start:] & ((1 << MARK_BITS) - 1)
        latent = any(layer.kind == "mla" for layer in engine.layout.layers)
        chunk = Chunk(slots, positions)
        wanted = list(range(len(positions)))
        out = forward(engine.model, tokens, [chunk], engine.store.planes, latent, wanted)
        return out.float().cpu()

    return engine.call(run)


def _slots(engine: Engine, key: np.ndarray) -> np.ndarray:
    slots = engine.store.tree.match(key).slots
    if len(slots) != len(key):
        raise RuntimeError(f"only {len(slots)} of {len(key)} rows are cached: give more memory")
    return slots
