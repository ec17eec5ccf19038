"""Sessions of one scheduler: their lineages, and which cached rows are theirs alone.

Nothing here depends on wall-clock time: the ranks of a tensor-parallel server must all decide
alike.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leyline.lineage import Lineage, Lineages

if TYPE_CHECKING:
    from leyline.sglang.turn import Turn

User = tuple[str, str]
"""Owner and name of a session."""

MAX_SESSIONS = 10_000
MAX_TOKENS = 8_000_000
"""Of all lineages together; each costs 16 bytes of host memory."""
MAX_LEAVES = 256
"""Branches of one session; the oldest is dropped for a new one, so that none is ever forgotten
about."""

PUBLIC = 0
"""Requests without a session, or more than one session."""


def owner_of(extra_key: str | None, cache_salt: str | None) -> str:
    """Whose a session is: rows are found in these namespaces, so sessions live in them too."""
    return json.dumps([extra_key, cache_salt])


class Sessions:
    """Lineages, numbers and branches of the sessions that have something cached."""

    def __init__(self) -> None:
        self.lineages = Lineages(MAX_SESSIONS, MAX_TOKENS, ttl_s=math.inf)
        self._numbers: OrderedDict[User, int] = OrderedDict()
        self._leaves: dict[User, OrderedDict[int, None]] = {}
        self._running: dict[User, set[Turn]] = {}
        self.gone: list[tuple[int, list[int]]] = []
        """Numbers of sessions, and branches that they had to give up: for the cache to drop."""
        self._next_number = itertools.count(PUBLIC + 1)
        self._next_serial = itertools.count(1)

    def __bool__(self) -> bool:
        """Whether any session was ever seen."""
        return bool(self._numbers)

    def next_serial(self) -> int:
        """The mark of a new amortized branch."""
        return next(self._next_serial)

    def number(self, user: User) -> int:
        """The session's number in `Users`, drawn on first use.

        A session that comes back after many others gets a new one.
        """
        if user not in self._numbers:
            self._numbers[user] = next(self._next_number)
        self._numbers.move_to_end(user)
        if len(self._numbers) > 2 * MAX_SESSIONS:
            oldest = next(iter(self._numbers))
            self._give_up(oldest)
            del self._numbers[oldest]
        return self._numbers[user]

    def remember(self, lineage: Lineage) -> None:
        """Hold a session's lineage in place of its last one; too long a one is not held. Sessions
        that have to give way for it lose their rows."""
        try:
            dropped = self.lineages.put(lineage)
        except ValueError:
            self.lineages.drop(lineage.owner, lineage.session)
            return
        for each in dropped:
            user = (each.owner, each.session)
            if user != (lineage.owner, lineage.session):
                self._give_up(user)

    def add_leaf(self, user: User, node: int) -> None:
        """A tree node at which a branch of the session ends."""
        leaves = self._leaves.setdefault(user, OrderedDict())
        leaves[node] = None
        leaves.move_to_end(node)
        if len(leaves) > MAX_LEAVES:
            oldest, _ = leaves.popitem(last=False)
            self.gone.append((self.number(user), [oldest]))

    def began(self, turn: Turn) -> None:
        """A request of a session runs."""
        self._running.setdefault(turn.channel.user, set()).add(turn)

    def ended(self, turn: Turn) -> None:
        running = self._running.get(turn.channel.user, set())
        running.discard(turn)
        if not running:
            self._running.pop(turn.channel.user, None)

    def running(self, user: User) -> list[Turn]:
        """The session's requests that run."""
        return list(self._running.get(user, ()))

    def holds(self, user: User) -> bool:
        """Whether there is anything of the session."""
        return user in self._leaves or user in self._running or self.lineages.get(*user) is not None

    def forget(self, user: User) -> list[int]:
        """Drop the session's lineage; returns where its branches end, newest first."""
        self.lineages.drop(*user)
        return list(reversed(self._leaves.pop(user, OrderedDict())))

    def clear(self) -> None:
        """The tree was emptied. Numbers and serials go on, so that none is ever reused."""
        for each in self.lineages:
            self.lineages.drop(each.owner, each.session)
        self._leaves.clear()
        self.gone.clear()

    def _give_up(self, user: User) -> None:
        leaves = self.forget(user)
        if leaves:
            # PUBLIC where many names came while it ran: nothing is that number's alone.
            self.gone.append((self._numbers.get(user, PUBLIC), leaves))


class Users:
    """For every slot, the one session that used its row, or PUBLIC; int32 on the pool's device.

    A row that only one session used can be moved or dropped for it: nobody else loses anything.
    """

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self._of = torch.full((slots,), PUBLIC, dtype=torch.int32, device=device)

    def own(self, slots: Tensor, user: int) -> None:
        """`user` put these rows there itself."""
        self._of[slots] = user

    def use(self, slots: Tensor, user: int) -> None:
        """`user` found these rows there."""
        if user == PUBLIC:
            self._of[slots] = PUBLIC
        else:
            self._of[slots] = torch.where(self._of[slots] == user, user, PUBLIC).int()

    def inserted(self, now: Tensor, before: Tensor, user: int) -> None:
        """The tree took rows of `user` in slots `before`, or had its own, in `now`."""
        if user == PUBLIC:
            self._of[now] = PUBLIC
            return
        mine = (now == before) | (self._of[now] == user)
        self._of[now] = torch.where(mine, user, PUBLIC).int()

    def alone(self, slots: Tensor, user: int) -> bool:
        """Whether all of these rows are `user`'s alone. Waits for the device."""
        return user != PUBLIC and bool((self._of[slots] == user).all())
