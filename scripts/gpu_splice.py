"""A splice against a re-prefill on one GPU: DeepSeek-V2-Lite's real shape, random weights.

    PYTHONPATH=src python scripts/gpu_splice.py --json splice.json

Needs torch, Transformers, Triton and a GPU with 48 GiB; nothing is downloaded. The embedded engine
runs both sides, so that the ratio is that of two requests to one engine: 500 tokens near the start
of a long conversation are replaced by 20, 50 new ones come behind. Routed experts of random weights
are chosen about evenly, as the real ones are meant to be; the answers mean nothing.

All is done within --budget seconds; what was left out for want of time is told.
--tiny --device cpu runs the whole script on a small model within seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from leyline.bench.timing import first_token, prefill
from leyline.channel import Channel, Report
from leyline.engine.engine import Config, Engine
from leyline.layout import layout_of
from leyline.proof.paper_gpu import (
    H100,
    H200,
    Assumed,
    Edit,
    Where,
    deepseek_v2_lite,
    prefill_seconds,
    splice_seconds,
)
from leyline.tiny import tiny_config

LITE: dict[str, Any] = dict(
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    num_hidden_layers=27,
    num_attention_heads=16,
    qk_nope_head_dim=128,
    v_head_dim=128,
    n_routed_experts=64,
    n_shared_experts=2,
    num_experts_per_tok=6,
    initializer_range=0.02,
)
"""What `leyline.tiny` cuts down of the published config."""
SIZES = (8192, 16384, 32768)
TINY_SIZES = (256, 512)
WARM_UP, TINY_WARM_UP = 4096, 256
"""Tokens of the conversation that comes first, unmeasured; fewer where all sizes are smaller."""
WAYS = ("moved", "copied")
ROOM = 1000
"""Tokens that the engine takes on top of the largest size: stub, new ones, an answer."""
SEQUENCES = 4
"""Of the largest size that the cache holds: a source, its copy, a re-prefill, and one more."""
MARGIN_S = 10.0
"""Kept free at the end of the budget."""


class Clock:
    """What is left of the budget."""

    def __init__(self, budget_s: float) -> None:
        self._began = time.monotonic()
        self._budget_s = budget_s

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._budget_s - MARGIN_S - self.spent


@dataclass
class Timing:
    """One size, one way. splice_s, prefill_s: to the first token, a pair a repetition. computed: by
    each splice. host_ms: of each splice, without what the device does."""

    conversation: int
    way: str
    kept: int
    splice_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def add(self, splice: tuple[float, Report], whole: float) -> None:
        seconds, report = splice
        if report.copied != (self.way == "copied") or report.moved < self.kept - 50:
            raise RuntimeError(f"rows were meant to be {self.way}, but were not: {report}")
        self.splice_s.append(seconds)
        self.prefill_s.append(whole)
        self.computed.append(report.computed)
        self.host_ms.append(report.splice_ms)

    @property
    def ratio(self) -> float:
        return median(a / b for a, b in zip(self.splice_s, self.prefill_s, strict=True))

    def as_json(self) -> dict[str, Any]:
        medians = {
            "splice_median_s": median(self.splice_s),
            "prefill_median_s": median(self.prefill_s),
            "ratio": self.ratio,
        }
        return asdict(self) | medians


def edited(source: np.ndarray, edit: Edit, i: int, vocab_size: int) -> np.ndarray:
    """The source with its span, `i` tokens further on, replaced, and new tokens."""
    start, end = edit.start + i, edit.start + i + edit.span
    rng = np.random.default_rng(i)
    stub, new = (rng.integers(3, vocab_size, n) for n in (edit.stub, edit.new))
    return np.concatenate([source[:start], stub, source[end:], new])


def build(tiny: bool, device: str) -> Any:
    """A random model, made where it is to run."""
    from transformers import AutoModelForCausalLM

    config = tiny_config("deepseek_v2", **({} if tiny else LITE))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def time_way(
    engine: Engine, source: np.ndarray, edit: Edit, way: str, repeats: int, clock: Clock
) -> tuple[Timing, int]:
    """Pairs of splice and re-prefill, in turns, and how many there was no time for. Moved rows are
    brought back by another splice; copied ones belong to the source, which stays."""
    timing = Timing(edit.conversation, way, edit.kept)
    first = WAYS.index(way) * 2 * repeats
    engine.reset()
    whole = 0.0
    if way == "copied":
        prefill(engine, source)
    for i in range(repeats):
        if timing.prefill_s and clock.left < 1.5 * whole:
            return timing, repeats - i
        session = Channel("moved" if way == "moved" else f"copied-{i}")
        prefill(engine, source, session)
        cases = [edited(source, edit, first + 2 * i + side, engine.vocab_size) for side in range(2)]
        spliced = first_token(engine, cases[0], session)
        whole, report = first_token(engine, cases[1])
        if report.moved or report.shared > edit.start + 2 * repeats * len(WAYS):
            raise RuntimeError(f"a re-prefill found rows in the cache: {report}")
        timing.add(spliced, whole)
        if way == "copied":
            engine.drop_session("", session.session)
    return timing, 0


def time_rows(engine: Engine, rows: int, repeats: int = 7) -> dict[str, float]:
    """Least seconds of turning `rows` in place, and of copying them turned, device included."""
    planes = engine.store.planes
    slots = np.arange(rows, dtype=np.int64)
    others = slots + rows
    shifts = np.full(rows, -480, dtype=np.int64)

    def timed(work: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(repeats + 1):
            _wait()
            began = time.perf_counter()
            work()
            _wait()
            best = min(best, time.perf_counter() - began)
        return best

    engine.reset()
    turn = engine.call(lambda: timed(lambda: planes.rotate(slots, shifts)))
    copy = engine.call(lambda: timed(lambda: planes.copy(slots, others, shifts)))
    return {"rows": rows, "turn_s": turn, "copy_s": copy}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def on_paper(edit: Edit, gpu: str, chunk: int) -> dict[str, float] | None:
    """What `leyline.proof.paper_gpu` says; None for a GPU that it does not know."""
    known = [each for each in (H100, H200) if each.name.split()[0] in gpu]
    if not known:
        return None
    model, where, assumed = deepseek_v2_lite(), Where(known[0]), Assumed(chunk=chunk, passes=1)
    splice = splice_seconds(model, where, assumed, edit)
    return {
        "prefill_s": prefill_seconds(model, where, assumed, edit.prompt, edit.start),
        "splice_s": splice.total,
        "rows_s": splice.rows,
    }


def measure(engine: Engine, options: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Size by size, smallest first, as long as there is time."""
    rng = np.random.default_rng(7)
    found: dict[str, Any] = {"timings": [], "rows": [], "skipped": []}
    last, cost = _warm_up(engine, options)  # of the last size: tokens, seconds of a re-prefill
    for size in options.sizes:
        edit = _edit(options, size)
        expected = cost * (size / last) ** 2
        source = rng.integers(3, engine.vocab_size, size)
        for way in WAYS:
            if clock.left < 3 * expected:
                _skip(found, f"{size} tokens, rows {way}: {clock.left:.0f} s are too few")
                continue
            timing, left_out = time_way(engine, source, edit, way, options.repeats, clock)
            found["timings"].append(
                timing.as_json() | {"on_paper": on_paper(edit, options.gpu, options.chunk)}
            )
            _tell(timing)
            if left_out:
                _skip(found, f"{size} tokens, rows {way}: {left_out} of {options.repeats} runs")
            cost, last = median(timing.prefill_s), size
            expected = cost
        found["rows"].append(time_rows(engine, edit.kept))
    return found


