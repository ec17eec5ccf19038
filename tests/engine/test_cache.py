"""Packed forward passes: many requests in one, wherever their rows lie, equal Transformers run on
each alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import (
    ARCHITECTURES,
    ROTARY,
    Rows,
    engine_model,
    fresh_rows,
    plain_model,
    run,
    tokens_of,
)

from leyline.engine.cache import ATTENTION, Chunk, forward
from leyline.engine.planes import Planes
from leyline.layout import layout_of

CAPACITY = 700
# A few hundred fp32 roundings in another order; rows and logits are of size 10 at most.
TOLERANCE = 1e-4


@dataclass
class Job:
    tokens: np.ndarray
    slots: np.ndarray
    todo: list[int]
    rows: Rows
    logits: torch.Tensor


def jobs(name: str, rng: np.random.Generator, planes: Planes) -> list[Job]:
    """Requests of all kinds. What they don't compute lies in the planes already, all other rows are
    NaN."""
    free = rng.permutation(CAPACITY)
    for stack in planes.stacks:
        stack.rows.fill_(float("nan"))
    out, used, run_at = [], 0, None
    for kind in (
        "prefill",
        "decode",
        "rest",
        "holes",
        "holes",
        "one token",
        "in one run",
        "holes in one run",
    ):
        n = 1 if kind == "one token" else int(rng.integers(20, 70))
        tokens = tokens_of(rng, n)
        if "run" in kind:
            start = run_at if run_at is not None else 0
            slots = np.arange(start, start + n)
            run_at = start + n
            free = np.setdiff1d(free, slots, assume_unique=True)
        else:
            slots = np.zeros(0, dtype=np.int64)
        out.append((kind, n, tokens, slots))
    free = rng.permutation(free)
    made = []
    for kind, n, tokens, slots in out:
        if not len(slots):
            slots, used = free[used : used + n], used + n
        if "holes" in kind:
            todo = sorted({*rng.choice(n, n // 3, replace=False).tolist(), n - 1})
        else:
            todo = list(range({"decode": n - 1, "rest": n // 2}.get(kind, 0), n))
        rows = fresh_rows(name, tokens)
        there = np.setdiff1d(np.arange(n), todo)
        for layer, (k, v) in enumerate(rows):
            planes.keys[layer][slots[there]] = k[there]
            planes.values[layer][slots[there]] = v[there]
        logits = run(plain_model(name), tokens)
        made.append(Job(tokens, slots.astype(np.int64), todo, rows, logits))
    return made


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_passes(name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in chunks, holes between rows that are there, and decoding, mixed at random in each
    pass, with masks for blocks of any size. Any row that a request should not read is NaN, so a
    single one read would show."""
    seed = block
    monkeypatch.setattr("leyline.engine.cache.BLOCK", block)
    rng = np.random.default_rng(seed)
    model = engine_model(name)
    layout = layout_of(model)
    planes = Planes(layout, CAPACITY, torch.float32, torch.device("cpu"))
    work = jobs(name, rng, planes)
    before = [stack.rows.clone() for stack in planes.stacks]
    model.set_attn_implementation(ATTENTION)
    latent = ROTARY[name].tensor == "values"
    written: set[int] = set()
    passes = 0
    with torch.inference_mode():
        while any(job.todo for job in work):
            chosen = [job for job in work if job.todo and rng.random() < 0.7]
            chunks: list[Chunk] = []
            tokens: list[int] = []
            expected: list[torch.Tensor] = []
            wanted: list[int] = []
            for job in rng.permutation(np.array(chosen, dtype=object)):
                n = int(rng.integers(1, 1 + len(job.todo)))
                at, job.todo = np.array(job.todo[:n]), job.todo[n:]
                wanted += [len(tokens) + i for i in range(n) if rng.random() < 0.5 or i == n - 1]
                expected += [job.logits[p] for p in at]
                tokens += job.tokens[at].tolist()
                chunks.append(Chunk(job.slots[: at[-1] + 1], at))
                written |= set(job.slots[at].tolist())
            if not chunks:
                continue
            passes += 1
            got = forward(model, np.array(tokens), chunks, planes, latent, wanted)
            want = torch.stack([expected[i] for i in wanted])
            assert got.shape == want.shape
            assert (got - want).abs().max() <= TOLERANCE
    assert passes > 1
    for job in work:
        for layer, rows in enumerate(job.rows):
            for plane, want in zip((planes.keys[layer], planes.values[layer]), rows, strict=True):
                assert (plane[job.slots] - want).abs().max() <= TOLERANCE
    untouched = np.setdiff1d(np.arange(CAPACITY), list(written))
    for stack, old in zip(planes.stacks, before, strict=True):
        same = stack.rows[:, untouched].nan_to_num(7.0) == old[:, untouched].nan_to_num(7.0)
        assert same.all(), "a pass wrote to rows that are not its own"


def test_unsupported_attention_is_refused() -> None:
    """Features that the attention here would silently leave out raise."""
    from leyline.engine.cache import attention

    q = torch.zeros(1, 1, 1, 4)
    for feature in ("s_aux", "softcap", "sliding_window"):
        with pytest.raises(NotImplementedError, match=feature):
            attention(torch.nn.Module(), q, q, q, None, **{feature: 1})
