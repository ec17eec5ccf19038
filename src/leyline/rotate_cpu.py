"""The rotation on a CPU: one pass over the rows, compiled by Numba.

A row is read once, turned in fp32, rounded once and written once, where torch would pass over the
rows several times. bf16 is handled as bits: Numba has no such type.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit
from torch import Tensor

from leyline.rope import RopeSpec
from leyline.rotate import Planes

_SMALL = 1 << 18
"""Elements below which a second thread does not pay."""
_pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="leyline-rotate")


def turn_rows(
    planes: Planes, src: Tensor, dst: Tensor, deltas: Tensor, spec: RopeSpec | None, start: int
) -> None:
    """In every layer, `rows[dst] = rows[src]`, with the rotary columns of row i turned by
    `deltas[i]`.

    planes: fp32 or bf16, contiguous, on the CPU. src, dst, deltas: int64 `[n]`. Slots written must
    not be read, but by the same row.
    """
    if not len(src):
        return
    turn = _turn_bf16 if planes.dtype == torch.bfloat16 else _turn_fp32
    distinct, which = np.unique(deltas.numpy(), return_inverse=True)
    cos = sin = np.zeros((len(distinct), 0), dtype=np.float32)
    if spec is not None:
        cos, sin = (t.float().numpy() for t in spec.cos_sin(torch.from_numpy(distinct)))
    tables = cos, sin, start, spec is not None and spec.interleaved
    which[deltas.numpy() == 0] = -1
    elements = len(planes.layers) * len(src) * planes.layers[0][0].numel()
    parts = max(1, min(torch.get_num_threads(), elements // _SMALL))
    stacks = _stacks(planes)

    def work(runs: np.ndarray) -> None:
        for rows in stacks:
            turn(rows, runs, *tables)

    mine, *others = np.array_split(_runs(src.numpy(), dst.numpy(), which, parts), parts)
    jobs = [_pool.submit(work, runs) for runs in others]
    work(mine)
    for job in jobs:
        job.result()


def _stacks(planes: Planes) -> list[np.ndarray]:
    """The rows as `[layers, slots, heads, columns]`: all of them, or a layer each."""
    bits = planes.dtype == torch.bfloat16
    if planes.stack is not None and planes.stack.is_contiguous():
        found = [planes.stack]
    else:
        found = [layer[None] for layer in planes.layers]
    return [(rows.view(torch.uint16) if bits else rows).numpy() for rows in found]


def _runs(src: np.ndarray, dst: np.ndarray, which: np.ndarray, parts: int) -> np.ndarray:
    """int64 `[runs, 4]`: (src, dst, table, n) of neighbouring slots, cut so that parts of them are
    parts of the rows."""
    breaks = (np.diff(src) != 1) | (np.diff(dst) != 1) | (np.diff(which) != 0)
    every = -(-len(src) // (4 * parts))
    breaks[every - 1 :: every] = True
    first = np.append(0, np.flatnonzero(breaks) + 1)
    return np.stack([src[first], dst[first], which[first], np.diff(first, append=len(src))], axis=1)


@njit(nogil=True, cache=True)
def _copy(plane, src, dst, n, low, high):  # type: ignore[no-untyped-def]
    """Columns `[low, high)` of n rows; element by element, as a slice costs more than a row."""
    for i in range(n):
        for head in range(plane.shape[1]):
            for column in range(low, high):
                plane[dst + i, head, column] = plane[src + i, head, column]


@njit(nogil=True, cache=True)
def _turn_fp32(planes, runs, cos, sin, start, interleaved):  # type: ignore[no-untyped-def]
    """Runs (src, dst, table, n), layer by layer. table: a row of cos and sin; -1 only copies."""
    half, columns = cos.shape[1], planes.shape[3]
    for layer in range(planes.shape[0]):
        plane = planes[layer]
        for src, dst, table, n in runs:
            if src != dst:
                _copy(plane, src, dst, n, 0, columns)
            if table < 0:
                continue
            c, s = cos[table], sin[table]
            for slot in range(dst, dst + n):
                for head in range(planes.shape[2]):
                    row = plane[slot, head, start : start + 2 * half]
                    if interleaved:
                        for pair in range(half):
                            x, y = row[2 * pair], row[2 * pair + 1]
                            row[2 * pair] = x * c[pair] - y * s[pair]
                            row[2 * pair + 1] = y * c[pair] + x * s[pair]
                    else:
                        for pair in range(half):
                            x, y = row[pair], row[pair + half]
                            row[pair] = x * c[pair] - y * s[pair]
                            row[pair + half] = y * c[pair] + x * s[pair]


@njit(nogil=True, cache=True)
def _turn_bf16(planes, runs, cos, sin, start, interleaved):  # type: ignore[no-untyped-def]
    """As `_turn_fp32`, on the bits of bf16: to nearest, ties to even.

    NaN stays NaN: what comes from bf16 has no low bits that could carry over.
    """
    half, columns = cos.shape[1], planes.shape[3]
    bits = np.empty(2 * half, np.uint32)
    wide = bits.view(np.float32)
    turned = np.empty(2 * half, np.float32)
    turned_bits = turned.view(np.uint32)
    for layer in range(planes.shape[0]):
        plane = planes[layer]
        for src, dst, table, n in runs:
            if table < 0:
                if src != dst:
                    _copy(plane, src, dst, n, 0, columns)
                continue
            if src != dst:
                _copy(plane, src, dst, n, 0, start)
                _copy(plane, src, dst, n, start + 2 * half, columns)
            c, s = cos[table], sin[table]
            for i in range(n):
                for head in range(planes.shape[2]):
                    old = plane[src + i, head, start : start + 2 * half]
                    for column in range(2 * half):
                        bits[column] = np.uint32(old[column]) << np.uint32(16)
                    if interleaved:
                        for pair in range(half):
                            x, y = wide[2 * pair], wide[2 * pair + 1]
                            turned[2 * pair] = x * c[pair] - y * s[pair]
                            turned[2 * pair + 1] = y * c[pair] + x * s[pair]
                    else:
                        for pair in range(half):
                            x, y = wide[pair], wide[pair + half]
                            turned[pair] = x * c[pair] - y * s[pair]
                            turned[pair + half] = y * c[pair] + x * s[pair]
                    new = plane[dst + i, head, start : start + 2 * half]
                    for column in range(2 * half):
                        v = turned_bits[column]
                        odd = (v >> np.uint32(16)) & np.uint32(1)
                        new[column] = np.uint16((v + np.uint32(0x7FFF) + odd) >> np.uint32(16))
