"""Cost as it grows: splice and re-prefill on a real model, and rows alone in real shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from leyline.proof import rows, speed

if TYPE_CHECKING:
    import numpy as np

    from leyline.engine.engine import Engine

KEPT = (1024, 2048, 4096, 8192)
MEMORY_GIB = 2.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SpliceCost:
    """Medians of one size, in seconds. way: moved or copied. splice_s: the splice itself, on the
    host. ratio: of the times to first token, median of the pairs. edit: the fields of
    `paper_gpu.Edit`."""

    kept: int
    way: str
    computed: int
    splice_s: float
    splice_ttft_s: float
    prefill_ttft_s: float
    ratio: float
    edit: dict[str, int]


def run(path: Path, *, quick: bool, say: Say = lambda text: None) -> dict[str, Any]:
    """Everything as plain data. path: a dense GQA model, in fp32."""
    from leyline.bench.bed import Bed
    from leyline.engine.engine import Config, Engine

    kept = (192, 384) if quick else KEPT
    repeats = 1  # a pair of each: four sizes are each other's check
    bed = Bed(path, repeats)
    longest = max(kept) + 1000
    config = Config(memory_gib=MEMORY_GIB, max_tokens=longest + 100)
    with Engine.load(path, config=config) as engine:
        model = engine.model.config
        found = splices(engine, bed.tokens(longest), kept, repeats, say=say)
        shape = shape_of(engine)
    say("this machine's speed")
    fast = machine_speed(shape)
    counts = (256, 1024) if quick else rows.COUNTS
    costs = rows.run(rows.SHAPES, counts, 1 if quick else 5, say)
    return {
        "model": path.name,
        "positions": int(model.max_position_embeddings),
        "shape": shape,
        "speed": asdict(fast),
        "repeats": repeats,
        "splices": [asdict(cost) for cost in found],
        "rows": [asdict(cost) for cost in costs],
    }


def splices(
    engine: Engine,
    tokens: np.ndarray,
    kept: Sequence[int],
    repeats: int,
    start: int = 200,
    span: int = 500,
    say: Say = lambda text: None,
) -> list[SpliceCost]:
    """A span near the start is replaced, with `kept` rows behind it. Empties the engine's cache."""
    from leyline.bench import splice

    found = []
    for n in kept:
        sizes = splice.Sizes(conversation=start + span + n, start=start, span=span)
        timed_rows = splice.run(
            engine, tokens, sizes, repeats, partial(_tell, say, n), kinds=["replace"]
        )
        by_name = {row.name: row for row in timed_rows}
        for way in ("moved", "copied"):
            timed = by_name[f"splice.replace.{way}"]
            found.append(
                SpliceCost(
                    n,
                    way,
                    int(by_name[f"{timed.name}.computed"].value),
                    median(timed.details["splice_ms"]) / 1e3,
                    timed.details["splice_ttft_s"],
                    timed.details["prefill_ttft_s"],
                    timed.value,
                    asdict(sizes),
                )
            )
    return found


def _tell(say: Say, kept: int, text: str) -> None:
    say(f"{kept} rows kept: {text}")


def shape_of(engine: Engine) -> dict[str, int]:
    """What the model on paper needs to know of a dense GQA model."""
    config = engine.model.config
    keys = engine.store.planes.keys[0]
    return {
        "layers": int(config.num_hidden_layers),
        "hidden": int(config.hidden_size),
        "intermediate": int(config.intermediate_size),
        "heads": int(config.num_attention_heads),
        "groups": int(keys.shape[1]),
        "width": int(keys.shape[2]),
        "vocab": engine.vocab_size,
        "bytes": keys.element_size(),
        "chunk": engine.config.chunk,
    }


def machine_speed(shape: dict[str, int]) -> speed.Speed:
    """In the shapes that the model computes in; attention over 4096 rows, 256 queries at a time, as
    the engine does it."""
    return speed.Speed(
        speed.copy_bytes_s(),
        speed.linear_flops_s(shape["hidden"], shape["intermediate"], shape["chunk"]),
        speed.attention_flops_s(shape["heads"], shape["groups"], shape["width"], 4096, 256),
    )
