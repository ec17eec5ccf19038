"""What a cache could hit at best on the prompts of an arm, from their tokens alone.

The cache is thought to be unbounded: it holds every prompt that was sent before, in the traces'
order, and nothing of the answers, which are recorded ones and so are new text in the next prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leyline.diff import derive_edits
from leyline.plan import make_plan
from leyline.replay.arms import Arm, Job, messages_of
from leyline.replay.turns import encode, render

HEAD = 64
"""Tokens compared first: most prompts of other sessions differ there."""

Call = tuple[str, int]
"""A session and the number of its call."""


def ceiling(
    tokenizer: Any, jobs: Sequence[Job], arm: Arm, keep: int, marks: tuple[str, str] = ("", "")
) -> dict[Call, tuple[int, int]]:
    """For each call: the prompt's tokens, and how many of them could come from the cache.

    marks: of the run, and of one before it, whose prompts are still cached and share what the chat
    template begins with; empty where the cache was emptied.
    """
    mark, before = marks
    found: dict[Call, tuple[int, int]] = {}
    earlier: list[np.ndarray] = []
    if before:
        first = messages_of(arm, jobs[0].calls[0], keep, before)
        earlier.append(encode(tokenizer, render(tokenizer, first)))
    for job in jobs:
        source = None
        for i, call in enumerate(job.calls):
            text = render(tokenizer, messages_of(arm, call, keep, mark))
            prompt = encode(tokenizer, text)
            cached = best(prompt, earlier, source if arm == "splice" else None)
            found[job.session, i] = (len(prompt), cached)
            earlier.append(prompt)
            source = prompt
    return found


def best(prompt: np.ndarray, earlier: Sequence[np.ndarray], source: np.ndarray | None) -> int:
    """Tokens of a prompt that can be had from rows of `earlier` prompts, as an exact prefix, and of
    `source`, the session's last prompt, wherever the diff keeps them. The last token can't be."""
    exact = max((_common(prompt, other) for other in earlier), default=0)
    exact = min(exact, len(prompt) - 1)
    if source is None:
        return exact
    keeps = make_plan(derive_edits(source, prompt)).keeps
    return exact + sum(max(0, keep.dst + keep.n - max(keep.dst, exact)) for keep in keeps)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    for n in (HEAD, min(len(a), len(b))):
        n = min(n, len(a), len(b))
        differ = np.flatnonzero(a[:n] != b[:n])
        if len(differ):
            return int(differ[0])
    return min(len(a), len(b))
