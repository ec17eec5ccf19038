"""I7: the slot allocator against a set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from leyline.engine.slots import NO_SLOTS, SlotPool, as_run


class PoolAgainstSet(RuleBasedStateMachine):
    """I7: no slot is handed out twice, none is lost, and a refusal changes nothing."""

    @initialize(capacity=st.integers(1, 70), headroom=st.integers(0, 20))
    def start(self, capacity: int, headroom: int) -> None:
        self.pool = SlotPool(capacity, headroom)
        self.free = set(range(capacity))
        self.held: list[np.ndarray] = []

    @rule(n=st.integers(0, 30), after=st.integers(-1, 69))
    def alloc(self, n: int, after: int) -> None:
        after = min(after, self.pool.capacity - 1)
        got = self.pool.alloc(n, after)
        if n > len(self.free):
            assert got is None
            return
        assert got is not None and got.dtype == np.int64 and len(got) == n
        named = set(got.tolist())
        assert len(named) == n and named <= self.free
        wished = range(after + 1, after + 1 + n)
        if n and after >= 0 and set(wished) <= self.free:
            assert got.tolist() == list(wished), "a sequence could have grown in place"
        if n and any(set(range(i, i + n)) <= self.free for i in range(self.pool.capacity)):
            assert as_run(got) is not None, "there was a run for it"
        self.free -= named
        self.held.append(got)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if not self.held:
            return
        slots = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        cut = data.draw(st.integers(0, len(slots)))
        order = data.draw(st.permutations(range(len(slots))))
        shuffled = slots[np.array(order, dtype=np.int64)]
        self.pool.free(shuffled[:cut])
        self.free |= set(shuffled[:cut].tolist())
        if cut < len(slots):
            self.held.append(shuffled[cut:])

    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        """A bug of the caller raises, and changes nothing."""
        wrong = list(self.free)[:1] or [s for slots in self.held for s in slots.tolist()][:1] * 2
        if self.held and self.free and data.draw(st.booleans()):
            wrong = [int(self.held[0][0])] * 2 if len(self.held[0]) else wrong
        with pytest.raises(RuntimeError, match="twice"):
            self.pool.free(np.array(wrong, dtype=np.int64))

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.free, self.held = set(range(self.pool.capacity)), []

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert self.pool.free_count == len(self.free)
        assert self.pool.free_slots().tolist() == sorted(self.free)
        assert len(self.free) + sum(map(len, self.held)) == self.pool.capacity


TestPool = PoolAgainstSet.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 12), max_size=6))
def test_as_run(numbers: list[int]) -> None:
    """The slice names exactly the slots, in order; there is none for anything else."""
    run = as_run(np.array(numbers, dtype=np.int64))
    is_run = bool(numbers) and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert (run is not None) == is_run
    if run is not None:
        assert list(range(*run.indices(100))) == numbers


def test_small_things() -> None:
    with pytest.raises(ValueError, match="capacity: 0"):
        SlotPool(0)
    pool = SlotPool(3)
    pool.free(NO_SLOTS)
    nothing = pool.alloc(0)
    assert nothing is not None and len(nothing) == 0
    assert pool.alloc(4) is None and pool.free_count == 3
    everything = pool.alloc(3)
    assert everything is not None and sorted(everything.tolist()) == [0, 1, 2]


def test_headroom_in_front_of_a_new_run() -> None:
    """The sequence in front of a new run can go on growing in place."""
    pool = SlotPool(1000, headroom=100)
    first = pool.alloc(50)
    second = pool.alloc(50)
    assert first is not None and second is not None
    more = pool.alloc(60, after=int(first[-1]))
    assert more is not None and as_run(np.concatenate([first, more])) is not None
