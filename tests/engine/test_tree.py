"""I7, I8: the radix tree against a plain model of it: a set of cached prefixes.

The model holds every cached prefix as a tuple of key tokens, with the slot of its last token, who
used it, how many locks are on it, and when it was last used. It knows no nodes and no splits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from leyline.engine.tree import PUBLIC, Node, RadixTree, User, common_prefix
from leyline.lineage import mark_key

Prefix = tuple[int, ...]

USERS: list[User] = [PUBLIC, ("", "a"), ("", "b"), ("other", "a")]
# Two tokens, so that keys meet and part often, and marks on some of them.
TOKENS = st.lists(st.integers(1, 2), min_size=1, max_size=12)
MARKS = st.one_of(st.none(), st.tuples(st.integers(0, 11), st.integers(1, 2)))


def make_key(tokens: list[int], mark: tuple[int, int] | None) -> np.ndarray:
    key = np.array(tokens, dtype=np.int64)
    return key if mark is None else mark_key(key, min(mark[0], len(key)), mark[1])


@dataclass
class Row:
    slot: int
    users: set[User] = field(default_factory=set)
    locks: int = 0
    used: int = 0


class TreeAgainstSet(RuleBasedStateMachine):
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree()
        self.rows: dict[Prefix, Row] = {}
        self.now = 0
        self.next_slot = 0

    # -- the model

    def cached(self, key: np.ndarray) -> list[Prefix]:
        """The cached prefixes of a key, shortest first."""
        whole = tuple(key.tolist())
        out = []
        for n in range(1, len(whole) + 1):
            if whole[:n] not in self.rows:
                break
            out.append(whole[:n])
        return out

    def used_by(self, prefixes: list[Prefix], user: User) -> None:
        self.now += 1
        for prefix in prefixes:
            self.rows[prefix].users.add(user)
            self.rows[prefix].used = self.now

    def behind(self, prefix: Prefix) -> list[Prefix]:
        """Cached prefixes that go on from this one."""
        return [p for p in self.rows if len(p) > len(prefix) and p[: len(prefix)] == prefix]

    def drop(self, prefixes: list[Prefix]) -> list[int]:
        assert all(self.rows[p].locks == 0 for p in prefixes), "a locked row was dropped"
        slots = [self.rows.pop(p).slot for p in prefixes]
        assert all(p[:-1] in self.rows or len(p) == 1 for p in self.rows), (
            "a row without those before it"
        )
        return slots

    # -- what can happen

    @rule(tokens=TOKENS, mark=MARKS)
    def match(self, tokens: list[int], mark: tuple[int, int] | None) -> None:
        key = make_key(tokens, mark)
        found = self.tree.match(key)
        expected = self.cached(key)
        assert found.slots.tolist() == [self.rows[p].slot for p in expected]
        assert found.n == len(expected) == sum(len(node.key) for node in found.node.path())

    @rule(tokens=TOKENS, mark=MARKS, user=st.sampled_from(USERS))
    def insert(self, tokens: list[int], mark: tuple[int, int] | None, user: User) -> None:
        key = make_key(tokens, mark)
        before = self.cached(key)
        slots = np.arange(self.next_slot, self.next_slot + len(key))
        self.next_slot += len(key)
        slots[: len(before)] = [self.rows[p].slot for p in before]
        if len(before) % 2:  # the caller brings rows of its own for what is there: the tree's win
            slots[0] = 10**6 + self.next_slot
        found = self.tree.insert(key, slots, user)
        whole = tuple(key.tolist())
        for n in range(len(before) + 1, len(whole) + 1):
            self.rows[whole[:n]] = Row(int(slots[n - 1]))
        path = self.cached(key)
        self.used_by(path, user)
        assert found.slots.tolist() == [self.rows[p].slot for p in path]
        assert np.array_equal(np.concatenate([n.key for n in found.node.path()]), key)
        slots[:] = -7  # the tree keeps no hold on the caller's arrays
        key[:] = -7

    @rule(tokens=TOKENS, mark=MARKS, user=st.sampled_from(USERS))
    def use(self, tokens: list[int], mark: tuple[int, int] | None, user: User) -> None:
        key = make_key(tokens, mark)
        self.tree.use(self.tree.match(key).node, user)
        self.used_by(self.cached(key), user)

    @rule(target=locks, tokens=TOKENS, mark=MARKS)
    def lock(self, tokens: list[int], mark: tuple[int, int] | None) -> tuple[Node, list[Prefix]]:
        key = make_key(tokens, mark)
        node = self.tree.match(key).node
        self.tree.lock(node)
        path = self.cached(key)
        for prefix in path:
            self.rows[prefix].locks += 1
        return node, path

    @rule(lock=consumes(locks))
    def unlock(self, lock: tuple[Node, list[Prefix]]) -> None:
        node, path = lock
        self.tree.unlock(node)
        for prefix in path:
            self.rows[prefix].locks -= 1

    @rule(n=st.integers(0, 15))
    def evict(self, n: int) -> None:
        """Locked rows stay, no more go than were asked for, and never a row that was used after one
        that could have gone as well."""
        by_slot = {row.slot: prefix for prefix, row in self.rows.items()}
        could = [p for p, row in self.rows.items() if row.locks == 0]
        got = self.tree.evict(n).tolist()
        assert len(got) == len(set(got)) == min(n, len(could))
        dropped = [by_slot[slot] for slot in got]
        latest = max((self.rows[p].used for p in dropped), default=0)
        self.drop(dropped)
        leaves = [p for p in self.rows if not self.behind(p) and self.rows[p].locks == 0]
        assert all(self.rows[p].used >= latest for p in leaves)

    @rule(tokens=TOKENS, mark=MARKS, user=st.sampled_from(USERS), at=st.integers(0, 11))
    def take(self, tokens: list[int], mark: tuple[int, int] | None, user: User, at: int) -> None:
        key = make_key(tokens, mark)
        path = self.cached(key)
        key, at = key[: len(path)], min(at, len(path))
        tail = path[at:]
        free = (
            all(row.locks == 0 and row.users <= {user} for row in (self.rows[p] for p in tail))
            and not self.behind(tuple(key.tolist()))
            and all(len(self.behind(p)) == len(path) - len(p) for p in tail)
        )
        node = self.tree.match(key).node
        if not path:
            return
        if tail and at and not any(b not in path for b in self.behind(path[at - 1])):
            self.tree.match(key[:at])  # callers hold a node that ends at `at`
        answer = self.tree.can_take(node, at, user)
        assert not answer or free, "rows would be taken that are not the user's alone"
        self.tree.match(key[:at])  # a cut at `at`: now the answer is exact
        assert self.tree.can_take(node, at, user) == (free if tail else not self.behind(path[-1]))
        if free and tail:
            taken = self.tree.take(key, at, user)
            assert taken.tolist() == [self.rows[p].slot for p in tail]
            self.drop(tail)

    @rule(tokens=TOKENS, mark=MARKS, user=st.sampled_from(USERS[1:]))
    def forget(self, tokens: list[int], mark: tuple[int, int] | None, user: User) -> None:
        """Gone is what no other user, lock or kept row needs. Rows of others stay and are counted;
        of the user's, only those on the path of `keep` and those under a lock."""
        key = make_key(tokens, mark)
        keep = set(self.cached(key))
        mine = [p for p, row in self.rows.items() if user in row.users and p not in keep]
        slots, shared = self.tree.forget(user, key)
        dropped: set[Prefix] = set()
        for prefix in sorted(mine, key=len, reverse=True):
            row = self.rows[prefix]
            if row.users == {user} and row.locks == 0 and not set(self.behind(prefix)) - dropped:
                dropped.add(prefix)
        assert sorted(slots.tolist()) == sorted(self.rows[p].slot for p in dropped)
        assert shared == sum(self.rows[p].users != {user} for p in mine)
        self.drop(sorted(dropped))
        for prefix in set(mine) - dropped:
            if self.rows[prefix].users != {user}:
                self.rows[prefix].users.discard(user)

    @rule()
    def reset(self) -> None:
        if any(row.locks for row in self.rows.values()):
            return
        self.tree.reset()
        self.rows.clear()

    def nodes(self) -> list[tuple[Node, list[Prefix]]]:
        out = []
        for node in self.tree.nodes():
            whole = tuple(np.concatenate([n.key for n in node.path()]).tolist())
            n = len(node.key)
            out.append((node, [whole[: len(whole) - i] for i in range(n)][::-1]))
        return out

    @invariant()
    def agrees(self) -> None:
        """The tree holds exactly the model's rows, each once, with their slots, locks and users."""
        seen: list[Prefix] = []
        for node, prefixes in self.nodes():
            assert len(node.key) == len(node.slots) > 0
            for prefix, slot in zip(prefixes, node.slots.tolist(), strict=True):
                row = self.rows[prefix]
                assert (slot, node.locks, node.used) == (row.slot, row.locks, row.used)
                assert node.users == row.users
            seen += prefixes
            assert node.parent is not None
            assert node.parent.children[int(node.key[0])] is node
        assert len(seen) == len(set(seen)) == len(self.rows) == self.tree.total
        locked = sum(row.locks > 0 for row in self.rows.values())
        assert (self.tree.locked, self.tree.evictable) == (locked, len(self.rows) - locked)


