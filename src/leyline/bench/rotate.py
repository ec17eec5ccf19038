"""How fast rows are turned, against `torch.Tensor.copy_` on the same rows.

Bytes are what either must move at least: every element is read once and written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from leyline.rope import RopeSpec
from leyline.rotate import move_rows, rotate_rows_

_DELTA = -480


@dataclass(frozen=True)
class Shape:
    """The rotary planes of a model: fp32 unless said otherwise, `rows` of them turned."""

    name: str
    layers: int
    heads: int
    columns: int
    rows: int
    interleaved: bool
    dtype: torch.dtype = torch.float32


SHAPES = (
    Shape("SmolLM2-135M", 30, 3, 64, 4096, False),
    Shape("SmolLM2-135M", 30, 3, 64, 4096, False, torch.bfloat16),
    Shape("DeepSeek-V2-Lite", 27, 1, 64, 16384, True),
    Shape("DeepSeek-V2-Lite", 27, 1, 64, 16384, True, torch.bfloat16),
    Shape("Moonlight-16B-A3B", 27, 1, 64, 16384, False),
    Shape("Moonlight-16B-A3B", 27, 1, 64, 16384, False, torch.bfloat16),
)


@dataclass(frozen=True)
class RotateRow:
    """One measurement: GB/s of the rotation and of copy_, best of `repeats`, taken in turns."""

    shape: Shape
    how: str  # "in place", "move" or "in place, scattered slots"
    threads: int
    rotate_gbs: float
    copy_gbs: float

    @property
    def ratio(self) -> float:
        return self.rotate_gbs / self.copy_gbs


def run(repeats: int = 12, shapes: tuple[Shape, ...] = SHAPES) -> list[RotateRow]:
    """Measure every shape in place, from slots to others, and at scattered slots.

    copy_ brings the same rows to other slots, as a move without a turn would. Needs about 0.3 GB.
    """
    return [row for shape in shapes for row in _measure(shape, repeats)]


def _measure(shape: Shape, repeats: int) -> list[RotateRow]:
    generator = torch.Generator().manual_seed(0)
    rows = shape.rows
    planes = torch.randn(
        (shape.layers, 2 * rows, shape.heads, shape.columns), generator=generator
    ).to(shape.dtype)
    powers = torch.arange(0, shape.columns, 2, dtype=torch.float64) / shape.columns
    spec = RopeSpec(10000.0**-powers, shape.columns, shape.interleaved)
    here, there = slice(0, rows), slice(rows, 2 * rows)
    scattered = torch.randperm(rows, generator=generator)
    ways: dict[str, Callable[[], object]] = {
        "copy_": lambda: planes[:, there].copy_(planes[:, here]),
        "in place": lambda: rotate_rows_(planes, here, _DELTA, spec),
        "move": lambda: move_rows(planes, here, there, _DELTA, spec),
        "in place, scattered slots": lambda: rotate_rows_(planes, scattered, _DELTA, spec),
    }
    best = _race(ways, repeats)
    moved = 2 * planes[:, here].numel() * planes.element_size() / 1e9
    return [
        RotateRow(shape, how, torch.get_num_threads(), moved / seconds, moved / best["copy_"])
        for how, seconds in best.items()
        if how != "copy_"
    ]


def _race(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Best seconds of each, run in turns so that a busy machine slows all alike."""
    best = dict.fromkeys(ways, float("inf"))
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, work in ways.items():
                began = time.perf_counter()
                work()
                if repeat:  # the first is a warm-up
                    best[name] = min(best[name], time.perf_counter() - began)
    return best
