"""One request of a session on its way, without a server: what enters when, the key, the provenance
and the report (I6, I8), over random edits, random losses and random interruptions."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.channel import Channel, Fallback
from leyline.directive import Directive, Edits, Mode
from leyline.lineage import MARK_BITS, Lineage, Span, spans_after
from leyline.plan import Compute, Keep
from leyline.sglang.turn import Turn, marks_of

SERIAL = 7


@st.composite
def edits_of(draw: st.DrawFn, length: int) -> Edits:
    count = draw(st.integers(0, 4))
    points = sorted(draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count)))
    edits: list[Directive] = []
    for start, end in zip(points[::2], points[1::2], strict=True):
        if start == end and edits and edits[-1].start == edits[-1].end == start:
            continue
        new = tuple(range(900, 900 + draw(st.integers(int(start == end), 5))))
        mode = draw(st.sampled_from([Mode.AMORTIZE, Mode.REPAIR]))
        repair = draw(st.integers(0, 6)) if mode == Mode.REPAIR else 0
        edits.append(Directive(start, end, new, mode, repair))
    at_end = edits and edits[-1].start == edits[-1].end == length
    if not at_end:
        edits.append(Directive(length, length, tuple(range(950, 950 + draw(st.integers(1, 4))))))
    return Edits.of(edits, length)


Row = tuple[bool, int]
"""Whether a row is what a prefill gives, and how often it was turned."""


def rows_of(spans: tuple[Span, ...]) -> list[Row]:
    return [(span.exact, span.rotations) for span in spans for _ in range(span.n)]


@dataclass
class Done:
    """A turn carried out as the scheduler does it: from front to back, up to some token."""

    turn: Turn
    source: Lineage
    entered: list[Keep]
    end: int

    def rows(self) -> list[Row]:
        """Row by row, from what was done alone."""
        reuse = self.turn.reuse
        before = rows_of(self.source.spans)
        own = before if reuse.from_source else [(True, 0)] * len(before)
        rows = own[: reuse.shared] if reuse.from_source else [(True, 0)] * reuse.shared
        for at in range(len(rows), self.end):
            keep = next((k for k in self.entered if k.dst <= at < k.dst + k.n), None)
            exact = keep is None and all(row[0] for row in rows)
            turned = 0
            if keep is not None:
                turned = before[at - keep.dst + keep.src][1] + (keep.src != keep.dst)
            rows.append((exact, turned))
        return rows[: self.end]


@st.composite
def carried_out(draw: st.DrawFn, source: Lineage) -> Done:
    page = draw(st.sampled_from([1, 1, 4]))
    edits = draw(edits_of(len(source.tokens)))
    length = edits.target_length
    held = len(source.tokens) // page * page
    cached = draw(st.just(held) | st.integers(0, held // page).map(lambda n: n * page))
    exact = draw(st.just(0) | st.integers(0, (length - 1) // page).map(lambda n: n * page))
    turn = Turn(Channel("s", "o"), 1)
    turn.plan_from(source, held, edits, exact=exact, source=cached, page=page)
    check_plan(turn, edits, page, cached)
    entered: list[Keep] = []
    at, end = turn.reuse.shared, length
    stop = draw(st.none() | st.integers(at, length))
    serial = SERIAL
    while True:
        run = turn.run_at(at)
        assert all(keep.dst >= at for keep in run)
        if at == turn.reuse.shared:
            assert turn.promised == sum(keep.n for keep in run)
        if run:
            reason = draw(st.sampled_from([None, None, None, Fallback.NO_ROOM]))
            if reason is None:
                turn.entered(run, serial)
                entered += run
                at += sum(keep.n for keep in run)
                serial += 1
            else:
                turn.skip(run, reason)
                assert turn.reuse.fallback == reason
            assert not turn.run_at(run[0].dst)
        following = turn.next_run(at)
        if following is None or (stop is not None and following > stop):
            break
        assert following > at
        at = following
    if stop is not None:
        end = max(at, stop)
    return Done(turn, source, entered, end)


def check_plan(turn: Turn, edits: Edits, page: int, cached: int) -> None:
    """Shared rows are whole pages, kept ones are cached and hold the tokens they stand for."""
    reuse = turn.reuse
    assert reuse.shared % page == 0 and reuse.shared < edits.target_length
    source = np.arange(edits.source_length)
    origin = edits.apply(source)
    for keep in reuse.moved:
        assert keep.src + keep.n <= cached
        # Replacements are above 900: what is kept must be the source's own token.
        assert origin[keep.dst : keep.dst + keep.n].tolist() == list(
            range(keep.src, keep.src + keep.n)
        )
    assert sum(s.n for s in reuse.plan.segments) == edits.target_length


def first_lineage(n: int) -> Lineage:
    tokens = np.arange(100, 100 + n)
    return Lineage("o", "s", tokens, tokens.copy(), (Span(0, n, True, 0),))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 60))
def test_turns(data: st.DataObject, length: int) -> None:
    """A chain of turns: spans are row by row what was done; the key is the tokens with one mark, on
    the first amortized row (I8); the report adds up whatever was interrupted (I6)."""
    source = first_lineage(length)
    for _ in range(4):
        done = data.draw(carried_out(source))
        turn = done.turn
        tokens = np.arange(done.end) + 100
        lineage = turn.lineage(tokens, source)
        rows = done.rows()
        assert rows_of(lineage.spans) == rows
        assert sum(span.n for span in lineage.spans) == done.end
        check_key(turn, lineage, rows)
        check_report(turn, done)
        edits = len(turn.count(turn.reuse.plan.target_length).edits)
        assert lineage.edits == source.edits + edits and bool(edits) <= bool(done.entered)
        again = turn.lineage(tokens, lineage)
        assert again.edits == lineage.edits, "counted once"
        if done.end == 0:
            break
        source = lineage


def check_key(turn: Turn, lineage: Lineage, rows: list[Row]) -> None:
    first = next((at for at, (exact, _) in enumerate(rows) if not exact), None)
    marks = marks_of(lineage.key)
    assert min(marks, default=None) == first
    assert np.array_equal(lineage.key & ((1 << MARK_BITS) - 1), lineage.tokens)
    tokens = array("q", lineage.tokens.tolist())
    key = turn.key(tokens)
    assert key.tolist() == lineage.key.tolist()
    assert tokens.tolist() == lineage.tokens.tolist(), "the prompt itself was changed"
    cut = len(tokens) // 2
    assert turn.key(tokens[:cut]).tolist() == key.tolist()[:cut]


def check_report(turn: Turn, done: Done) -> None:
    prompt = turn.reuse.plan.target_length
    report = turn.count(prompt)
    assert report.prompt == report.shared + report.moved + report.computed == prompt
    assert report.moved == sum(keep.n for keep in done.entered)
    assert report.shared == turn.reuse.shared and report.cached < prompt
    if not done.entered:
        assert report.edits == ()
    for edit in report.edits:
        assert any(keep.src >= edit.end for keep in done.entered)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(5, 60))
def test_executed_plan(data: st.DataObject, length: int) -> None:
    """Carried out in whole and without a loss, the spans are those of the plan."""
    source = first_lineage(length)
    for serial in (SERIAL, SERIAL + 1):
        turn = Turn(Channel("s", "o"), 1)
        edits = data.draw(edits_of(len(source.tokens)))
        turn.plan_from(
            source, len(source.tokens), edits, exact=0, source=len(source.tokens), page=1
        )
        for keep in turn.reuse.moved:
            turn.entered((keep,), serial)
        tokens = np.arange(edits.target_length) + 100
        lineage = turn.lineage(tokens)
        assert lineage.spans == spans_after(turn.reuse.plan, source.spans)
        assert lineage.exact == min(turn.reuse.plan.amortized_from, edits.target_length)
        source = lineage


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(5, 60), st.integers(0, 100))
def test_give_way(data: st.DataObject, length: int, cached: int) -> None:
    """I6: a request put back into the queue after rows have entered is counted once, with no more
    than SGLang had counted; nothing enters it again."""
    done = data.draw(carried_out(first_lineage(length)))
    turn = done.turn
    prompt = turn.reuse.plan.target_length
    turn.report = turn.count(prompt)
    cached = turn.report.shared + min(cached, turn.report.moved)
    turn.give_way(cached)
    report = turn.report
    assert report.prompt == report.shared + report.moved + report.computed == prompt
    assert report.cached == cached
    turn.give_way(0)
    assert turn.report is report and turn.count(prompt + 5) is report
    turn.resumed = True
    assert turn.to_come == () and turn.next_run(0) is None and turn.run_at(0) == ()
    assert rows_of(turn.lineage(np.arange(done.end)).spans) == done.rows()


def test_one_mark() -> None:
    """I8: of several runs only the first one's first row is marked, with that run's serial."""
    edits = Edits.of([Directive(10, 12), Directive(20, 21, (5,)), Directive(40, 40, (6,))], 40)
    turn = Turn(Channel("s"), 1)
    turn.plan_from(first_lineage(40), 40, edits, exact=0, source=40, page=1)
    assert (turn.reuse.shared, turn.promised) == (10, 8)
    assert turn.run_at(10) == (Keep(12, 10, 8),) and turn.next_run(10) == 19
    assert turn.marks == {}
    turn.entered(turn.run_at(10), 3)
    assert turn.next_run(18) == 19
    turn.entered(turn.run_at(19), 4)
    assert turn.marks == {10: 3} and turn.to_come == ()
    assert turn.key(array("q", range(12)))[10] == 10 + (3 << MARK_BITS)


def test_skipped_rows_are_computed() -> None:
    edits = Edits.of(
        [Directive(10, 12, (5,)), Directive(20, 20, (6, 7)), Directive(30, 30, (8,))], 30
    )
    turn = Turn(Channel("s"), 1)
    turn.plan_from(first_lineage(30), 30, edits, exact=0, source=30, page=1)
    turn.skip(turn.run_at(11), Fallback.NO_ROOM)
    assert turn.reuse.plan.segments == (
        Keep(0, 0, 10),
        Compute(10, 11),
        Keep(20, 21, 10),
        Compute(31, 1),
    )
    assert turn.next_run(10) == 21


def test_without_source() -> None:
    """A first request: exact rows only. Directives without a source are said to have none."""
    for directives, fallback in ((None, None), ((Directive(1, 2),), Fallback.SOURCE_MISSING)):
        turn = Turn(Channel("s", directives=directives), 1)
        turn.plan_without_source(30, 8)
        assert (turn.reuse.fallback, turn.promised, turn.to_come) == (fallback, 0, ())
        report = turn.count(30)
        assert (report.shared, report.moved, report.computed) == (8, 0, 22)
        lineage = turn.lineage(np.arange(30))
        assert lineage.spans == (Span(0, 30, True, 0),) and not marks_of(lineage.key)


@pytest.mark.parametrize("repair", [0, 4])
def test_directives_are_for_the_source_they_were_made_for(repair: int) -> None:
    """I6: where another lineage has come in between, edits are derived; none is applied twice."""
    mode = Mode.REPAIR if repair else Mode.AMORTIZE
    directive = Directive(10, 30, (7,), mode, repair)
    turn = Turn(Channel("s", directives=(directive,)), 1, ahead=True)
    source = first_lineage(80)
    prompt = turn.make_prompt(source, 500)
    assert prompt.tolist() == [*range(100, 110), 7, *range(130, 180)]
    assert list(turn.derive(source, prompt, 500)) == [directive]
    tokens = prompt[:-10]
    other = Lineage("o", "s", tokens, tokens.copy(), (Span(0, len(tokens), True, 0),))
    edits = turn.derive(other, prompt, 500)
    assert edits.apply(other.tokens).tolist() == prompt.tolist()
    assert [(e.start, e.end, len(e.replacement)) for e in edits] == [(51, 51, 10)]
    assert list(turn.derive(source, prompt, 500)) != [], "and back: from that source, once more"
    earlier = np.concatenate([tokens[:5], [9, 9], tokens[5:]])
    third = Lineage("o", "s", earlier, earlier.copy(), (Span(0, len(earlier), True, 0),))
    assert {e.repair for e in turn.derive(third, prompt, 500) if e.end < 60} == {repair}


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_held(n: int) -> None:
    turn = Turn(Channel("s"), 1)
    turn.plan_without_source(5, 0)
    assert sum(span.n for span in turn.lineage(np.arange(n)).spans) == n
