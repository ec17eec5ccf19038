"""The delta-rotation on CUDA: one launch for all layers and rows, in place or from slot to slot.

Angles are fp64 on the host, one pair of fp32 tables per distinct delta; the kernel multiplies in
fp32 and rounds once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline.rope import RopeSpec

_TILE = 2048  # elements a program holds at once


@triton.jit
def _round(wide, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """To nearest, ties to even. For bf16 by hand, as a GPU does: Triton's interpreter would cut
    off."""
    if dtype == tl.bfloat16:
        bits = wide.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        wide = tl.where(wide == wide, bits.to(tl.float32, bitcast=True), wide)
    return wide.to(dtype)


@triton.jit
def _turn_kernel(  # type: ignore[no-untyped-def]
    source,
    target,
    src_slots,  # int64 [rows]
    dst_slots,  # int64 [rows]
    tables,  # int32 [rows]: which cos/sin table, or -1 for a plain copy
    cos_table,  # fp32 [tables, HALF]
    sin_table,
    rows,
    source_layer,
    source_slot,
    source_head,
    target_layer,
    target_slot,
    target_head,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing turns
    INTERLEAVED: tl.constexpr,
    COPY: tl.constexpr,  # also bring over the columns that don't turn
    ITEMS: tl.constexpr,  # (row, head) items a program
    PAIRS: tl.constexpr,  # HALF, rounded up to a power of two
    WIDE: tl.constexpr,  # COLUMNS, rounded up to a power of two
):
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    layer = tl.program_id(1).to(tl.int64)
    valid = item < rows * HEADS
    row = item // HEADS
    head = (item % HEADS).to(tl.int64)
    src = tl.load(src_slots + row, mask=valid, other=0)
    dst = tl.load(dst_slots + row, mask=valid, other=0)
    old = source + layer * source_layer + src * source_slot + head * source_head
    new = target + layer * target_layer + dst * target_slot + head * target_head
    if HALF > 0:
        pair = tl.arange(0, PAIRS)
        table = tl.load(tables + row, mask=valid, other=-1)
        inside = valid[:, None] & (pair < HALF)[None, :]
        turns = inside & (table >= 0)[:, None]
        at = table[:, None] * HALF + pair[None, :]
        cos = tl.load(cos_table + at, mask=turns, other=1.0)
        sin = tl.load(sin_table + at, mask=turns, other=0.0)
        if INTERLEAVED:
            one = START + 2 * pair
            two = one + 1
        else:
            one = START + pair
            two = one + HALF
        x = tl.load(old[:, None] + one[None, :], mask=inside, other=0.0)
        y = tl.load(old[:, None] + two[None, :], mask=inside, other=0.0)
        x_wide = x.to(tl.float32)
        y_wide = y.to(tl.float32)
        x_new = _round(x_wide * cos - y_wide * sin, x.dtype)
        y_new = _round(y_wide * cos + x_wide * sin, y.dtype)
        # a table of (1, 0) would not do: it loses the sign of zeros and spreads infinities
        tl.store(new[:, None] + one[None, :], tl.where(turns, x_new, x), mask=inside)
        tl.store(new[:, None] + two[None, :], tl.where(turns, y_new, y), mask=inside)
    if COPY:
        column = tl.arange(0, WIDE)
        still = (column < START) | ((column >= START + 2 * HALF) & (column < COLUMNS))
        here = valid[:, None] & still[None, :]
        kept = tl.load(old[:, None] + column[None, :], mask=here)
        tl.store(new[:, None] + column[None, :], kept, mask=here)


def turn_rows(
    planes: Tensor, src: Tensor, dst: Tensor, deltas: Tensor, spec: RopeSpec | None, start: int
) -> None:
    """Turn rows from `src` to `dst` slots of `planes` `[layers, slots, heads, columns]`; in place
    if `dst is src`.

    src, dst: int64 `[n]` on the planes' device; deltas: int64 `[n]` on the CPU. Where slots
    overlap, rows go through a buffer, in a second launch. Called by `leyline.rotate`, which checks
    the arguments.
    """
    in_place = dst is src
    if in_place:
        changes = deltas != 0
        if not bool(changes.all()):
            deltas = deltas[changes]
            src = dst = src[changes.to(src.device)]
    if not len(src):
        return
    if in_place or not bool(torch.isin(src, dst).any()):
        _launch(planes, planes, src, dst, deltas, spec, start, copy=not in_place)
        return
    layers, _, heads, columns = planes.shape
    buffer = torch.empty(
        (layers, len(src), heads, columns), dtype=planes.dtype, device=planes.device
    )
    order = torch.arange(len(src), device=planes.device)
    _launch(planes, buffer, src, order, deltas, spec, start, copy=True)
    _launch(buffer, planes, order, dst, deltas, None, 0, copy=True)


def _launch(
    source: Tensor,
    target: Tensor,
    src: Tensor,
    dst: Tensor,
    deltas: Tensor,
    spec: RopeSpec | None,
    start: int,
    copy: bool,
) -> None:
    layers, _, heads, columns = source.shape
    half = spec.width // 2 if spec is not None else 0
    tables, cos, sin = _tables(deltas, spec, source.device)
    pairs, wide = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(columns)
    items = max(1, _TILE // (wide if copy else 2 * pairs))
    grid = (triton.cdiv(len(src) * heads, items), layers)
    _turn_kernel[grid](
        source,
        target,
        src.contiguous(),
        dst.contiguous(),
        tables,
        cos,
        sin,
        len(src),
        *source.stride()[:3],
        *target.stride()[:3],
        HEADS=heads,
        COLUMNS=columns,
        START=start,
        HALF=half,
        INTERLEAVED=spec is not None and spec.interleaved,
        COPY=copy and 2 * half < columns,
        ITEMS=items,
        PAIRS=pairs,
        WIDE=wide,
    )


def _tables(
    deltas: Tensor, spec: RopeSpec | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's table (-1 for delta 0), and fp32 cos and sin `[distinct deltas, half]`."""
    if spec is None:
        empty = torch.zeros(1, device=device)
        return torch.zeros(1, dtype=torch.int32, device=device), empty, empty
    distinct, which = torch.unique(deltas, return_inverse=True)
    which = torch.where(deltas == 0, -1, which)
    cos, sin = spec.cos_sin(distinct)
    return (
        which.to(device=device, dtype=torch.int32),
        cos.float().to(device).contiguous(),
        sin.float().to(device).contiguous(),
    )
