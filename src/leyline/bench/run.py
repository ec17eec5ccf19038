"""All measurements, one after the other, on SmolLM2 or another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from leyline.bench import ahead, decode, hitrate, overhead, prefill, splice
from leyline.bench.bed import Bed, machine
from leyline.bench.results import Results
from leyline.bench.row import Row
from leyline.traces import load_traces

ROTATE_GOAL = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """quick: fewer repetitions and smaller sizes, to see that all works; goals are for full runs.
    full: hit rates on the model itself, not on a tiny one (many minutes)."""

    model: Path
    only: tuple[str, ...] = ()
    quick: bool = False
    full: bool = False


def run(options: Options, say: Callable[[str, str], None] = lambda name, text: None) -> Results:
    """Run the chosen measurements, all by default. say: told the measurement and what it is at."""
    chosen = options.only or tuple(MEASUREMENTS)
    results = Results(options.model.name, options.quick, machine())
    bed = Bed(options.model, repeats=1 if options.quick else 3)
    try:
        for name, measure in MEASUREMENTS.items():
            if name in chosen:
                say(name, "")
                results.rows += measure(bed, options, partial(say, name))
    finally:
        bed.close()
    return results


def _sizes(options: Options) -> splice.Sizes:
    return splice.Sizes(conversation=1500 if options.quick else 6000)


def _splice(bed: Bed, options: Options, say: Say) -> list[Row]:
    sizes = _sizes(options)
    tokens = bed.tokens(sizes.conversation)
    rows = splice.run(bed.engine, tokens, sizes, bed.repeats, say)
    say("slots")
    return [*rows, splice.slots(bed.engine, tokens, sizes)]


def _ahead(bed: Bed, options: Options, say: Say) -> list[Row]:
    sizes = _sizes(options)
    return ahead.run(bed.engine, bed.tokens(sizes.conversation), sizes, bed.repeats, say)


def _prefill(bed: Bed, options: Options, say: Say) -> list[Row]:
    lengths = (500, 1500) if options.quick else (2000, 6000)
    tokens = bed.tokens(lengths[-1])
    return prefill.run(bed.engine, bed.bare, tokens, lengths, bed.repeats, say)


def _decode(bed: Bed, options: Options, say: Say) -> list[Row]:
    lengths, new = ((256,), 16) if options.quick else ((512, 2048), 64)
    tokens = bed.tokens(8 * lengths[-1])
    return decode.run(bed.engine, bed.bare, tokens, lengths, new, bed.repeats + 2, say=say)


def _overhead(bed: Bed, options: Options, say: Say) -> list[Row]:
    off = overhead.switched_off(bed.engine)
    try:
        repeats = 3 if options.quick else 15
        return overhead.run(bed.engine, off, bed.tokens(512), 16, repeats, say)
    finally:
        off.close()


def _hitrate(bed: Bed, options: Options, say: Say) -> list[Row]:
    sessions = load_traces()
    if options.quick:
        sessions = sorted(sessions, key=lambda session: len(session.messages))[:3]
    if options.full:
        with hitrate.real_engine(bed.path) as engine:
            return hitrate.run(engine, sessions, say=say)
    with hitrate.tiny_engine(bed.tokenizer) as engine:
        return hitrate.run(engine, sessions, say=say)


def _diff(bed: Bed, options: Options, say: Say) -> list[Row]:
    """Two rows a size: the slowest of the realistic edits, and of the hostile inputs."""
    from leyline.bench import diff

    rows = []
    found = diff.run(repeats=1 if options.quick else 5)
    for size, goal in diff.SIZES.items():
        for kind, bound in (
            ("realistic edits", goal),
            ("hostile inputs", goal * diff.HOSTILE_FACTOR),
        ):
            group = [
                row for row in found if row.goal_s == bound and abs(row.source_tokens - size) < 500
            ]
            slowest = max(group, key=lambda row: row.seconds)
            rows.append(
                Row(
                    f"diff.{size // 1000}k.{kind.split()[0]}",
                    f"deriving edits, {size:,} tokens, {kind}: slowest of {len(group)}, "
                    f"{slowest.name!r}",
                    slowest.seconds,
                    unit="s",
                    at_most=bound,
                    details={row.name: row.seconds for row in group},
                )
            )
    return rows


def _rotate(bed: Bed, options: Options, say: Say) -> list[Row]:
    """The slowest shape of each way to turn rows. Scattered slots have no `copy_` to match."""
    from leyline.bench import rotate

    rows = []
    found = rotate.run(repeats=3 if options.quick else 12)
    for how in dict.fromkeys(row.how for row in found):
        group = [row for row in found if row.how == how]
        slowest = min(group, key=lambda row: row.ratio)
        rows.append(
            Row(
                f"rotate.{how.replace(',', '').replace(' ', '_')}",
                f"rotation, {how}: bytes a second / Tensor.copy_, "
                f"slowest of {len(group)} ({_named(slowest.shape)})",
                slowest.ratio,
                at_least=None if "scattered" in how else ROTATE_GOAL,
                details={
                    _named(row.shape): {"rotate_gbs": row.rotate_gbs, "copy_gbs": row.copy_gbs}
                    for row in group
                },
            )
        )
    return rows


def _named(shape: Any) -> str:
    return f"{shape.name}, {str(shape.dtype).removeprefix('torch.')}"


MEASUREMENTS: dict[str, Callable[[Bed, Options, Say], list[Row]]] = {
    "splice": _splice,
    "ahead": _ahead,
    "hitrate": _hitrate,
    "prefill": _prefill,
    "decode": _decode,
    "overhead": _overhead,
    "rotate": _rotate,
    "diff": _diff,
}
