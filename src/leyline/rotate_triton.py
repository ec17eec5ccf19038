"""The delta-rotation on CUDA: one launch for all layers and rows, in place or from slot to slot.

Angles are fp64 on the host, one pair of fp32 tables per distinct delta; the kernel multiplies in
fp32 and rounds once. Layers are found by a table of offsets, so that they may lie anywhere. Nothing
here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from leyline.rope import RopeSpec
from leyline.rotate import Planes

TILE = 2048
"""Elements a program holds at once."""
WARPS = 4


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
def _load_columns(row, valid, COUNT: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first COUNT columns of each item; WIDE: COUNT, rounded up to a power of two."""
    column = tl.arange(0, WIDE)
    here = valid[:, None] & (column < COUNT)[None, :]
    return tl.load(row[:, None] + column[None, :], mask=here)


@triton.jit
def _store_columns(row, kept, valid, COUNT: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, WIDE)
    here = valid[:, None] & (column < COUNT)[None, :]
    tl.store(row[:, None] + column[None, :], kept, mask=here)


# The number of rows and where slot lists begin change with every call: they must not compile anew.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["src_slots", "dst_slots"])
def _turn_kernel(  # type: ignore[no-untyped-def]
    source,  # the first layer
    target,
    source_layers,  # int64 [layers]: offsets from the first layer, in SOURCE_UNIT elements
    target_layers,
    src_slots,  # int64 [rows]
    dst_slots,  # int64 [rows]
    tables,  # int32 [rows]: which cos/sin table, or -1 for rows that don't turn
    cos_sin,  # fp32 [tables, 2, HALF]
    rows,
    source_slot,
    source_head,
    target_slot,
    target_head,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,  # the first column that turns
    HALF: tl.constexpr,  # pairs that turn, 0 for none
    INTERLEAVED: tl.constexpr,
    COPY: tl.constexpr,  # False: in place, rows that don't turn are not touched
    SOURCE_UNIT: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    ITEMS: tl.constexpr,  # (row, head) items a program
    PAIRS: tl.constexpr,  # HALF, rounded up to a power of two
    LEFT: tl.constexpr,  # columns before those that turn, rounded up
    RIGHT: tl.constexpr,  # columns behind them, rounded up
):
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    layer = tl.program_id(1)
    valid = item < rows * HEADS
    row = item // HEADS
    head = (item % HEADS).to(tl.int64)
    src = tl.load(src_slots + row, mask=valid, other=0)
    dst = src
    if COPY:
        dst = tl.load(dst_slots + row, mask=valid, other=0)
    old = source + tl.load(source_layers + layer) * SOURCE_UNIT
    new = target + tl.load(target_layers + layer) * TARGET_UNIT
    old = old + src * source_slot + head * source_head
    new = new + dst * target_slot + head * target_head
    BEHIND: tl.constexpr = COLUMNS - START - 2 * HALF
    # what only travels is asked for first: no load is moved ahead of a store
    if COPY and START > 0:
        before = _load_columns(old, valid, START, LEFT)
    if COPY and BEHIND > 0:
        behind = _load_columns(old + (START + 2 * HALF), valid, BEHIND, RIGHT)
    if HALF > 0:
        pair = tl.arange(0, PAIRS)
        table = tl.load(tables + row, mask=valid, other=-1)
        turns = (valid & (table >= 0))[:, None] & (pair < HALF)[None, :]
        at = cos_sin + table[:, None] * (2 * HALF) + pair[None, :]
        cos = tl.load(at, mask=turns, other=1.0)
        sin = tl.load(at + HALF, mask=turns, other=0.0)
        touched = turns
        if COPY:
            touched = valid[:, None] & (pair < HALF)[None, :]
        if INTERLEAVED:  # pairs are neighbours: loaded as one block, then taken apart
            both = tl.arange(0, 2 * PAIRS)
            held = valid
            if not COPY:
                held = valid & (table >= 0)
            inside = held[:, None] & (both < 2 * HALF)[None, :]
            block = tl.load(old[:, None] + START + both[None, :], mask=inside, other=0.0)
            x, y = tl.split(tl.reshape(block, [ITEMS, PAIRS, 2]))
        else:
            x = tl.load(old[:, None] + START + pair[None, :], mask=touched, other=0.0)
            y = tl.load(old[:, None] + (START + HALF) + pair[None, :], mask=touched, other=0.0)
        x_wide = x.to(tl.float32)
        y_wide = y.to(tl.float32)
        # a table of (1, 0) would not do: it loses the sign of zeros and spreads infinities
        x_new = tl.where(turns, _round(x_wide * cos - y_wide * sin, x.dtype), x)
        y_new = tl.where(turns, _round(y_wide * cos + x_wide * sin, y.dtype), y)
        if INTERLEAVED:
            block = tl.reshape(tl.join(x_new, y_new), [ITEMS, 2 * PAIRS])
            tl.store(new[:, None] + START + both[None, :], block, mask=inside)
        else:
            tl.store(new[:, None] + START + pair[None, :], x_new, mask=touched)
            tl.store(new[:, None] + (START + HALF) + pair[None, :], y_new, mask=touched)
    if COPY and START > 0:
        _store_columns(new, before, valid, START, LEFT)
    if COPY and BEHIND > 0:
        _store_columns(new + (START + 2 * HALF), behind, valid, BEHIND, RIGHT)


