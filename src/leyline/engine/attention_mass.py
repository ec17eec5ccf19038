"""What a prompt's tokens get of the model's attention, for those who ask.

The queries looked at are those of the prompt's last tokens, as SnapKV does (arXiv:2404.14469), and
of the answer's. Kernels don't give weights away, so they are computed a second time for these few.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

WINDOW = 32
"""Tokens at a prompt's end whose queries are looked at, where they are computed."""


@dataclass(eq=False)
class AttentionMass:
    """Sums over queries, heads and layers. n: tokens of the prompt."""

    n: int
    _sums: Tensor | None = field(default=None, repr=False)
    _queries: int = 0  # one for each layer

    def count(self, positions: np.ndarray) -> int:
        """How many of a chunk's last queries are looked at; positions: ascending."""
        return int((positions >= self.n - WINDOW).sum())

    def add(self, query: Tensor, key: Tensor, positions: Tensor, scaling: float | None) -> None:
        """One layer's part. query: `[1, H, q, D]`; key: `[1, Hkv, length, D]`, of positions 0 …
        length - 1; positions: of the queries, `[q]`."""
        _, heads, q, width = query.shape
        groups, length = key.shape[1], key.shape[2]
        folded = query.view(1, groups, heads // groups, q, width).float()
        scores = folded @ key[:, :, None].float().transpose(-1, -2)
        scores *= 1 / math.sqrt(width) if scaling is None else scaling
        columns = torch.arange(length, device=key.device)
        scores.masked_fill_(columns > positions[:, None], float("-inf"))
        got = scores.softmax(-1).sum((0, 1, 2, 3))[: self.n].double() / heads
        if self._sums is None:
            self._sums = torch.zeros(self.n, dtype=torch.float64, device=key.device)
        self._sums[: len(got)] += got
        self._queries += q

    def shares(self) -> np.ndarray:
        """The part of an average query's attention that went to each token, fp64 `[n]`. Together at
        most 1: the rest went to the answer."""
        if self._sums is None:
            return np.zeros(self.n)
        return (self._sums / self._queries).cpu().numpy()
