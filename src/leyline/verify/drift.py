"""Drift: how far rotary columns are from the exact ones after many splices in a row.

Every splice rounds once. Real rows of the model are turned by random shifts, up to a thousand
times, three ways: as Leyline does it, in fp32 with one rounding to bf16; with everything in bf16,
cosines included; and in a cache of fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from leyline.bench.row import Row
from leyline.rope import RopeSpec
from leyline.rotate import rotate_reference, rotate_rows_
from leyline.verify.look import prefill, rows
from leyline.verify.subject import Subject

PAPER = 4.7e-3
"""Relative L2 error in bf16, after the paper."""
SPLICES = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
LONGEST_SHIFT = 1000
ROWS = 64
MOST_LAYERS = 8
Way = str


def run(subject: Subject, splices: Sequence[int], say: Callable[[str], None]) -> list[Row]:
    """splices: after how many to look, ascending."""
    rope = subject.engine.layout.rope
    if rope is None:
        return []
    keys = _keys(subject)
    curves = {}
    for way, dtype, turn in (
        ("fp32, stored in bf16", torch.bfloat16, _by_leyline),
        ("all in bf16", torch.bfloat16, _all_narrow),
        ("fp32, stored in fp32", torch.float32, _by_leyline),
    ):
        say(way)
        curves[way] = _curve(keys.to(dtype), rope, splices, turn)
    details = {"splices": list(splices), "curves": curves, "paper": PAPER}
    ours, narrow = curves["fp32, stored in bf16"], curves["all in bf16"]
    last = splices[-1]
    return [
        Row(
            "drift.once",
            "relative L2 error of rotary columns in bf16 after one splice (paper's bound: 4.7e-3)",
            ours[0],
            unit="plain",
            at_most=PAPER,
            details=details,
        ),
        Row("drift.last", f"the same after {last} splices in a row", ours[-1], unit="plain"),
        Row(
            "drift.growth",
            "exponent of its growth with the number of splices (1: linear)",
            growth(splices, ours),
            at_most=0.75,
        ),
        Row(
            "drift.narrow",
            f"the same error with the rotation itself in bf16 / in fp32, after {last}",
            narrow[-1] / ours[-1],
            at_least=1.0,
        ),
        Row(
            "drift.fp32",
            f"relative L2 error in a cache of fp32 after {last} splices",
            curves["fp32, stored in fp32"][-1],
            unit="plain",
            at_most=1e-4,
        ),
    ]


def growth(splices: Sequence[int], errors: Sequence[float]) -> float:
    """Exponent a of errors ~ splices ** a, by least squares on the logarithms."""
    return float(np.polyfit(np.log(splices), np.log(errors), 1)[0])


def _keys(subject: Subject) -> Tensor:
    """Rotary columns of real rows, fp32 `[layers, rows, heads, width]`."""
    engine = subject.engine
    engine.reset()
    tokens = subject.text[:ROWS]
    prefill(engine, tokens)
    found = []
    for layer, both in zip(engine.layout.layers, rows(engine, tokens), strict=True):
        if layer.rotary_tensor is not None:
            tensor = both[0 if layer.rotary_tensor == "keys" else 1]
            columns = slice(layer.rotary_start, layer.rotary_start + layer.rotary_width)
            found.append(tensor[..., columns].float())
    step = -(-len(found) // MOST_LAYERS)
    return torch.stack(found[::step])


def _curve(
    start: Tensor,
    rope: RopeSpec,
    splices: Sequence[int],
    turn: Callable[[Tensor, int, RopeSpec], None],
) -> list[float]:
    """Relative L2 error after each number of splices: against what one exact rotation by the sum of
    all shifts makes of the rows at the start."""
    rng = np.random.default_rng()
    planes, total, errors = start.clone(), 0, []
    for n in range(1, splices[-1] + 1):
        shift = int(rng.integers(1, LONGEST_SHIFT + 1)) * (1 if rng.random() < 0.5 else -1)
        turn(planes, shift, rope)
        total += shift
        if n in splices:
            exact = rotate_reference(start, total, rope)
            errors.append(float((planes.double() - exact).norm() / exact.norm()))
    return errors


def _by_leyline(planes: Tensor, shift: int, rope: RopeSpec) -> None:
    rotate_rows_(planes, slice(0, planes.shape[1]), shift, rope)


def _all_narrow(planes: Tensor, shift: int, rope: RopeSpec) -> None:
    """Cosines, products and sums rounded to the planes' dtype."""
    cos, sin = (table.to(planes.dtype) for table in rope.cos_sin(shift))
    half = rope.width // 2
    if rope.interleaved:
        first, second = slice(0, None, 2), slice(1, None, 2)
    else:
        first, second = slice(0, half), slice(half, None)
    x, y = planes[..., first].clone(), planes[..., second].clone()
    planes[..., first], planes[..., second] = x * cos - y * sin, y * cos + x * sin
