"""The delta-rotation of cached rows: R(delta) on rotary columns, nothing else touched.

Rows live in *planes*: one tensor `[layers, slots, heads, columns]` for all layers of one tensor
kind. Angles are fp64, the product fp32, and the result is rounded once to the cache's dtype. On
CUDA one Triton launch does all layers and rows (`rotate_triton.py`), on a CPU one compiled loop
(`rotate_cpu.py`); what neither takes goes through torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leyline.rope import RopeSpec

Slots = Tensor | slice
Deltas = Tensor | int

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = (torch.float32, torch.bfloat16)


def rotate_rows_(
    planes: Tensor, slots: Slots, deltas: Deltas, spec: RopeSpec, start: int = 0
) -> None:
    """Turn rows in place, in all layers: columns `[start, start + spec.width)` by R(delta).

    planes: `[layers, slots, heads, columns]`, fp32, bf16 or fp16, columns contiguous.
    slots: int64 `[n]`, each at most once, or a slice with step 1. deltas: tokens, one for all rows
    or int64 `[n]`. Rows with delta 0 stay bitwise what they were. Raises ValueError for shapes or
    slots that don't fit.
    """
    _check_planes(planes, spec, start)
    _turn(planes, _job(planes, slots, slots, deltas).changing(), spec, start)


def move_rows(
    planes: Tensor,
    src: Slots,
    dst: Slots,
    deltas: Deltas = 0,
    spec: RopeSpec | None = None,
    start: int = 0,
) -> None:
    """Copy whole rows from `src` to `dst` slots, in all layers, turning the rotary columns on the
    way.

    As `rotate_rows_`; `dst` must name each slot once. `src` and `dst` may overlap: all that is read
    is read before it is overwritten. Unrotated columns, rows with delta 0, and everything with
    `spec=None` are bitwise copies.
    """
    if spec is None and not (isinstance(deltas, int) and deltas == 0):
        raise ValueError("rows can't be turned without a RopeSpec: leave deltas at 0 to copy")
    _check_planes(planes, spec, start)
    _turn(planes, _job(planes, src, dst, deltas), spec, start)


def rotate_reference(rows: Tensor, delta: int | Tensor, spec: RopeSpec, start: int = 0) -> Tensor:
    """R(delta) on rows `[..., heads, columns]` in fp64, one 2 x 2 rotation after the other;
    unrounded.

    delta: one for all rows, or of the rows' leading shape. Slow and plain: what the fast paths are
    tested against.
    """
    turned = rows.detach().to(device="cpu", dtype=torch.float64).clone()
    steps = torch.as_tensor(delta, dtype=torch.float64)
    if steps.dim():
        steps = steps[..., None]  # over heads
    for pair in range(spec.width // 2):
        angle = steps * spec.inv_freq[pair]
        if spec.interleaved:
            one, two = start + 2 * pair, start + 2 * pair + 1
        else:
            one, two = start + pair, start + pair + spec.width // 2
        x, y = turned[..., one].clone(), turned[..., two].clone()
        turned[..., one] = x * torch.cos(angle) - y * torch.sin(angle)
        turned[..., two] = y * torch.cos(angle) + x * torch.sin(angle)
    return turned


@dataclass(frozen=True)
class _Job:
    """Rows to move: int64 `[n]` each, on the planes' device (deltas on the CPU)."""

    src: Tensor
    dst: Tensor
    deltas: Tensor

    def changing(self) -> _Job:
        """In place: without rows that stay as they are."""
        changes = self.deltas != 0
        slots = self.src[changes.to(self.src.device)]
        return _Job(slots, slots, self.deltas[changes])

    def overlaps(self) -> bool:
        return self.src is not self.dst and bool(torch.isin(self.src, self.dst).any())


def _job(planes: Tensor, src: Slots, dst: Slots, deltas: Deltas) -> _Job:
    count = planes.shape[1]
    source = _slots(src, count, planes.device)
    target = source if dst is src else _slots(dst, count, planes.device)
    if len(source) != len(target):
        raise ValueError(f"{len(source)} source slots but {len(target)} target slots")
    if isinstance(deltas, Tensor):
        if deltas.shape != source.shape or deltas.dtype != torch.int64:
            raise ValueError(
                f"deltas must be int64 of shape ({len(source)},), one a row, "
                f"got {deltas.dtype} of shape {tuple(deltas.shape)}"
            )
        return _Job(source, target, deltas.cpu())
    return _Job(source, target, torch.full((len(source),), deltas, dtype=torch.int64))


def _slots(slots: Slots, count: int, device: torch.device) -> Tensor:
    if isinstance(slots, slice):
        low = 0 if slots.start is None else slots.start
        high = count if slots.stop is None else slots.stop
        if slots.step not in (None, 1) or not 0 <= low <= high <= count:
            raise ValueError(f"{slots} isn't a plain range within {count} slots")
        return torch.arange(low, high, device=device)
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(
            f"slots must be int64 of one dimension, got {slots.dtype} of shape {tuple(slots.shape)}"
        )
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= count):
        raise ValueError(f"slots reach from {int(slots.min())} to {int(slots.max())} of {count}")
    return slots.to(device)


def _check_planes(planes: Tensor, spec: RopeSpec | None, start: int) -> None:
    if planes.dim() != 4:
        raise ValueError(
            f"planes must be [layers, slots, heads, columns], got shape {tuple(planes.shape)}"
        )
    if spec is None:
        return
    if planes.dtype not in DTYPES:
        raise ValueError(f"rows of {planes.dtype} can't be turned; {DTYPES} can")
    if planes.stride(-1) != 1:
        raise ValueError("the columns of a row must be contiguous")
    if start < 0 or start + spec.width > planes.shape[-1]:
        raise ValueError(
            f"rotary columns [{start}, {start + spec.width}) don't fit rows of "
            f"{planes.shape[-1]} columns"
        )


def _turn(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """The way that fits device, dtype and slots."""
    if planes.is_cuda:
        from leyline.rotate_triton import turn_rows as on_cuda

        on_cuda(planes, job.src, job.dst, job.deltas, spec, start)
        return
    with torch.inference_mode():
        if planes.dtype in _COMPILED and planes.is_contiguous() and not job.overlaps():
            from leyline.rotate_cpu import turn_rows as on_cpu

            on_cpu(planes, job.src, job.dst, job.deltas, spec, start)
        else:
            _gather_scatter(planes, job, spec, start)


def _gather_scatter(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """All rows of a layer are read before the first is written, so slots may overlap."""
    for plane in planes:
        rows = plane[job.src]
        if spec is not None:
            rotary = rows[..., start : start + spec.width]
            changes = (job.deltas != 0)[:, None, None]
            turned = _turned(rotary.float(), job.deltas, spec).to(rows.dtype)
            rotary.copy_(torch.where(changes, turned, rotary))
        plane[job.dst] = rows


def _turned(rows: Tensor, deltas: Tensor, spec: RopeSpec) -> Tensor:
    """R(deltas[i]) on fp32 rows `[n, heads, width]`."""
    cos, sin = (table.float()[:, None] for table in spec.cos_sin(deltas))
    half = spec.width // 2
    pairs = (
        (slice(0, None, 2), slice(1, None, 2))
        if spec.interleaved
        else (slice(half), slice(half, None))
    )
    x, y = (rows[..., columns] for columns in pairs)
    out = torch.empty_like(rows)
    for columns, turned in zip(pairs, (x * cos - y * sin, y * cos + x * sin), strict=True):
        out[..., columns] = turned
    return out
