"""What this machine does at best: the numbers that costs are told beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Speed:
    """copy_bytes_s: of `Tensor.copy_`, reads and writes counted. linear_flops_s, attention_flops_s:
    of a linear layer and of attention, in the shapes of the model measured."""

    copy_bytes_s: float
    linear_flops_s: float
    attention_flops_s: float


def best(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Least seconds of several runs, after one that warms up."""
    work()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def copy_bytes_s(megabytes: int = 256) -> float:
    """Of a copy that no cache holds."""
    import torch

    here = torch.ones(megabytes << 18)
    there = torch.empty_like(here)
    there.zero_()
    return 2 * here.numel() * 4 / best(lambda: there.copy_(here))


def linear_flops_s(hidden: int, inner: int, tokens: int) -> float:
    """Of fp32 linear layers there and back, as in a model's feed-forward part."""
    import torch
    from torch.nn.functional import linear

    x = torch.randn(tokens, hidden)
    up, down = torch.randn(inner, hidden), torch.randn(hidden, inner)
    with torch.inference_mode():
        seconds = best(lambda: linear(linear(x, up), down))
    return 2 * 2 * tokens * hidden * inner / seconds


def attention_flops_s(heads: int, groups: int, width: int, length: int, queries: int) -> float:
    """Of fp32 attention of the last `queries` of `length` tokens; rows behind a query count as
    read, as they are computed only to be masked."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    q = torch.randn(1, heads, queries, width)
    k, v = (torch.randn(1, groups, length, width) for _ in range(2))
    mask = torch.zeros(queries, length)
    with torch.inference_mode():
        seconds = best(lambda: attend(q, k, v, attn_mask=mask, enable_gqa=heads != groups))
    return 2 * heads * 2 * width * queries * length / seconds
