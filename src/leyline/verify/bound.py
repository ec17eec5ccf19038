"""How far a right rotation may be from the exact one (I3)."""

from __future__ import annotations

import torch
from torch import Tensor

from leyline.rope import RopeSpec


def rotary_bound(rows: Tensor, exact: Tensor, spec: RopeSpec, start: int) -> Tensor:
    """Largest error allowed in each element of R(delta) `rows`; zero outside the rotary columns.

    rows: before the turn, `[..., columns]`. exact: turned in fp64, of the same shape.

    With u = 2^-24: cos and sin are rounded to fp32 (u), then two products (u) and a sum (u), so at
    most 3 u of |x cos| + |y sin|, which is at most the pair's length. A narrower dtype then rounds
    once: half a unit in the last place of the result, or half of the smallest subnormal.
    """
    pairs = rows[..., start : start + spec.width].double()
    length = pair_lengths(pairs, spec)
    product = 3.01 * 2.0**-24 * length + 2.0**-149
    bound = torch.zeros(rows.shape, dtype=torch.float64)
    inside = bound[..., start : start + spec.width]
    inside += product
    if rows.dtype != torch.float32:
        info = torch.finfo(rows.dtype)
        result = exact[..., start : start + spec.width].abs() + product
        inside += info.eps / 2 * result + info.smallest_normal * info.eps / 2
    return bound


def pair_lengths(columns: Tensor, spec: RopeSpec) -> Tensor:
    """The length of each column's pair, of the shape of `columns` `[..., spec.width]`."""
    if spec.interleaved:
        length = torch.hypot(columns[..., 0::2], columns[..., 1::2])
        return length.repeat_interleave(2, dim=-1)
    low, high = columns.chunk(2, dim=-1)
    length = torch.hypot(low, high)
    return torch.cat((length, length), dim=-1)
