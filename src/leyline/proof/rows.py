"""Rows alone: rotation and copy of cached rows in the shapes of real models, without a model.

Rows lie as SGLang keeps them, latent and rotary key side by side. Where a model's rows would take
too much memory, some of its layers are measured and the time is scaled to all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from leyline.proof.speed import best

DELTA = -480
BUDGET = 3 << 30
"""Bytes of rows at a time."""
COUNTS = (4096, 16384, 65536, 131072)


@dataclass(frozen=True, slots=True)
class Shape:
    """MLA rows of a model, in bf16."""

    name: str
    layers: int
    interleaved: bool
    latent: int = 512
    rotary: int = 64

    @property
    def row_bytes(self) -> int:
        """Of one token in one layer."""
        return 2 * (self.latent + self.rotary)


SHAPES = (
    Shape("DeepSeek-V2-Lite, Moonlight-16B-A3B", 27, True),
    Shape("JoyAI-LLM Flash", 40, True),
    Shape("GLM-4.7-Flash", 47, True),
)
"""Layers as published in configs and model cards."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """Seconds for all layers of `rows` tokens. turn_s: rotate in place. move_s: to other slots,
    turned on the way. copy_s: `Tensor.copy_` to other slots. measured_layers: at once."""

    shape: str
    layers: int
    measured_layers: int
    rows: int
    turned_bytes: int
    row_bytes: int
    turn_s: float
    move_s: float
    copy_s: float


def run(
    shapes: Sequence[Shape] = SHAPES,
    counts: Sequence[int] = COUNTS,
    repeats: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> list[RowCost]:
    """Measure every shape at every count. Takes up to BUDGET of memory."""
    found = []
    for shape in shapes:
        for rows in counts:
            say(f"{shape.name}, {rows} rows")
            found.append(measure(shape, rows, repeats))
    return found


def measure(shape: Shape, rows: int, repeats: int) -> RowCost:
    import torch

    from leyline.rope import RopeSpec
    from leyline.rotate import Planes, move_rows, rotate_rows_

    at_once = max(1, min(shape.layers, BUDGET // (2 * rows * shape.row_bytes)))
    columns = shape.latent + shape.rotary
    stack = torch.ones(at_once, 2 * rows, 1, columns, dtype=torch.bfloat16)
    planes = Planes.of(stack)
    powers = torch.arange(0, shape.rotary, 2, dtype=torch.float64) / shape.rotary
    spec = RopeSpec(10000.0**-powers, shape.rotary, shape.interleaved)
    here, there = slice(0, rows), slice(rows, 2 * rows)
    ways: tuple[Callable[[], object], ...] = (
        lambda: rotate_rows_(planes, here, DELTA, spec, shape.latent),
        lambda: move_rows(planes, here, there, DELTA, spec, shape.latent),
        lambda: stack[:, there].copy_(stack[:, here]),
    )
    scale = shape.layers / at_once
    with torch.inference_mode():
        turn, move, copy = (scale * best(way, repeats) for way in ways)
    elements = rows * shape.layers
    return RowCost(
        shape.name,
        shape.layers,
        at_once,
        rows,
        2 * elements * 2 * shape.rotary,
        2 * elements * shape.row_bytes,
        turn,
        move,
        copy,
    )
