"""Prefill throughput against a bare Transformers forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from leyline.bench.row import Row
from leyline.bench.timing import first_token, paired, seconds

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

GOAL = 0.95


def run(
    engine: Engine,
    bare: Any,
    tokens: np.ndarray,
    lengths: tuple[int, ...],
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One row a length: bare seconds / engine seconds until the first token is known."""
    import torch

    rows = []
    for n in lengths:
        ids = torch.from_numpy(tokens[None, :n])

        def forward(ids: torch.Tensor = ids) -> None:
            with torch.inference_mode():
                bare(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()

        forward(ids[:, :64])  # the first call sets things up
        first_token(engine, tokens[:64])
        pairs = []
        for i in range(repeats):
            say(f"{n} tokens, {i + 1} of {repeats}")
            engine.reset()
            pairs.append((seconds(forward), first_token(engine, tokens[:n])[0]))
        alone, ours, ratio = paired(pairs)
        rows.append(
            Row(
                f"prefill.{n}",
                f"prefill throughput / a bare Transformers forward pass, {n} tokens",
                ratio,
                at_least=GOAL,
                details={
                    "engine_tokens_per_s": n / ours,
                    "bare_tokens_per_s": n / alone,
                    "pairs": pairs,
                },
            )
        )
    return rows
