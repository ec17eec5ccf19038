"""A radix tree over slots: which cached rows continue which tokens.

A key is a token sequence in which the first amortized row carries a mark (`leyline.lineage`). A
plain request's key has no mark, so it cannot walk into an amortized branch (I1, I8), while the
exact rows before the mark are shared by everybody.

Every node remembers who used it: session names, or `PUBLIC` for requests without one. Rows that
only one session used may be moved or forgotten; others' rows may not.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from leyline.engine.slots import NO_SLOTS, Slots

User = Hashable
PUBLIC: User = None
"""The user of requests that name no session."""


class Node:
    """A run of tokens and their slots. Compared by identity."""

    __slots__ = ("children", "key", "locks", "parent", "slots", "used", "users")

    def __init__(self, key: np.ndarray, slots: Slots, parent: Node | None) -> None:
        self.key = key
        self.slots = slots
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.used = 0
        self.users: set[User] = set()

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a key: it ends exactly at the end of `node`."""

    node: Node
    slots: Slots

    @property
    def n(self) -> int:
        """Tokens matched."""
        return len(self.slots)


class RadixTree:
    """Cached rows by key. It hands out and takes in slot numbers; it frees none itself."""

    def __init__(self) -> None:
        self._clock = itertools.count(1)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.root = Node(NO_SLOTS, NO_SLOTS, None)
        self.total = 0
        self.locked = 0

    @property
    def evictable(self) -> int:
        """Rows that no running request holds."""
        return self.total - self.locked

    def match(self, key: np.ndarray) -> Match:
        """Walk as far as `key` is cached. Splits the last node where the match ends inside it."""
        node, at, found = self.root, 0, []
        while at < len(key):
            child = node.children.get(int(key[at]))
            if child is None:
                break
            n = common_prefix(child.key, key[at:])
            if n < len(child.key):
                child = self._split(child, n)
            found.append(child.slots)
            node, at = child, at + n
            if n < len(child.key):
                break
        return Match(node, np.concatenate(found) if found else NO_SLOTS)

    def use(self, node: Node, user: User) -> None:
        """Note that `user` reads the rows down to `node`."""
        now = next(self._clock)
        for each in node.path():
            each.used = now
            each.users.add(user)

    def insert(self, key: np.ndarray, slots: Slots, user: User) -> Match:
        """Cache `slots` under `key`. Where rows for a prefix of it are there already, they win:
        the match returned has the tree's slots for the whole key."""
        found = self.match(key)
        node = found.node
        if found.n < len(key):
            rest = Node(key[found.n :].copy(), slots[found.n :].copy(), node)
            node.children[int(rest.key[0])] = rest
            self.total += len(rest.key)
            node = rest
        self.use(node, user)
        return Match(node, np.concatenate([found.slots, slots[found.n :]]))

    def lock(self, node: Node) -> None:
        """Keep the rows down to `node` from being evicted or moved."""
        for each in node.path():
            if each.locks == 0:
                self.locked += len(each.key)
            each.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        for each in node.path():
            each.locks -= 1
            if each.locks == 0:
                self.locked -= len(each.key)

    def evict(self, n: int) -> Slots:
        """Drop least recently used leaves until `n` rows are dropped or all that is left is locked.
        Returns the slots dropped: whole nodes, but for the last, which only loses its end."""
        order = itertools.count()
        heap = [
            (node.used, next(order), node)
            for node in self.nodes()
            if not node.children and node.locks == 0
        ]
        heapq.heapify(heap)
        dropped, missing = [NO_SLOTS], n
        while missing > 0 and heap:
            node = heapq.heappop(heap)[2]
            if len(node.key) > missing:
                self._split(node, len(node.key) - missing)
            missing -= len(node.key)
            dropped.append(node.slots)
            parent = self._remove(node)
            if parent.parent is not None and not parent.children and parent.locks == 0:
                heapq.heappush(heap, (parent.used, next(order), parent))
        return np.concatenate(dropped)

    def can_take(self, node: Node, at: int, user: User) -> bool:
        """Whether the rows from position `at` to the end of `node` are nobody else's: unlocked,
        used by no other, and with no other branch behind them."""
        if node.children:
            return False
        end = sum(len(each.key) for each in node.path())
        while node.parent is not None and end > at:
            if node.locks or not node.users <= {user} or len(node.children) > 1:
                return False
            end -= len(node.key)
            node = node.parent
        return True

    def take(self, key: np.ndarray, at: int, user: User) -> Slots:
        """Take the rows of `key[at:]` out of the tree, to be moved. `can_take` must hold.
        Returns their slots, which are the caller's from now on."""
        node = self.match(key).node
        self.match(key[:at])  # splits at `at`
        taken = [NO_SLOTS]
        end = len(key)
        while end > at:
            assert not node.children and node.locks == 0 and node.users <= {user}
            taken.append(node.slots)
            end -= len(node.key)
            node = self._remove(node)
        return np.concatenate(taken[::-1])

    def forget(self, user: User, keep: np.ndarray) -> tuple[Slots, int]:
        """Take `user` off every row that is not on the path of `keep`, and drop the rows that had
        no other user. Returns (slots dropped, rows that stay because others use them too).

        Rows that a running request of `user` holds stay, and stay `user`'s.
        """
        kept = set(self.match(keep).node.path())
        mine = [node for node in self.nodes() if user in node.users and node not in kept]
        dropped, shared = [NO_SLOTS], 0
        for node in reversed(mine):  # children come after their parents in `nodes`
            if node.users != {user}:
                node.users.discard(user)
                shared += len(node.key)
            elif not node.children and node.locks == 0:
                dropped.append(node.slots)
                self._remove(node)
        return np.concatenate(dropped), shared

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _split(self, node: Node, n: int) -> Node:
        """Cut `node` after `n` tokens; returns the new upper part."""
        assert node.parent is not None and 0 < n < len(node.key)
        upper = Node(node.key[:n], node.slots[:n], node.parent)
        upper.locks, upper.used, upper.users = node.locks, node.used, set(node.users)
        upper.children[int(node.key[n])] = node
        node.parent.children[int(upper.key[0])] = upper
        node.parent, node.key, node.slots = upper, node.key[n:], node.slots[n:]
        return upper

    def _remove(self, node: Node) -> Node:
        assert node.parent is not None and not node.children and node.locks == 0
        del node.parent.children[int(node.key[0])]
        self.total -= len(node.key)
        return node.parent


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements of `a` and `b` are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n
