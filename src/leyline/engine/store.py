"""Slots, tree, rows and lineages kept in step: nothing here knows of models or requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from leyline.engine.planes import Planes
from leyline.engine.slots import NO_SLOTS, SlotPool, Slots
from leyline.engine.tree import RadixTree, User
from leyline.lineage import Lineage, Lineages


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What dropping a session's rows came to: rows freed, and rows that others use too."""

    freed: int
    kept_by_others: int


class Store:
    """Everything that is cached.

    Invariant I7: pool.free_count + tree.total + the private slots of running requests = capacity.
    """

    def __init__(self, planes: Planes, lineages: Lineages) -> None:
        self.planes = planes
        self.lineages = lineages
        self.pool = SlotPool(planes.capacity)
        self.tree = RadixTree()
        self.uncomputed: Callable[[], Slots] = lambda: NO_SLOTS
        """Slots of running requests whose rows are still to be computed (the scheduler's)."""
        self.dropped: Callable[[str, str], None] = lambda owner, session: None
        """Told of each session that had to give way, expired or was dropped."""
        self._serials = itertools.count(1)

    @property
    def room(self) -> int:
        """Slots that can be had now: free ones and those of evictable rows."""
        return self.pool.free_count + self.tree.evictable

    def next_serial(self) -> int:
        """The mark of a new amortized branch."""
        return next(self._serials)

    def alloc(self, n: int, after: int = -1) -> Slots | None:
        """`n` slots, evicting if need be; None if there is no room."""
        if n > self.room:
            return None
        if n > self.pool.free_count:
            self.pool.free(self.tree.evict(n - self.pool.free_count))
        return self.pool.alloc(n, after)

    def remember(self, lineage: Lineage) -> bool:
        """Hold a session's lineage; False if it is too long to hold. Sessions that had to give way
        lose their rows."""
        try:
            dropped = self.lineages.put(lineage)
        except ValueError:
            self.lineages.drop(lineage.owner, lineage.session)
            return False
        for each in dropped:
            if (each.owner, each.session) != (lineage.owner, lineage.session):
                self._give_up(each)
        return True

    def expire(self) -> None:
        """Drop what sessions past their time have cached."""
        for each in self.lineages.expire():
            self._give_up(each)

    def forget(self, user: User, keep: np.ndarray = NO_SLOTS) -> Forgotten:
        """Free every row that only `user` used, but those on the path of the key `keep`."""
        slots, shared = self.tree.forget(user, keep)
        self.pool.free(slots)
        return Forgotten(len(slots), shared)

    def scrub(self) -> None:
        """Zero every slot that holds no row in use: also what evicted and edited rows left behind,
        and what lies where a running request is still to write."""
        self.planes.zero(np.concatenate([self.pool.free_slots(), self.uncomputed()]))

    def reset(self) -> None:
        """Forget everything. No request may be running."""
        for each in self.lineages:
            self.lineages.drop(each.owner, each.session)
            self.dropped(each.owner, each.session)
        self.tree.reset()
        self.pool.reset()

    def _give_up(self, lineage: Lineage) -> None:
        """Free the rows of a session that is held no more."""
        self.forget((lineage.owner, lineage.session))
        self.dropped(lineage.owner, lineage.session)
