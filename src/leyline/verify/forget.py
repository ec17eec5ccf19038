"""FORGET: the answer of a fresh engine (I5), and no row left that read the span."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.directive import Directive, Mode
from leyline.verify.look import logits, prefill, rows, session_key
from leyline.verify.subject import Subject

SOURCE, START, SPAN, STUB, NEW = 400, 80, 120, 6, 12
ANSWER = 16


def run(subject: Subject, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Compare with an engine that has cached the exact prefix and nothing else, bitwise; and with
    an empty one, where the prompt is prefilled in other pieces and sums may round otherwise."""
    engine, rng = subject.engine, np.random.default_rng()
    differ, worst, noise, left = 0, 0.0, 0.0, 0
    for repeat in range(repeats):
        say(f"{repeat + 1} of {repeats}")
        at = int(rng.integers(0, len(subject.text) - SOURCE - NEW - STUB))
        text = subject.text[at : at + SOURCE + NEW + STUB]
        source, new, stub = np.split(text, [SOURCE, SOURCE + NEW])
        edit = Directive(START, START + SPAN, tuple(stub.tolist()), Mode.FORGET)
        target = np.concatenate([source[:START], stub, source[START + SPAN :], new])
        engine.reset()
        prefill(engine, source, Channel("verify"))
        prefill(engine, target, Channel("verify", directives=(edit,), scrub=True))
        key = session_key(engine, "verify")
        stats = engine.stats()
        left += stats.cached - len(target)
        ours = logits(engine, key, len(key) - 1), rows(engine, key)
        engine.reset()
        prefill(engine, source)
        prefill(engine, target)
        same = logits(engine, target, len(target) - 1), rows(engine, target)
        engine.reset()
        prefill(engine, target)
        empty = logits(engine, target, len(target) - 1)
        differ += _different(ours[1], same[1])
        worst = max(worst, _apart(ours[0], empty))
        noise = max(noise, _apart(same[0], empty))
    return [
        Row(
            "forget.rows",
            f"FORGET, {repeats} prompts: elements that differ from a fresh engine's (I5)",
            differ,
            unit="count",
            at_most=0,
        ),
        Row(
            "forget.left",
            "rows left in the cache that the edited prompt does not have",
            left,
            unit="count",
            at_most=0,
        ),
        Row(
            "forget.empty",
            "largest difference of log-probabilities from an empty engine's; a plain prefix "
            f"cache: {noise:.2g}",
            worst,
            unit="nats",
            at_most=noise,
        ),
    ]


def _different(ours: list, theirs: list) -> int:
    return sum(
        int((a != b).sum())
        for both, other in zip(ours, theirs, strict=True)
        for a, b in zip(both, other, strict=True)
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs().max())
