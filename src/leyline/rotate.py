"""The delta-rotation of cached rows: R(delta) on rotary columns, nothing else touched.

Rows live in *planes*: one tensor `[layers, slots, heads, columns]` for all layers of one tensor
kind, or one `[slots, heads, columns]` a layer. Angles are fp64, the product fp32, and the result is
rounded once to the cache's dtype. On CUDA one Triton launch does all layers and rows
(`rotate_triton.py`), on a CPU one compiled loop (`rotate_cpu.py`); what neither takes goes through
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import ModuleType

import torch
from torch import Tensor

from leyline.rope import RopeSpec

Slots = Tensor | slice
Deltas = Tensor | int

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPILED = (torch.float32, torch.bfloat16)
_BLOCK = 1 << 18
"""Elements that torch turns at a time: what it makes on the way stays in the caches."""


@dataclass(frozen=True, eq=False)
class Planes:
    """Rows of all layers: `layers` holds one `[slots, heads, columns]` each, all of one shape,
    strides, dtype and device. Build it once and keep it: a GPU finds the layers by `offsets`.

    stack: the tensor that the layers are slices of, if it is one.
    """

    layers: tuple[Tensor, ...]
    stack: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor | Sequence[Tensor] | Planes) -> Planes:
        """From `[layers, slots, heads, columns]`, or from `[slots, heads, columns]` a layer.

        Raises ValueError if the layers are not alike.
        """
        if isinstance(rows, Planes):
            return rows
        if isinstance(rows, Tensor):
            if rows.dim() != 4:
                raise ValueError(
                    f"planes must be [layers, slots, heads, columns], got shape {tuple(rows.shape)}"
                )
            return cls(rows.unbind(0), rows)
        layers = tuple(rows)
        kinds = {(t.shape, t.stride(), t.dtype, t.device) for t in layers}
        if len(kinds) != 1 or layers[0].dim() != 3:
            shapes = ", ".join(sorted({f"{tuple(t.shape)} of {t.dtype}" for t in layers}))
            raise ValueError(
                "layers must be [slots, heads, columns], one as the other in shape, strides, "
                f"dtype and device; got {shapes or 'none'}"
            )
        return cls(layers)

    @property
    def slots(self) -> int:
        return self.layers[0].shape[0] if self.layers else 0

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].dtype

    @cached_property
    def contiguous(self) -> bool:
        return all(layer.is_contiguous() for layer in self.layers)

    @cached_property
    def unit(self) -> int:
        """What `offsets` count in: 16 elements where every layer allows it, so that a GPU may load
        them by the vector; else 1."""
        return 1 if any(distance % 16 for distance in self._distances()) else 16

    @cached_property
    def offsets(self) -> Tensor:
        """int64 `[layers]` on the planes' device: from the first layer to each, in `unit`s."""
        if self.stack is not None:  # made on the device, which nobody needs to wait for
            order = torch.arange(len(self.layers), device=self.device)
            return order * (self.stack.stride(0) // self.unit)
        apart = torch.tensor([distance // self.unit for distance in self._distances()])
        return apart.to(self.device)

    def _distances(self) -> list[int]:
        if self.stack is not None:
            return [self.stack.stride(0)]
        size = self.layers[0].element_size()
        first = self.layers[0].data_ptr()
        if any((layer.data_ptr() - first) % size for layer in self.layers):
            raise ValueError("layers must lie a whole number of elements apart")
        return [(layer.data_ptr() - first) // size for layer in self.layers]


def rotate_rows_(
    planes: Tensor | Sequence[Tensor] | Planes,
    slots: Slots,
    deltas: Deltas,
    spec: RopeSpec,
    start: int = 0,
) -> None:
    """Turn rows in place, in all layers: columns `[start, start + spec.width)` by R(delta).

    planes: `[layers, slots, heads, columns]`, or a list with `[slots, heads, columns]` for each
    layer, or `Planes`; fp32, bf16 or fp16, columns contiguous. slots: int64 `[n]`, each at most
    once, or a slice with step 1. deltas: tokens, one for all rows or int64 `[n]`. Rows with delta 0
    stay bitwise what they were. Raises ValueError for shapes or slots that don't fit.
    """
    rows = Planes.of(planes)
    _check_planes(rows, spec, start)
    if rows.layers:
        job = _job(rows, slots, slots, deltas).changing()
        turn_unchecked(rows, job.src, job.dst, job.deltas, spec, start)


def move_rows(
    planes: Tensor | Sequence[Tensor] | Planes,
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
    rows = Planes.of(planes)
    _check_planes(rows, spec, start)
    if not rows.layers:
        return
    job = _job(rows, src, dst, deltas)
    if job.overlaps():
        _move_overlapping(rows, job, spec, start)
    else:
        turn_unchecked(rows, job.src, job.dst, job.deltas, spec, start)


def turn_unchecked(
    planes: Planes, src: Tensor, dst: Tensor, deltas: Tensor, spec: RopeSpec | None, start: int = 0
) -> None:
    """`move_rows`, or `rotate_rows_` if `dst is src`, for callers who know their slots: one launch
    on CUDA, on the current stream, and nothing waits for the device.

    src, dst: int64 `[n]` within the planes and on their device. Each target is named once and is no
    source, unless `dst is src`. deltas: int64 `[n]` on the CPU, zeros if `spec` is None.
    """
    if not len(src) or not planes.layers:
        return
    if planes.layers[0].is_cuda:
        from leyline.rotate_triton import turn_rows as on_cuda

        on_cuda(planes, src, dst, deltas, spec, start)
        return
    compiled = _numba() if planes.dtype in _COMPILED and planes.contiguous else None
    with torch.inference_mode():
        if compiled is not None:
            compiled.turn_rows(planes, src, dst, deltas, spec, start)
        else:
            row = planes.layers[0][0].numel()
            job = _Job(src, dst, deltas)
            _by_torch(planes, job, spec, start, max(1, _BLOCK // max(1, row)))


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
        if bool(changes.all()):
            return self
        slots = self.src[changes.to(self.src.device)]
        return _Job(slots, slots, self.deltas[changes])

    def overlaps(self) -> bool:
        return self.src is not self.dst and bool(torch.isin(self.src, self.dst).any())


def _job(planes: Planes, src: Slots, dst: Slots, deltas: Deltas) -> _Job:
    source = _slots(src, planes)
    target = source if dst is src else _slots(dst, planes)
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


def _slots(slots: Slots, planes: Planes) -> Tensor:
    count = planes.slots
    if isinstance(slots, slice):
        low = 0 if slots.start is None else slots.start
        high = count if slots.stop is None else slots.stop
        if slots.step not in (None, 1) or not 0 <= low <= high <= count:
            raise ValueError(f"{slots} isn't a plain range within {count} slots")
        return torch.arange(low, high, device=planes.device)
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(
            f"slots must be int64 of one dimension, got {slots.dtype} of shape {tuple(slots.shape)}"
        )
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= count):
        raise ValueError(f"slots reach from {int(slots.min())} to {int(slots.max())} of {count}")
    return slots.to(planes.device)


def _check_planes(planes: Planes, spec: RopeSpec | None, start: int) -> None:
    if not planes.layers:
        return
    first = planes.layers[0]
    if spec is not None and planes.dtype not in DTYPES:
        raise ValueError(f"rows of {planes.dtype} can't be turned; {DTYPES} can")
    if first.stride(-1) != 1 and (spec is not None or first.is_cuda):
        raise ValueError("the columns of a row must be contiguous")
    if spec is None:
        return
    columns = first.shape[-1]
    if start < 0 or start + spec.width > columns:
        raise ValueError(
            f"rotary columns [{start}, {start + spec.width}) don't fit rows of {columns} columns"
        )


@cache
def _numba() -> ModuleType | None:
    """The compiled loop, where Numba is installed."""
    try:
        from leyline import rotate_cpu
    except ImportError:
        return None
    return rotate_cpu


def _move_overlapping(planes: Planes, job: _Job, spec: RopeSpec | None, start: int) -> None:
    """All rows of a layer are read before the first is written; on CUDA by way of a buffer."""
    if not planes.layers[0].is_cuda:
        with torch.inference_mode():
            _by_torch(planes, job, spec, start, len(job.src))
        return
    from leyline.rotate_triton import turn_rows

    count = len(job.src)
    shape = (len(planes.layers), count, *planes.layers[0].shape[1:])
    buffer = Planes.of(planes.layers[0].new_empty(shape))
    order = torch.arange(count, device=planes.device)
    turn_rows(planes, job.src, order, job.deltas, spec, start, target=buffer)
    turn_rows(buffer, order, job.dst, torch.zeros_like(job.deltas), None, 0, target=planes)


def _by_torch(planes: Planes, job: _Job, spec: RopeSpec | None, start: int, block: int) -> None:
    """Blocks of rows through all layers: gathered, turned in fp32, scattered."""
    first = 0
    width = planes.layers[0].shape[-1]
    if job.src is job.dst:
        if spec is None:
            return
        job, first, width, start = job.changing(), start, spec.width, 0
    distinct, which = torch.unique(job.deltas, return_inverse=True)
    tables = None if spec is None else torch.stack(spec.cos_sin(distinct)).float()
    for low in range(0, len(job.src), block):
        part = slice(low, low + block)
        turns = (job.deltas[part] != 0)[:, None, None]
        for layer in planes.layers:
            columns = layer[..., first : first + width]
            rows = columns.index_select(0, job.src[part])
            if spec is not None and tables is not None:
                rotary = rows[..., start : start + spec.width]
                turned = _turned(rotary.float(), tables[:, which[part], None], spec)
                rotary.copy_(torch.where(turns, turned.to(rows.dtype), rotary))
            columns.index_copy_(0, job.dst[part], rows)


def _turned(rows: Tensor, tables: Tensor, spec: RopeSpec) -> Tensor:
    """R(delta) on fp32 rows `[n, heads, width]`, by cos and sin: tables `[2, n, 1, width // 2]`."""
    cos, sin = tables
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