TestTree = TreeAgainstSet.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_mark_keeps_a_branch_apart() -> None:
    """I1, I8: a key without the mark, or with another one, ends where the mark begins; what is
    before it is shared."""
    tree = RadixTree()
    tokens = np.arange(10)
    marked = mark_key(tokens, 4, serial=1)
    tree.insert(marked, np.arange(10), ("", "a"))
    assert tree.match(marked).n == 10
    assert tree.match(tokens).n == 4
    assert tree.match(mark_key(tokens, 4, serial=2)).n == 4
    tree.insert(tokens, np.concatenate([np.arange(4), np.arange(20, 26)]), PUBLIC)
    assert tree.match(tokens).slots.tolist() == [0, 1, 2, 3, *range(20, 26)]
    assert tree.match(marked).slots.tolist() == list(range(10))


def test_least_recently_used_goes_first() -> None:
    tree = RadixTree()
    keys = [np.array([i, 50, 51]) for i in range(4)]
    for i, key in enumerate(keys):
        tree.insert(key, np.arange(3 * i, 3 * i + 3), PUBLIC)
    tree.use(tree.match(keys[0]).node, PUBLIC)
    assert sorted(tree.evict(4).tolist()) == [3, 4, 5, 8]  # all of key 1 and the end of key 2
    assert [tree.match(key).n for key in keys] == [3, 0, 2, 3]


def test_common_prefix() -> None:
    a = np.array([1, 2, 3])
    assert common_prefix(a, a) == 3
    assert common_prefix(a, np.array([1, 2])) == 2
    assert common_prefix(a, np.array([1, 5, 3])) == 1
    assert common_prefix(a, np.array([5])) == common_prefix(a[:0], a) == 0
