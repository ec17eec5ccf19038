"""The delta-rotation of cached rows: R(delta) on rotary columns, nothing else touched.

Rows live in *planes*: one tensor `[layers, slots, heads, columns]` for all layers of one tensor
kind. Angles are fp64, the product fp32, and the result is rounded once to the cache's dtype. On a
CPU, blocks of a cache's size are turned in place by a few vectorized operations; on CUDA one Triton
launch does all layers and rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leyline.rope import RopeSpec

Slots = Tensor | slice
Deltas = Tensor | int

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements a block and thread: a block and its scratch stay in cache between the few operations on
# it.
_BLOCK = 1 << 17
# Shorter runs of neighbouring slots than this are gathered instead: a slice costs a few calls.
_LONG_RUN = 16


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
    job = _job(planes, slots, slots, deltas)
    if planes.is_cuda:
        from leyline.rotate_triton import turn_rows

        turn_rows(planes, job.src, job.dst, job.deltas, spec, start)
        return
    with torch.inference_mode():
        _run(planes, job.changing(), spec, start)


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
    job = _job(planes, src, dst, deltas)
    if planes.is_cuda:
        from leyline.rotate_triton import turn_rows

        turn_rows(planes, job.src, job.dst, job.deltas, spec, start)
        return
    with torch.inference_mode():
        if job.overlaps():
            _gather_scatter(planes, job, spec, start)
        else:
            _run(planes, job, spec, start)


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

    @property
    def moves(self) -> bool:
        return self.src is not self.dst

    def take(self, rows: Tensor) -> _Job:
        src = self.src[rows]
        return _Job(src, self.dst[rows] if self.moves else src, self.deltas[rows])

    def changing(self) -> _Job:
        """Without rows that stay as they are."""
        changes = self.deltas != 0
        return self if bool(changes.all()) else self.take(changes)

    def overlaps(self) -> bool:
        return self.moves and bool(torch.isin(self.src, self.dst).any())

    def cuts(self) -> Tensor:
        """Where maximal runs of neighbouring slots with one delta begin, but for the first."""
        same = self.deltas.diff() == 0
        for slots in (self.src, self.dst) if self.moves else (self.src,):
            same &= slots.diff() == 1
        return (~same).nonzero().flatten() + 1

    def runs(self, cuts: Tensor) -> list[tuple[int, int, int, int]]:
        """(src, dst, n, delta) of each run."""
        edge = torch.zeros(1, dtype=torch.int64)
        first = torch.cat((edge, cuts))
        counts = torch.cat((cuts, edge + len(self.src))) - first
        columns = (self.src[first], self.dst[first], counts, self.deltas[first])
        return [tuple(run) for run in torch.stack(columns, dim=1).tolist()]


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


class _Turn:
    """R(delta) in place, with its tables and scratch.

    deltas: one for all rows, or int64 `[rows]`: then a block has exactly these rows.
    `turn(*turn.views(rows))` turns `rows` `[layers, rows, heads, width]`; the views may be cut into
    blocks first, and are made by torch then, not one by one by Python.
    """

    def __init__(self, spec: RopeSpec, deltas: int | Tensor) -> None:
        if isinstance(deltas, Tensor):
            distinct, which = torch.unique(deltas, return_inverse=True)
            cos, sin = (table.float()[which, None] for table in spec.cos_sin(distinct))
        else:
            cos, sin = (table.float() for table in spec.cos_sin(deltas))
        self.half = spec.width // 2
        self.interleaved = spec.interleaved
        self.cis = torch.complex(cos, sin)
        self.cos, self.sin, self.minus_sin = torch.cat((cos, cos), dim=-1), sin, -sin
        self.scratch: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def views(self, rows: Tensor) -> tuple[Tensor, ...]:
        if not self.interleaved:
            return (rows, *self._halves_of(rows))
        if rows.dtype == torch.float32 and _pairs_fit(rows):
            return (_as_complex(rows),)
        return (rows,)

    def __call__(self, rows: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> None:
        if rows.is_complex():
            rows.mul_(self.cis)
        elif low is None or high is None:
            self._interleaved(rows)
        elif rows.dtype == torch.float32:
            self._halves(rows, low, high)
        else:
            self._halves_rounded(rows)

    def _interleaved(self, rows: Tensor) -> None:
        """Pairs are complex numbers: one multiplication."""
        wide, pairs = self._buffers(rows, lambda wide: (wide, _as_complex(wide)))
        wide.copy_(rows)
        pairs.mul_(self.cis)
        rows.copy_(wide)

    def _halves(self, rows: Tensor, low: Tensor, high: Tensor) -> None:
        """x cos + swapped(x) sin, in place; the swap is in which half of the copy is read."""
        old, old_low, old_high = self._buffers(rows, lambda old: (old, *self._halves_of(old)))
        old.copy_(rows)
        rows.mul_(self.cos)
        low.addcmul_(old_high, self.minus_sin)
        high.addcmul_(old_low, self.sin)

    def _halves_rounded(self, rows: Tensor) -> None:
        """The same, summed in fp32 scratch and rounded as it is written back."""
        old, old_low, old_high, new, new_low, new_high = self._buffers(rows, self._two)
        old.copy_(rows)
        torch.mul(old_high, self.minus_sin, out=new_low)
        torch.mul(old_low, self.sin, out=new_high)
        rows.copy_(new.addcmul_(old, self.cos))

    def _two(self, old: Tensor) -> tuple[Tensor, ...]:
        new = torch.empty_like(old)
        return (old, *self._halves_of(old), new, *self._halves_of(new))

    def _halves_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[..., : self.half], rows[..., self.half :]

    def _buffers(
        self, rows: Tensor, make: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """fp32 scratch of the shape of `rows`, and views of it."""
        if rows.shape not in self.scratch:
            self.scratch[rows.shape] = make(torch.empty(rows.shape))
        return self.scratch[rows.shape]


def _as_complex(rows: Tensor) -> Tensor:
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def _pairs_fit(rows: Tensor) -> bool:
    """Whether pairs of columns lie where complex numbers may."""
    return rows.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in rows.stride()[:-1])


def _run(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """Rows that don't overlap: neighbours by slices, strays by gathering."""
    if not len(job.src):
        return
    cuts = job.cuts()
    if len(job.src) < _LONG_RUN * (len(cuts) + 1):
        at_once = max(1, _BLOCK // (planes.shape[2] * planes.shape[3]))
        for some in torch.arange(len(job.src)).split(at_once):
            _gather_scatter(planes, job.take(some), spec, start)
        return
    turns: dict[int, _Turn] = {}
    for src, dst, n, delta in job.runs(cuts):
        if delta and spec is not None and delta not in turns:
            turns[delta] = _Turn(spec, delta)
        turn = turns.get(delta)
        target = planes[:, dst : dst + n]
        copied = (target, planes[:, src : src + n]) if job.moves else ()
        turned = () if turn is None or spec is None else turn.views(_rotary(target, spec, start))
        for views in _blocks(*copied, *turned):
            if copied:
                views[0].copy_(views[1])
            if turn is not None:
                turn(*views[len(copied) :])


def _rotary(rows: Tensor, spec: RopeSpec, start: int) -> Tensor:
    return rows[..., start : start + spec.width]


def _blocks(*views: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut views `[layers, n, ...]` of the same rows alike: several layers, or part of one."""
    if not views:
        return
    layers, n, heads, columns = views[0].shape
    at_once = max(1, _BLOCK * torch.get_num_threads() // (heads * columns))
    some = max(1, min(layers, at_once // n))
    for parts in zip(*(view.split(some) for view in views), strict=True):
        yield from zip(*(part.split(at_once, dim=1) for part in parts), strict=True)


def _gather_scatter(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """All rows of a layer are read before the first is written, so slots may overlap."""
    changes = job.deltas != 0
    whole = bool(changes.all())
    turn = None
    if spec is not None and bool(changes.any()):
        distinct = job.deltas[changes].unique()
        turn = _Turn(spec, int(distinct) if len(distinct) == 1 else job.deltas[changes])
    rows = planes.new_empty((1, len(job.src), *planes.shape[2:]))
    for plane in planes:
        torch.index_select(plane, 0, job.src, out=rows[0])
        if turn is not None and spec is not None:
            rotary = _rotary(rows, spec, start)
            some = rotary if whole else rotary[:, changes]
            turn(*turn.views(some))
            if not whole:
                rotary[:, changes] = some
        _scatter(plane, job.dst, rows[0])


def _scatter(plane: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`plane[slots] = rows`, by words of 16 bytes where rows are made of these: 3 times faster."""
    if plane.is_contiguous():
        plane, rows = plane.flatten(1), rows.flatten(1)
        if plane.shape[1] * plane.element_size() % 16 == 0 and plane.data_ptr() % 16 == 0:
            plane, rows = plane.view(torch.complex128), rows.view(torch.complex128)
    plane[slots] = rows
