"""The delta-rotation of cached rows: R(delta) on rotary columns, nothing else touched.

Rows live in *planes*: one tensor `[layers, slots, heads, columns]` for all layers of one tensor kind. Angles are fp64, the
product fp32, and the result is rounded once to the cache's dtype. On a CPU, blocks of a cache's size are copied to scratch and
turned in place; on CUDA one Triton launch does all layers and rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leyline.rope import RopeSpec

Slots = Tensor | slice
Deltas = Tensor | int

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Elements a block: fits L2 with its scratch, and stays under torch's grain (32768), above which each of the few
# operations on a block would wake and await every thread.
_BLOCK = 32767
# Shorter runs of neighbouring slots than this are gathered instead: a slice costs a few calls.
_LONG_RUN = 16


def rotate_rows_(
    planes: Tensor, slots: Slots, deltas: Deltas, spec: RopeSpec, start: int = 0
) -> None:
    """Turn rows in place, in all layers: columns `[start, start + spec.width)` by R(delta).

    planes: `[layers, slots, heads, columns]`, fp32, bf16 or fp16, columns contiguous.
    slots: int64 `[n]`, each at most once, or a slice with step 1. deltas: tokens, one for all rows or int64 `[n]`.
    Rows with delta 0 stay bitwise what they were. Raises ValueError for shapes or slots that don't fit.
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
    """Copy whole rows from `src` to `dst` slots, in all layers, turning the rotary columns on the way.

    As `rotate_rows_`; `dst` must name each slot once. `src` and `dst` may overlap: all that is read is read before it is
    overwritten. Unrotated columns, rows with delta 0, and everything with `spec=None` are bitwise copies.
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
            _run_overlapping(planes, job, spec, start)
        else:
            _run(planes, job, spec, start)


def rotate_reference(
    rows: Tensor, delta: int | Tensor, spec: RopeSpec, start: int = 0
) -> Tensor:
    """R(delta) on rows `[..., heads, columns]` in fp64, one 2 x 2 rotation after the other; unrounded.

    delta: one for all rows, or of the rows' leading shape. Slow and plain: what the fast paths are tested against.
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

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(src, dst, n, delta) of maximal runs of neighbouring slots with one delta."""
        if not len(self.src):
            return
        same = (self.deltas.diff() == 0) & (self.src.diff() == 1) & (self.dst.diff() == 1)
        cuts = [0, *((~same).nonzero().flatten() + 1).tolist(), len(self.src)]
        for low, high in zip(cuts, cuts[1:], strict=False):
            yield (
                int(self.src[low]),
                int(self.dst[low]),
                high - low,
                int(self.deltas[low]),
            )


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
            f"rotary columns [{start}, {start + spec.width}) don't fit rows of {planes.shape[-1]} columns"
        )


class _Turn:
    """R(delta) in place on blocks `[layers, rows, heads, width]`, with its tables and scratch.

    deltas: one, or int64 `[rows]`: then every block must have these rows.
    """

    def __init__(self, spec: RopeSpec, deltas: int | Tensor) -> None:
        cos, sin = (table.float() for table in spec.cos_sin(deltas))
        if isinstance(deltas, Tensor):
            cos, sin = cos[:, None], sin[:, None]
        self.half = spec.width // 2
        self.interleaved = spec.interleaved
        self.cis = torch.complex(cos, sin) if spec.interleaved else None
        self.cos, self.sin = torch.cat((cos, cos), dim=-1), sin
        self.scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, rows: Tensor) -> None:
        if self.interleaved:
            self._interleaved(rows)
        elif rows.dtype == torch.float32:
            old, _ = self._buffers(rows)
            old.copy_(rows)
            rows.mul_(self.cos)
            self._add_sines(rows, old)
        else:
            old, new = self._buffers(rows)
            old.copy_(rows)
            torch.mul(old, self.cos, out=new)
            self._add_sines(new, old)
            rows.copy_(new)

    def _add_sines(self, new: Tensor, old: Tensor) -> None:
        new[..., : self.half].addcmul_(old[..., self.half :], self.sin, value=-1)
        new[..., self.half :].addcmul_(old[..., : self.half], self.sin)

    def _interleaved(self, rows: Tensor) -> None:
        if rows.dtype == torch.float32 and _pairs_fit(rows):
            _as_complex(rows).mul_(self.cis)
            return
        new, _ = self._buffers(rows)
        new.copy_(rows)
        _as_complex(new).mul_(self.cis)
        rows.copy_(new)

    def _buffers(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        shape = tuple(rows.shape)
        if shape not in self.scratch:
            self.scratch[shape] = (torch.empty(shape), torch.empty(shape))
        return self.scratch[shape]


def _as_complex(rows: Tensor) -> Tensor:
    return torch.view_as_complex(rows.unflatten(-1, (-1, 2)))


def _pairs_fit(rows: Tensor) -> bool:
    """Whether pairs of columns lie where complex numbers may."""
    return rows.storage_offset() % 2 == 0 and all(step % 2 == 0 for step in rows.stride()[:-1])


def _run(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """Rows that don't overlap, block by block."""
    runs = list(job.runs())
    if not runs:
        return
    if len(job.src) < _LONG_RUN * len(runs):
        _run_scattered(planes, job, spec, start)
        return
    turns = {run[3]: _Turn(spec, run[3]) for run in runs if spec is not None and run[3]}
    for src, dst, n, delta in runs:
        sources, targets = planes[:, src : src + n], planes[:, dst : dst + n]
        turn = turns.get(delta)
        for old, new in zip(_blocks(sources), _blocks(targets), strict=True):
            if job.moves:
                new.copy_(old)
            if turn is not None and spec is not None:
                turn(new[..., start : start + spec.width])


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Cut `[layers, n, heads, columns]` into blocks of about _BLOCK elements: several layers or part of one."""
    layers, n, heads, columns = rows.shape
    at_once = max(1, _BLOCK // (heads * columns))
    for some in rows.split(max(1, min(layers, at_once // max(n, 1)))):
        yield from some.split(at_once, dim=1)


def _run_scattered(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """Gather, turn, scatter: a block of rows of one layer at a time."""
    heads, columns = planes.shape[2:]
    at_once = max(1, _BLOCK // (heads * columns))
    rows = torch.arange(len(job.src))
    for some in rows.split(at_once):
        _gather_scatter(planes, job.take(some), spec, start)


def _run_overlapping(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """All rows of a layer are read before the first is written."""
    _gather_scatter(planes, job, spec, start)


def _gather_scatter(planes: Tensor, job: _Job, spec: RopeSpec | None, start: int) -> None:
    turn = None
    changes = job.deltas != 0
    if spec is not None and bool(changes.any()):
        turn = _Turn(spec, job.deltas[changes])
    everything = bool(changes.all())
    for plane in planes:
        rows = plane.index_select(0, job.src)
        if turn is not None and spec is not None:
            rotary = rows[..., start : start + spec.width]
            if everything:
                turn(rotary)
            else:
                some = rotary[changes]
                turn(some)
                rotary[changes] = some
        plane.index_copy_(0, job.dst, rows)
