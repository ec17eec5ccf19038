"""FORGET: the answer of a fresh engine (I5), and no row left that read the span."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.directive import Directive, Mode
from leyline.engine.engine import Engine
from leyline.verify.look import logits, prefill, rows, session_key
from leyline.verify.subject import Subject

SOURCE, START, SPAN, STUB, NEW = 400, 80, 120, 6, 12
ANSWER = 16


def run(subject: Subject, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Compare with plain requests to an emptied engine, bitwise: the source, of which only the
    exact prefix can be shared, then the edited prompt. And with the edited prompt alone, which is
    prefilled in other pieces, so that sums may round otherwise."""
    engine, rng = subject.engine, np.random.default_rng()
    differ, worst, left, dirty = 0, 0.0, 0, 0
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
        left += abs(stats.cached - len(target))
        dirty += engine.call(lambda: _dirty(engine))
        ours = logits(engine, key, len(key) - 1), rows(engine, key)
        engine.reset()
        prefill(engine, source)
        prefill(engine, target)
        same = logits(engine, target, len(target) - 1), rows(engine, target)
        engine.reset()
        prefill(engine, target)
        empty = logits(engine, target, len(target) - 1)
        differ += _different(ours[1], same[1])
        worst = float(np.maximum(worst, _apart(ours[0], empty)))  # NaN stays
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
            "largest difference of log-probabilities from an empty engine's",
            worst,
            unit="nats",
            at_most=_tolerance(subject),
        ),
        Row(
            "forget.scrub",
            "free slots that still hold anything after scrub",
            dirty,
            unit="count",
            at_most=0,
        ),
    ]


def _dirty(engine: Engine) -> int:
    free = torch.from_numpy(engine.store.pool.free_slots()).to(engine.model.device)
    used = [
        (stack.rows[:, free] != 0).flatten(2).any(-1).any(0) for stack in engine.store.planes.stacks
    ]
    return int(torch.stack(used).any(0).sum())


def _tolerance(subject: Subject) -> float:
    """What other orders of sums can make of log-probabilities of about ten: in fp32 some hundred
    roundings through all layers, in narrower dtypes some dozen, most of which cancel."""
    return max(1e-4, 32 * torch.finfo(subject.dtype).eps)


def _different(ours: list, theirs: list) -> int:
    return sum(
        int((a != b).sum())
        for both, other in zip(ours, theirs, strict=True)
        for a, b in zip(both, other, strict=True)
    )


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().log_softmax(-1) - b.double().log_softmax(-1)).abs().max())