@dataclass(frozen=True, eq=False)
class Turns:
    """What turns each row, on the device.

    which: int32 `[rows]`, a row of `tables`, or -1 for rows that don't turn. tables: fp32
    `[distinct deltas, 2, half]`, cos and sin.
    """

    which: Tensor
    tables: Tensor

    @classmethod
    def of(cls, deltas: Tensor, spec: RopeSpec | None, device: torch.device) -> Turns:
        """deltas: int64 `[rows]` on the CPU."""
        if spec is None:
            nothing = torch.empty(1, device=device)
            return cls(nothing, nothing)
        runs, run = torch.unique_consecutive(deltas, return_inverse=True)  # few, so cheap to sort
        distinct, which = torch.unique(runs, return_inverse=True)
        which = torch.where(runs == 0, -1, which)[run].int()
        tables = torch.stack(spec.cos_sin(distinct), dim=1).float()
        return cls(_send(which, device), _send(tables, device))


def turn_rows(
    planes: Planes,
    src: Tensor,
    dst: Tensor,
    deltas: Tensor,
    spec: RopeSpec | None,
    start: int,
    target: Planes | None = None,
) -> None:
    """Turn rows from `src` slots of `planes` to `dst` slots of `target` (else of `planes`); in
    place if `dst is src` and there is no target.

    src, dst: int64 `[n]` on the planes' device; deltas: int64 `[n]` on the CPU. But in place, slots
    written must not be read. Called by `leyline.rotate`, which checks the arguments.
    """
    in_place = dst is src and target is None
    if not len(src) or (in_place and (spec is None or not bool(deltas.any()))):
        return
    turns = Turns.of(deltas, spec, planes.device)
    launch(planes, target or planes, src, dst, turns, spec, start, copy=not in_place)


def launch(
    source: Planes,
    target: Planes,
    src: Tensor,
    dst: Tensor,
    turns: Turns,
    spec: RopeSpec | None,
    start: int,
    copy: bool,
) -> None:
    """One launch over all layers, on the current stream."""
    first, into = source.layers[0], target.layers[0]
    _, heads, columns = first.shape
    if spec is None:
        start = columns
        if first.stride(1) == into.stride(1) == columns and first.stride(2) == 1:
            heads, start, columns = 1, heads * columns, heads * columns  # a row in one piece
    half = spec.width // 2 if spec is not None else 0
    pairs, left, right = (
        triton.next_power_of_2(max(1, n)) for n in (half, start, columns - start - 2 * half)
    )
    items = triton.next_power_of_2(max(1, TILE // (columns if copy else 2 * pairs)))
    grid = (triton.cdiv(len(src) * heads, items), len(source.layers))
    _turn_kernel[grid](
        first,
        into,
        source.offsets,
        target.offsets,
        src.contiguous(),
        dst.contiguous(),
        turns.which,
        turns.tables,
        len(src),
        *first.stride()[:2],
        *into.stride()[:2],
        HEADS=heads,
        COLUMNS=columns,
        START=start,
        HALF=half,
        INTERLEAVED=spec is not None and spec.interleaved,
        COPY=copy,
        SOURCE_UNIT=source.unit,
        TARGET_UNIT=target.unit,
        ITEMS=items,
        PAIRS=pairs,
        LEFT=left,
        RIGHT=right,
        num_warps=WARPS,
    )


def _send(host: Tensor, device: torch.device) -> Tensor:
    """To the device, from pinned memory: a copy from elsewhere would wait for the stream."""
    if device.type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
