"""Which rows of the planes are free: an allocator over slot numbers.

Any set of slots can hold a sequence. Contiguous runs are preferred because attention can then read
them in place, without a gather.
"""

from __future__ import annotations

import numpy as np

Slots = np.ndarray
"""Slot numbers, int64, one a token."""

NO_SLOTS: Slots = np.zeros(0, dtype=np.int64)


class SlotPool:
    """`capacity` slots, each free or in use."""

    def __init__(self, capacity: int, headroom: int = 512) -> None:
        """`headroom`: free slots left before a new run, when there is plenty, so that the sequence
        in front of it can grow in place."""
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} slots; at least 1 is needed")
        self.capacity = capacity
        self.headroom = headroom
        self._is_free = np.ones(capacity, dtype=bool)
        self.free_count = capacity

    def alloc(self, n: int, after: int = -1) -> Slots | None:
        """`n` slots, or None (and nothing changed) when fewer are free.

        after: a slot that the new ones should follow directly, if they can.
        """
        if n > self.free_count:
            return None
        slots = self._choose(n, after)
        self._is_free[slots] = False
        self.free_count -= n
        return slots

    def _choose(self, n: int, after: int) -> Slots:
        if n == 0:
            return NO_SLOTS
        first = after + 1
        if after >= 0 and first + n <= self.capacity and self._is_free[first : first + n].all():
            return np.arange(first, first + n, dtype=np.int64)
        edges = np.flatnonzero(np.diff(self._is_free, prepend=False, append=False))
        starts, lengths = edges[::2], edges[1::2] - edges[::2]
        longest = int(lengths.argmax())
        spare = int(lengths[longest]) - n
        if spare < 0:
            return np.flatnonzero(self._is_free)[:n].astype(np.int64)
        start = int(starts[longest])
        if start > 0:
            start += min(spare // 2, self.headroom)
        return np.arange(start, start + n, dtype=np.int64)

    def free(self, slots: Slots) -> None:
        """Give slots back. A slot that is free already, or named twice, is a bug and raises."""
        if len(slots) == 0:
            return
        if self._is_free[slots].any() or len(np.unique(slots)) != len(slots):
            raise RuntimeError("slots freed twice")
        self._is_free[slots] = True
        self.free_count += len(slots)

    def free_slots(self) -> Slots:
        """All free slots, ascending."""
        return np.flatnonzero(self._is_free).astype(np.int64)

    def reset(self) -> None:
        """Everything free again."""
        self._is_free[:] = True
        self.free_count = self.capacity


def as_run(slots: Slots) -> slice | None:
    """The slice that equals `slots` when they are one ascending run, else None."""
    if len(slots) == 0:
        return None
    first = int(slots[0])
    if int(slots[-1]) - first != len(slots) - 1 or (np.diff(slots) != 1).any():
        return None
    return slice(first, first + len(slots))
