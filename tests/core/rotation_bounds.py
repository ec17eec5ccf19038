"""How far a rotated row may be from the fp64 reference, and fresh random planes to rotate."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from leyline.rope import RopeSpec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fresh_generator() -> torch.Generator:
    """Another seed each time; printed, so that pytest shows it with a failure."""
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def rotary_bound(rows: Tensor, exact: Tensor, spec: RopeSpec, start: int) -> Tensor:
    """Largest error allowed in each element of R(delta) `rows`; zero outside the rotary columns.

    With u = 2^-24: cos and sin are rounded to fp32 (u), then two products (u) and a sum (u), so at
    most 3 u of |x cos| + |y sin|, which is at most the pair's length. A narrower dtype then rounds
    once: half a unit in the last place of the result, or half of the smallest subnormal.
    """
    pairs = rows[..., start : start + spec.width].double()
    if spec.interleaved:
        length = torch.hypot(pairs[..., 0::2], pairs[..., 1::2]).repeat_interleave(2, dim=-1)
    else:
        low, high = pairs.chunk(2, dim=-1)
        length = torch.hypot(low, high)
        length = torch.cat((length, length), dim=-1)
    product = 3.01 * 2.0**-24 * length + 2.0**-149
    bound = torch.zeros(rows.shape, dtype=torch.float64)
    inside = bound[..., start : start + spec.width]
    inside += product
    if rows.dtype != torch.float32:
        info = torch.finfo(rows.dtype)
        result = exact[..., start : start + spec.width].abs() + product
        inside += info.eps / 2 * result + info.smallest_normal * info.eps / 2
    return bound


def spec_of(width: int, interleaved: bool, base: float = 10000.0) -> RopeSpec:
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    return RopeSpec((base**-powers).float().double(), width, interleaved)