def _warm_up(engine: Engine, options: argparse.Namespace) -> tuple[int, float]:
    """Kernels are compiled and chosen at first use. Returns tokens and seconds of a re-prefill."""
    usual = TINY_WARM_UP if options.tiny else WARM_UP
    edit = _edit(options, min(usual, max(options.sizes)))
    source = np.random.default_rng(1).integers(3, engine.vocab_size, edit.conversation)
    for way in WAYS:
        timing, _ = time_way(engine, source, edit, way, 1, Clock(1e9))
    return edit.conversation, timing.prefill_s[0]


def _edit(options: argparse.Namespace, size: int) -> Edit:
    return Edit(size, 20, 40, 7, 11) if options.tiny else Edit(size)


def _skip(found: dict[str, Any], what: str) -> None:
    print(f"skipped: {what}", flush=True)
    found["skipped"].append(what)


def _tell(timing: Timing) -> None:
    print(
        f"{timing.conversation:>7} tokens, rows {timing.way:<6}: splice "
        f"{median(timing.splice_s) * 1e3:9.1f} ms, re-prefill "
        f"{median(timing.prefill_s) * 1e3:9.1f} ms, ratio {timing.ratio:.4f}, "
        f"{max(timing.computed)} tokens computed, host {median(timing.host_ms):.2f} ms",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model and small sizes")
    parser.add_argument("--sizes", type=int, nargs="+", help="tokens of the conversation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens in a pass")
    parser.add_argument("--budget", type=float, default=340.0, help="seconds, all told")
    given = parser.parse_args()
    given.sizes = sorted(given.sizes or (TINY_SIZES if given.tiny else SIZES))
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("no GPU is to be had; --tiny --device cpu shows that the script works")
    if given.repeats < 1 or given.sizes[0] < _edit(given, 0).span + _edit(given, 0).start + 64:
        parser.error("--repeats must be 1 or more, and --sizes longer than the edit")
    given.gpu = torch.cuda.get_device_name() if given.device.startswith("cuda") else "none"
    return given


def main() -> int:
    options = _options()
    clock = Clock(options.budget)
    print(f"{options.gpu}; torch {torch.__version__}", flush=True)
    model = build(options.tiny, options.device)
    print(
        f"model of {sum(p.numel() for p in model.parameters()) / 1e9:.1f} G parameters made in "
        f"{clock.spent:.0f} s",
        flush=True,
    )
    longest = max(options.sizes) + ROOM
    memory = 2 * layout_of(model).row_elements * SEQUENCES * longest / 1024**3
    config = Config(memory_gib=memory, chunk=options.chunk, max_tokens=longest)
    with Engine(model, None, config, "random") as engine:
        found = measure(engine, options, clock)
    report = {
        "gpu": options.gpu,
        "torch": torch.__version__,
        "model": "tiny" if options.tiny else "DeepSeek-V2-Lite's shape, random weights, bf16",
        "chunk": options.chunk,
        "seconds": clock.spent,
        **found,
    }
    print(f"{clock.spent:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if found["timings"] else 1


if __name__ == "__main__":
    sys.exit(main())
