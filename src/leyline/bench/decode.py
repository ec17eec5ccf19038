"""Decoding: one request against `model.generate`, and eight at once against one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from leyline.bench.row import Row
from leyline.bench.timing import paired, prefill, token_times

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

GOAL_ONE, GOAL_BATCH = 0.8, 3.0


class _Clock:
    """A streamer for `generate`: the times at which its tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def run(
    engine: Engine,
    bare: Any,
    tokens: np.ndarray,
    lengths: tuple[int, ...],
    new: int,
    repeats: int,
    batch: int = 8,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """One row a prompt length against `generate`, and one for the batch, at the first length."""
    rows = [_single(engine, bare, tokens[:n], new, repeats, say) for n in lengths]
    return [*rows, _batched(engine, tokens, lengths[0], new, repeats, batch, say)]


def _single(
    engine: Engine,
    bare: Any,
    prompt: np.ndarray,
    new: int,
    repeats: int,
    say: Callable[[str], None],
) -> Row:
    n = len(prompt)
    _generate(bare, prompt, 2), _engine(engine, [prompt], 2)  # the first call sets things up
    pairs = []
    for i in range(repeats):
        say(f"one request, {n} tokens before, {i + 1} of {repeats}")
        pairs.append((1 / _generate(bare, prompt, new), 1 / _engine(engine, [prompt], new)))
    alone, ours, ratio = paired(pairs)
    return Row(
        f"decode.{n}",
        f"decode throughput at batch 1 / model.generate, {n}-token prompt, {new} tokens, greedy",
        1 / ratio,
        at_least=GOAL_ONE,
        details={"engine_tokens_per_s": ours, "generate_tokens_per_s": alone, "pairs": pairs},
    )


def _batched(
    engine: Engine,
    tokens: np.ndarray,
    n: int,
    new: int,
    repeats: int,
    batch: int,
    say: Callable[[str], None],
) -> Row:
    prompts = [tokens[i * n : (i + 1) * n] for i in range(batch)]
    _engine(engine, prompts, new)  # the first call sets things up
    pairs = []
    for i in range(repeats):
        say(f"{batch} requests, {i + 1} of {repeats}")
        one = 1 / _engine(engine, prompts[:1], new)
        pairs.append((1 / _engine(engine, prompts, new), one))
    many, one, ratio = paired(pairs)
    return Row(
        f"decode.batch{batch}",
        f"decode throughput at batch {batch} / batch 1, {n}-token prompts",
        ratio,
        at_least=GOAL_BATCH,
        details={"batch_tokens_per_s": many, "one_tokens_per_s": one, "pairs": pairs},
    )


def _generate(bare: Any, prompt: np.ndarray, new: int) -> float:
    """Seconds a token, the first one left out."""
    import torch

    ids = torch.from_numpy(prompt[None])
    clock = _Clock()
    bare.generation_config.eos_token_id = None  # or it might stop early
    bare.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    times = clock.times[1:]  # the prompt comes first
    return (times[-1] - times[0]) / (len(times) - 1)


def _engine(engine: Engine, prompts: list[np.ndarray], new: int) -> float:
    """Seconds a token while all the requests decode. The cache holds the prompts, nothing else."""
    from leyline.engine.request import Request, Sampling

    engine.reset()
    for prompt in prompts:
        prefill(engine, prompt)
    sampling = Sampling(max_tokens=new, ignore_eos=True)
    times = token_times(engine, [Request(prompt, sampling) for prompt in prompts])
    start, end = max(mine[0] for mine in times), min(mine[-1] for mine in times)
    count = sum(1 for mine in times for at in mine if start < at <= end)
    return (end - start) / count
