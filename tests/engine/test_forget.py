"""I5: FORGET means a fresh engine, and nothing that read the span is left for the session that
forgot it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import (
    ALL,
    ARCHITECTURES,
    PREFILL,
    ask,
    assert_same,
    engine,
    fresh,
    greedy,
    lineage,
    marked,
    nodes_of,
    rows_of,
    tokens_of,
)

from leyline.channel import Channel
from leyline.directive import Directive, Mode
from leyline.engine.engine import Engine
from leyline.engine.request import Delta, Request
from leyline.engine.tree import common_prefix

S = ("", "s")
FORGET: dict[str, Mode] = dict(mode=Mode.FORGET)


def zeros(made: Engine) -> tuple[int, int]:
    """How many free slots hold anything but zeros, and how many cached rows hold only zeros."""

    def count() -> tuple[int, int]:
        store = made.store
        cached = np.concatenate(
            [np.zeros(0, np.int64), *(node.slots for node in store.tree.nodes())]
        )
        in_use = torch.zeros(store.pool.capacity, dtype=torch.bool)
        for stack in store.planes.stacks:
            in_use |= (stack.rows != 0).flatten(2).any(-1).any(0)
        return int(in_use[store.pool.free_slots()].sum()), int((~in_use[cached]).sum())

    return made.call(count)


def old_sequences(made: Engine, rng: np.random.Generator, earlier_edits: int) -> list[np.ndarray]:
    """A session that is asked, edited `earlier_edits` times, and asked again; all prompts with
    their answers."""
    pool = tokens_of(rng, 400).tolist()
    prompt, pool = np.array(pool[:140]), pool[140:]
    said = [prompt]
    answer = ask(made, prompt, greedy(4), "s")
    for turn in range(earlier_edits):
        source = lineage(made).tokens
        said.append(source)
        start = 80 - 20 * turn
        prompt = np.concatenate([source[:start], pool[:3], source[start + 10 :], pool[3:9]])
        pool = pool[9:]
        answer = ask(made, prompt, greedy(4), "s")
        assert answer.report is not None and answer.report.moved
        said.append(prompt)
    said.append(lineage(made).tokens)
    return said


@pytest.mark.parametrize("earlier_edits", [0, 2])
@pytest.mark.parametrize("asked", ["explicit", "derived", "without a prompt"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_forget_is_a_fresh_engine(name: str, asked: str, earlier_edits: int) -> None:
    """I5: same tokens and log-probabilities as a prefill by Transformers; no marked row and no row
    behind the edit is left in the tree; prompts from before find what is left of the exact prefix,
    and are answered exactly."""
    rng = np.random.default_rng(earlier_edits)
    with engine(name, chunk=64) as made:
        said = old_sequences(made, rng, earlier_edits)
        source = lineage(made).tokens
        exact = lineage(made).exact
        span = Directive(30, 55, (5, 6), Mode.FORGET)
        new = [] if asked == "without a prompt" else tokens_of(rng, 9).tolist()
        target = np.concatenate([source[:30], [5, 6], source[55:], new]).astype(np.int64)
        if asked == "derived":
            answer = ask(made, target, greedy(6, ALL), "s", mode=Mode.FORGET)
        else:
            prompt = target if asked == "explicit" else None
            answer = ask(made, prompt, greedy(6, ALL), "s", directives=(span,))
        report = answer.report
        assert report is not None
        assert (report.fallback, report.moved, report.copied) == (None, 0, False)
        assert (report.prompt, report.shared) == (len(target), min(30, exact))
        assert [(e.start, e.end, e.shift, e.mode) for e in report.edits] == [
            (30, 55, -23, Mode.FORGET)
        ]
        assert report.forgotten > 80 and report.kept_by_others == 0
        assert_same(answer, fresh(name, target, answer.tokens), 1e-4)

        now = lineage(made)
        assert now.exact == len(now.tokens) and now.max_rotations == 0
        assert len(made.store.tree.match(now.key).slots) == len(now.key)
        for key, _ in nodes_of(made):
            assert not marked(key) and np.array_equal(key, now.tokens[: len(key)])
        for i, old in enumerate(said):
            left = common_prefix(old, now.tokens)
            # In FORGET mode nothing is moved: what is cached is what can be found.
            again = ask(
                made,
                old,
                greedy(2, ALL),
                "s" if i % 2 == 0 else None,
                **FORGET if i % 2 == 0 else {},
            )
            assert again.report is not None
            assert_same(again, fresh(name, old, again.tokens), 1e-4)
            if i == 0:
                assert again.report.cached == left == 30


@pytest.mark.parametrize("how", ["forget", "drop"])
def test_scrub(how: str) -> None:
    """I5: scrub zeroes every row that nobody uses: those dropped now and what earlier edits left in
    free slots. Rows in use stay bitwise."""
    rng = np.random.default_rng(3)
    other = tokens_of(rng, 50)
    with engine() as made:
        ask(made, other, session="other")
        kept = rows_of(made, other)
        said = old_sequences(made, rng, earlier_edits=2)
        assert zeros(made)[0] > 0, "nothing to scrub"
        if how == "drop":
            dropped = made.drop_session("", "s", scrub=True)
            assert dropped is not None and dropped.kept_by_others == 0
            assert made.stats().cached == len(other)
        else:
            target = np.concatenate([said[-1][:30], said[-1][60:]])
            ask(made, target, greedy(3), "s", mode=Mode.FORGET, scrub=True)
        assert zeros(made) == (0, 0)
        for (k, v), (k2, v2) in zip(kept, rows_of(made, other), strict=True):
            assert torch.equal(k, k2) and torch.equal(v, v2)


def test_without_scrub_nothing_is_zeroed() -> None:
    """The control: FORGET alone only frees."""
    with engine() as made:
        said = old_sequences(made, np.random.default_rng(3), earlier_edits=1)
        ask(made, said[-1][:20], greedy(3), "s", mode=Mode.FORGET)
        assert zeros(made)[0] > 0


@pytest.mark.parametrize("others", ["plain", "session", "owner"])
def test_rows_of_others_stay(others: str) -> None:
    """I5: rows that somebody else asked for too stay for them, bitwise, and are counted; the
    session's own go."""
    prompt = tokens_of(np.random.default_rng(4), 120)
    with engine() as made:
        if others == "plain":
            ask(made, prompt[:100])
        else:
            made.submit(
                Request(prompt[:100], PREFILL, Channel("t" if others == "session" else "s", "o"))
            ).result()
        ask(made, prompt, session="s")
        theirs = rows_of(made, prompt[:100])
        target = np.concatenate([prompt[:40], prompt[60:]])
        answer = ask(made, target, greedy(4, ALL), "s", mode=Mode.FORGET, scrub=True)
        report = answer.report
        assert report is not None
        assert (report.forgotten, report.kept_by_others) == (20, 60)
        assert_same(answer, fresh("llama", target, answer.tokens), 1e-4)
        for (k, v), (k2, v2) in zip(theirs, rows_of(made, prompt[:100]), strict=True):
            assert torch.equal(k, k2) and torch.equal(v, v2)
        for key, node in nodes_of(made):
            if S in node.users:
                assert np.array_equal(key, lineage(made).tokens[: len(key)])
        assert zeros(made) == (0, 0)


