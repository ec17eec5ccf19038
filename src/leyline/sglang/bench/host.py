"""Host time of a splice: diff, plan, tree and slots. No model runs, and no row is copied.

The cache, its tree and its slots are SGLang's own, in this process, on the CPU.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import numpy as np

from leyline.bench.row import Row

GOAL_S = 5e-3
SLOTS = 65_536
VOCAB = 50_000


@dataclass(frozen=True, slots=True)
class Edit:
    """What is measured. n: edits, each of `span` tokens into `stub`; kept: rows behind the first.

    The first edit begins at `start`; the others are spread over the kept rows.
    """

    name: str
    what: str
    n: int = 1
    span: int = 500
    stub: int = 20
    page: int = 1
    goal: float | None = GOAL_S
    kept: int = 4000
    start: int = 100
    new: int = 50

    def prompts(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A source and what becomes of it."""
        source = rng.integers(0, VOCAB, self.start + self.n * self.span + self.kept)
        every = self.span + self.kept // self.n
        parts, at = [], 0
        for i in range(self.n):
            start = self.start + i * every
            parts += [source[at:start], rng.integers(0, VOCAB, self.stub)]
            at = start + self.span
        return source, np.concatenate([*parts, source[at:], rng.integers(0, VOCAB, self.new)])


EDITS = (
    Edit("replaced", "500 tokens into 20"),
    Edit("deleted", "500 tokens into none", stub=0),
    Edit("pages", "500 tokens into 20, page size 16", page=16),
    Edit("eight", "8 edits of 60 tokens into 20", n=8, span=60),
    Edit("eight_pages", "8 edits of 60 tokens into 20, page size 16", n=8, span=60, page=16),
)


def run(model: Path, repeats: int, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Two rows an edit, median and 95th percentile. model: any; SGLang wants to know one."""
    import torch

    settle(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of slots are small: waiting for a second thread costs more
    try:
        return _run(repeats, say)
    finally:
        torch.set_num_threads(threads)


def _run(repeats: int, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for edit in EDITS:
        say(edit.what)
        cache = make_cache(edit.page)
        rng = np.random.default_rng(0)
        gc.collect()
        gc.freeze()  # as SGLang's server does once it is warm
        times = [splice_once(cache, edit, rng, f"{edit.name}-{i}") for i in range(repeats + 5)]
        gc.unfreeze()
        rows += _rows(edit, times[5:])  # the first ones set things up
    return rows


def _rows(edit: Edit, times: list[float]) -> list[Row]:
    high = quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
    what = f"host time of a splice of {edit.kept // 1000} k rows, {edit.what}"
    details = {"seconds": times}
    return [
        Row(f"host.{edit.name}", what, median(times), "s", at_most=edit.goal, details=details),
        Row(f"host.{edit.name}.p95", "its 95th percentile", high, "s"),
    ]


def settle(model: Path) -> None:
    """Let SGLang work in this process, on the CPU."""
    from leyline.sglang import cpu

    os.environ.setdefault(cpu.ENGINE, "1")
    stand_in = str(Path(cpu.__file__).with_name("stand_in"))
    if stand_in not in sys.path:
        sys.path.insert(0, stand_in)
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(model), device="cpu", attention_backend=cpu.BACKEND)
    args.resolve_once()
    publish(args, role="scheduler")


def make_cache(page: int) -> Any:
    """Leyline's cache over a pool with rows as small as can be."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from leyline.sglang.cache import LeylineRadixCache
    from leyline.sglang.report import Metrics

    kind, device = torch.float32, "cpu"
    pool = MHATokenToKVPool(SLOTS, page, kind, 1, 2, 1, device, False)
    allocator = (
        TokenToKVPoolAllocator(SLOTS, kind, device, pool, False)
        if page == 1
        else PagedTokenToKVPoolAllocator(SLOTS, page, kind, device, pool, False)
    )
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(16, 20_000, device, False),
        token_to_kv_pool_allocator=allocator,
        page_size=page,
    )
    params.tree_components = (ComponentType.FULL,)
    cache = LeylineRadixCache(params)
    cache.attach(_NoRows(), Metrics(False, {}), VOCAB)  # type: ignore[arg-type]
    return cache


class _NoRows:
    """In place of `Rows`: what is left of a splice is host time."""

    def copy(self, *args: Any) -> None: ...

    def turn(self, *args: Any) -> None: ...


def splice_once(cache: Any, edit: Edit, rng: np.random.Generator, session: str) -> float:
    """Seconds of one splice in a session of its own, everything included that the plugin does until
    all kept rows have entered the request. Checks that they have."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from leyline.channel import Channel
    from leyline.sglang.turn import Turn

    cache.reset()
    cache.token_to_kv_pool_allocator.clear()
    source, target = edit.prompts(rng)
    channel = Channel(session, owner="bench")
    number = cache.sessions.number(channel.user)
    _put_source(cache, Turn(channel, number), source)
    turn = Turn(channel, number)
    request = SimpleNamespace(extra_key=None, cache_salt=None, leyline=turn, rid=session)
    ids = array("q", target.tobytes())
    key = RadixKey(ids, None, limit=len(ids) - 1)
    began = time.perf_counter()
    # A request is matched when it is queued, and again when it is its turn.
    cache.match_prefix(MatchPrefixParams(key=key, req=request))
    match = cache.match_prefix(MatchPrefixParams(key=key, req=request))
    row = cache.path_device_indices(match.last_device_node)[: turn.reuse.shared]
    spent = time.perf_counter() - began
    while turn.to_come:
        row, seconds = _next_run(cache, turn, request, row)
        spent += seconds
    wanted = edit.kept - edit.n * edit.page  # at most a page for each edit is computed again
    if turn.count(len(target)).moved < wanted:
        raise RuntimeError(f"{edit.what}: {wanted} rows were to be kept: {turn.report}")
    return spent


def _next_run(cache: Any, turn: Any, request: Any, row: Any) -> tuple[Any, float]:
    """The request's row with the next run of kept rows, and the seconds these took."""
    import torch

    at = len(row) if turn.run_at(len(row)) else turn.next_run(len(row))
    if at > len(row):  # SGLang computes what lies before
        page = cache.page_size
        computed = cache.token_to_kv_pool_allocator.alloc(-(-(at - len(row)) // page) * page)
        row = torch.cat([row, computed[: at - len(row)]])
    began = time.perf_counter()
    assert cache.has_source(request, turn, at)
    slots = cache._enter(turn, turn.run_at(at), row)
    seconds = time.perf_counter() - began
    assert slots is not None, turn.reuse.fallback
    return torch.cat([row, slots]), seconds


def _put_source(cache: Any, turn: Any, source: np.ndarray) -> None:
    """Cached and used by its session alone, as after a request that computed it."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens = source[: len(source) // cache.page_size * cache.page_size]
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    cache.insert(InsertParams(key=RadixKey(array("q", tokens.tobytes()), None), value=slots))
    cache.users.own(slots, turn.number)
    cache.sessions.remember(turn.lineage(source))
