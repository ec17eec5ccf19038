"""Kept rows: bitwise but for their rotary columns (I2), those turned with one rounding (I3), and in
layer 0, where a row depends on nothing but its token and position, equal to a fresh prefill's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.layout import LayerLayout
from leyline.rope import RopeSpec
from leyline.rotate import rotate_reference
from leyline.verify.bound import pair_lengths, rotary_bound
from leyline.verify.cases import KINDS, Case, make
from leyline.verify.look import Rows, prefill, rows, session_key
from leyline.verify.subject import Subject

SOURCE, NEW = 400, 12


@dataclass(slots=True)
class Found:
    """Over all cases. changed: elements outside the rotary columns that differ, by layer. error:
    worst distance to the rotation in fp64 as a share of what rounding explains, by layer."""

    rows: int
    changed: list[int]
    error: list[float]
    truth: float = 0.0
    """Layer 0 against a fresh prefill, likewise."""

    turned: int = 0
    """Kept rows that had to be turned."""

    notes: list[str] = field(default_factory=list)


def run(subject: Subject, repeats: int, say: Callable[[str], None]) -> list[Row]:
    """Splice random edits of every kind and compare row by row."""
    layers = subject.engine.layout.layers
    found = Found(0, [0] * len(layers), [0.0] * len(layers))
    rng = np.random.default_rng()
    for repeat in range(repeats):
        for kind in KINDS:
            say(f"{kind}, {repeat + 1} of {repeats}")
            at = int(rng.integers(0, len(subject.text) - SOURCE - NEW))
            text = subject.text[at : at + SOURCE + NEW]
            _check(subject, make(rng, kind, text[:SOURCE], text[SOURCE:]), found)
    return _rows(found, len(layers))


def _check(subject: Subject, case: Case, found: Found) -> None:
    engine = subject.engine
    engine.reset()
    session = "verify"
    prefill(engine, case.source, Channel(session))
    before = rows(engine, session_key(engine, session))
    report = prefill(engine, case.target, Channel(session, directives=case.edits))
    after = rows(engine, session_key(engine, session))
    if report.computed != int((case.kept < 0).sum()):
        found.notes.append(f"{case.name}: {report.computed} tokens computed")
    engine.reset()
    prefill(engine, case.target)
    fresh = rows(engine, case.target)
    kept = case.kept >= 0
    found.rows += int(kept.sum())
    found.turned += int((case.shifts[kept] != 0).sum())
    for index, layer in enumerate(engine.layout.layers):
        changed, error = _compare(before[index], after[index], layer, engine.layout.rope, case)
        found.changed[index] += changed
        found.error[index] = float(np.maximum(found.error[index], error))  # NaN stays
    rope, first = engine.layout.rope, engine.layout.layers[0]
    found.truth = float(np.maximum(found.truth, _from_truth(after, fresh, first, rope, case)))


def _compare(
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    layer: LayerLayout,
    rope: RopeSpec | None,
    case: Case,
) -> tuple[int, float]:
    """Elements that should not have changed but did, and the worst error of those that should, as a
    share of the bound."""
    here = torch.from_numpy(np.flatnonzero(case.kept >= 0))
    there = torch.from_numpy(case.kept[case.kept >= 0])
    shifts = torch.from_numpy(case.shifts[case.kept >= 0])
    changed, worst = 0, 0.0
    for name, old, new in zip(("keys", "values"), before, after, strict=True):
        was, now = old[there], new[here]
        still = torch.ones(was.shape, dtype=torch.bool)
        if name == layer.rotary_tensor and rope is not None:
            columns = slice(layer.rotary_start, layer.rotary_start + layer.rotary_width)
            still[shifts != 0, :, columns] = False
            exact = rotate_reference(was, shifts, rope, layer.rotary_start)
            bound = rotary_bound(was, exact, rope, layer.rotary_start)
            error = (now.double() - exact).abs() / bound
            worst = float(error[~still].max()) if bool((~still).any()) else 0.0
        changed += int((was[still] != now[still]).sum())
    return changed, worst


def _from_truth(
    after: Rows, fresh: Rows, layer: LayerLayout, rope: RopeSpec | None, case: Case
) -> float:
    """Worst distance of layer 0's rotary columns from a fresh prefill's, as a share of what
    roundings explain: in the dtype's unit u and a pair's length m, the model's own row and the one
    that was turned are each up to (1 + 2 sqrt 2) u m off the exact one, and the splice rounds once
    more; both may form angles in fp32, off by 2^-24 of the angle. A product of another shape may
    order its sums otherwise: one more u for each row."""
    if rope is None or layer.rotary_tensor is None:
        return 0.0
    here = torch.from_numpy(np.flatnonzero((case.kept >= 0) & (case.shifts != 0)))
    which = 0 if layer.rotary_tensor == "keys" else 1
    columns = slice(layer.rotary_start, layer.rotary_start + layer.rotary_width)
    ours, truth = after[0][which][here][..., columns], fresh[0][which][here][..., columns]
    unit = torch.finfo(ours.dtype).eps / 2
    frequencies = rope.inv_freq
    pairs = frequencies.repeat_interleave(2) if rope.interleaved else torch.cat([frequencies] * 2)
    angles = 2.0**-24 * 2 * (here[:, None, None] + SOURCE) * pairs
    bound = pair_lengths(truth.double(), rope) * (11 * unit + angles) + torch.finfo(ours.dtype).tiny
    return float(((ours.double() - truth.double()).abs() / bound).max())


def _rows(found: Found, layers: int) -> list[Row]:
    about = f"{found.rows} kept rows, {found.turned} of them turned, {layers} layers"
    details = {"error_by_layer": found.error, "changed_by_layer": found.changed}
    return [
        Row(
            "rows.bitwise",
            f"elements outside the rotary columns that changed (I2): {about}",
            sum(found.changed),
            unit="count",
            at_most=0,
            details={**details, "notes": found.notes},
        ),
        Row(
            "rows.rotation",
            "worst error of a turned element / what one rounding explains (I3)",
            float(np.max(found.error)),
            at_most=1.0,
            details=details,
        ),
        Row(
            "rows.truth",
            "layer 0 against a fresh prefill: worst error / what roundings explain",
            found.truth,
            at_most=1.0,
        ),
        Row(
            "rows.computed",
            "splices that computed other tokens than replacement and new ones",
            len(found.notes),
            unit="count",
            at_most=0,
        ),
    ]