def test_a_session_pushed_out_while_it_runs() -> None:
    """I5: a session that lost its place to another while a request of it ran can still forget all
    of its rows."""
    rng = np.random.default_rng(5)
    prompt, other = tokens_of(rng, 60), tokens_of(rng, 60)
    with engine(max_sessions=1) as made:
        handle = made.submit(Request(prompt, greedy(300), Channel("s")))
        events = handle.events()
        assert isinstance([next(events), next(events)][1], Delta)
        ask(made, other, session="t")
        assert made.session("", "s") is None
        list(events)
        assert made.session("", "t") is None and made.session("", "s") is not None
        target = np.concatenate([prompt[:10], prompt[30:]])
        answer = ask(made, target, greedy(3), "s", mode=Mode.FORGET, scrub=True)
        assert answer.report is not None and answer.report.kept_by_others == 0
        assert zeros(made) == (0, 0)
        again = ask(made, prompt, PREFILL, "s", **FORGET)
        assert again.report is not None and again.report.cached == 10


def test_a_session_too_long_to_hold() -> None:
    """I5: no lineage is held, so there is nothing to splice; FORGET still drops what was cached for
    the session."""
    prompt = tokens_of(np.random.default_rng(6), 60)
    for forget in (dict(mode=Mode.FORGET), dict(directives=(Directive(10, 30, (), Mode.FORGET),))):
        with engine(max_session_tokens=50) as made:
            ask(made, prompt, session="s")
            assert made.session("", "s") is None and made.stats().cached == 60
            target = np.concatenate([prompt[:10], prompt[30:]])
            answer = ask(made, target, greedy(2), "s", **forget)
            assert answer.report is not None and answer.report.forgotten == 50
            again = ask(made, prompt, PREFILL, "s", **FORGET)
            assert again.report is not None and again.report.cached == 10


def test_forget_waits_for_what_runs() -> None:
    """I5: rows that a running request of the session is still to write are forgotten too."""
    prompt = tokens_of(np.random.default_rng(7), 60)
    target = np.concatenate([prompt[:10], prompt[30:]])
    with engine() as made:
        running = made.submit(Request(prompt, greedy(100), Channel("s")))
        forget = made.submit(
            Request(target, greedy(5, ALL), Channel("s", mode=Mode.FORGET, scrub=True))
        )
        assert len(running.result().tokens) == 100
        answer = forget.result()
        assert_same(answer, fresh("llama", target, answer.tokens), 1e-4)
        assert all(np.array_equal(k, lineage(made).tokens[: len(k)]) for k, _ in nodes_of(made))
        assert zeros(made) == (0, 0)


def test_scrub_reaches_slots_that_others_are_about_to_write() -> None:
    """I5: an edit freed rows of the span, a plain request was given their slots and is aborted
    before it wrote to them."""
    rng = np.random.default_rng(8)
    prompt, plain = tokens_of(rng, 100), tokens_of(rng, 300)
    with engine(slots=340, chunk=4) as made:
        ask(made, prompt, session="s")
        ask(made, np.concatenate([prompt[:10], prompt[60:]]), session="s")
        handle = made.submit(Request(plain, PREFILL))
        next(handle.events())
        target = np.concatenate([prompt[:10], prompt[80:]])
        forget = made.submit(Request(target, PREFILL, Channel("s", mode=Mode.FORGET, scrub=True)))
        next(forget.events())
        made.abort(handle)
        forget.result()
        list(handle.events())
        tokens = {tuple(node.key.tolist()) for _, node in nodes_of(made)}
        assert len(tokens) >= 1
        # What the aborted request did write is its own; nothing else may be left in free slots.
        leftover = zeros(made)[0]
        made.call(made.store.scrub)
        assert leftover == 0


def test_forget_what_is_unknown() -> None:
    """A first request in FORGET mode is an ordinary one."""
    prompt = tokens_of(np.random.default_rng(9), 60)
    with engine() as made:
        answer = ask(made, prompt, greedy(3, ALL), "s", mode=Mode.FORGET, scrub=True)
        assert answer.report is not None
        assert (answer.report.fallback, answer.report.computed, answer.report.forgotten) == (
            None,
            60,
            0,
        )
        assert_same(answer, fresh("llama", prompt, answer.tokens), 1e-4)
