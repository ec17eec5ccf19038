"""I6: what can't be spliced is prefilled, and the report says why; strict refuses it and changes
nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from helpers import (
    ALL,
    PREFILL,
    ask,
    assert_same,
    assert_unchanged,
    check_slots,
    engine,
    fresh,
    generated,
    greedy,
    lineage,
    plain_model,
    reference,
    rows_of,
    segments,
    session_rows,
    snapshot,
    tokens_of,
)

from leyline.channel import Channel, EngineError, Fallback, StrictFallback
from leyline.directive import Directive, DirectiveError, Mode
from leyline.engine import scheduler
from leyline.engine.engine import Engine
from leyline.engine.request import PromptTooLong, Request

RNG = np.random.default_rng(0)
TOKENS = tokens_of(RNG, 500)
SOURCE, OTHER = TOKENS[:160], TOKENS[160:460]
EDIT = (Directive(40, 70, (7, 8)),)
TARGET = np.concatenate([SOURCE[:40], [7, 8], SOURCE[70:], TOKENS[470:480]])


def refused(made: Engine, prompt: np.ndarray | None, reason: Fallback, **channel: Any) -> None:
    """strict: an error with the reason, and nothing is changed."""
    before = snapshot(made)
    with pytest.raises(StrictFallback, match="strict") as caught:
        ask(made, prompt, greedy(4), "s", strict=True, **channel)
    assert caught.value.reason == reason
    assert_unchanged(before, snapshot(made))


def served(made: Engine, reason: Fallback | None, **channel: Any) -> None:
    """The answer of a fresh engine, and the reason."""
    answer = ask(made, TARGET, greedy(4, ALL), "s", **channel)
    assert answer.report is not None
    assert (answer.report.fallback, answer.report.moved) == (reason, 0)
    assert answer.report.edits == ()
    assert_same(answer, fresh("llama", TARGET, answer.tokens), 1e-4)


def test_source_missing() -> None:
    """Explicit edits of a session that nobody knows: prefilled; without a prompt there is nothing
    to answer."""
    with engine() as made:
        refused(made, TARGET, Fallback.SOURCE_MISSING, directives=EDIT)
        before = snapshot(made)
        with pytest.raises(EngineError, match="no cached sequence") as caught:
            ask(made, None, PREFILL, "s", directives=EDIT)
        assert caught.value.reason == Fallback.SOURCE_MISSING
        assert_unchanged(before, snapshot(made))
        served(made, Fallback.SOURCE_MISSING, directives=EDIT)


def test_a_first_request_is_no_fallback() -> None:
    """Without explicit edits an unknown session is simply new, also with strict."""
    with engine() as made:
        served(made, None, strict=True)


def test_expired() -> None:
    """A session past its time is unknown, and its rows are gone."""
    with engine(session_ttl_s=100.0) as made:
        ask(made, SOURCE, session="s")
        made.call(lambda: setattr(made.store.lineages, "_clock", lambda: 1e12))
        ask(made, OTHER[:5])
        assert made.session("", "s") is None and made.stats().cached == 5
        served(made, Fallback.SOURCE_MISSING, directives=EDIT)


@pytest.mark.parametrize("asked", ["explicit", "derived"])
def test_evicted(asked: str) -> None:
    """All rows of the source are gone."""
    channel = dict(directives=EDIT) if asked == "explicit" else {}
    with engine(slots=300, max_tokens=300) as made:
        ask(made, SOURCE, session="s")
        ask(made, OTHER[:300])
        assert made.stats().free == 0
        refused(made, TARGET, Fallback.SOURCE_MISSING, **channel)
        served(made, Fallback.SOURCE_MISSING, **channel)


@pytest.mark.parametrize("left", [150, 100, 71, 70, 45])
@pytest.mark.parametrize("asked", ["explicit", "derived"])
def test_partly_evicted(asked: str, left: int) -> None:
    """The last rows of the source are gone: those that are left are spliced, the others computed
    behind them."""
    channel = dict(directives=EDIT) if asked == "explicit" else {}
    with engine(slots=400) as made:
        ask(made, SOURCE, session="s")
        made.call(lambda: made.store.pool.free(made.store.tree.evict(len(SOURCE) - left)))
        view = made.session("", "s")
        assert view is not None and (view.cached, view.tokens) == (left, 160)
        before = rows_of(made, lineage(made).key[:left])
        refused(made, TARGET, Fallback.SOURCE_PARTLY_EVICTED, **channel)
        answer = ask(made, TARGET, greedy(6, ALL), "s", **channel)
        report = answer.report
        assert report is not None
        assert report.fallback == Fallback.SOURCE_PARTLY_EVICTED
        assert (report.shared, report.moved) == (40, max(0, left - 70))
        plan = segments(160, EDIT, 10, available=left)
        tokens = np.concatenate([TARGET, answer.tokens[:-1]])
        expected = reference("llama", before, plan, tokens, model=plain_model("llama"))
        assert_same(answer, expected, 1e-4)
        if left <= 70:
            assert_same(answer, fresh("llama", TARGET, answer.tokens), 1e-4)
            assert lineage(made).exact == len(lineage(made).tokens)


def test_an_edit_behind_which_nothing_was_kept_needs_nothing() -> None:
    """Rows that the plan would not keep may be gone: no fallback."""
    with engine() as made:
        ask(made, SOURCE, session="s")
        made.call(lambda: made.store.pool.free(made.store.tree.evict(100)))
        target = np.concatenate([SOURCE[:50], OTHER[:20]])
        answer = ask(made, target, greedy(3, ALL), "s", strict=True)
        assert answer.report is not None and (answer.report.fallback, answer.report.shared) == (
            None,
            50,
        )
        assert_same(answer, fresh("llama", target, answer.tokens), 1e-4)


def test_no_room_for_a_copy() -> None:
    """The source is somebody else's too, and there is no room for a second one."""
    with engine(slots=220) as made:
        ask(made, SOURCE)
        ask(made, SOURCE, session="s")
        refused(made, TARGET, Fallback.NO_ROOM)
        refused(made, TARGET, Fallback.NO_ROOM, directives=EDIT)
        served(made, Fallback.NO_ROOM, directives=EDIT)


def test_a_copy_evicts_others() -> None:
    """I4: making room for a copy never evicts the rows that are to be copied, though they are the
    least recently used."""
    with engine(slots=420) as made:
        ask(made, SOURCE)
        ask(made, SOURCE, session="s")
        before = session_rows(made)
        ask(made, OTHER[:240])
        assert made.stats().free == 20
        answer = ask(made, TARGET, greedy(4, ALL), "s", strict=True)
        assert answer.report is not None and (answer.report.copied, answer.report.moved) == (
            True,
            90,
        )
        plan = segments(160, EDIT, 10)
        tokens = np.concatenate([TARGET, answer.tokens[:-1]])
        expected = reference("llama", before, plan, tokens, model=plain_model("llama"))
        assert_same(answer, expected, 1e-4)
        # Once copied it is as good as any other: what is computed afterwards may push its end out.
        computed = 12 + len(answer.tokens) - 1
        assert made.store.tree.match(SOURCE).n >= 160 - computed


def test_room_for_a_move() -> None:
    """The control: alone with its rows the same edit fits into the same slots, without a second
    copy."""
    with engine(slots=220) as made:
        ask(made, SOURCE, session="s")
        before = session_rows(made)
        answer = ask(made, TARGET, greedy(4, ALL), "s", strict=True)
        assert answer.report is not None and (answer.report.fallback, answer.report.moved) == (
            None,
            90,
        )
        plan = segments(160, EDIT, 10)
        tokens = np.concatenate([TARGET, answer.tokens[:-1]])
        assert_same(
            answer, reference("llama", before, plan, tokens, model=plain_model("llama")), 1e-4
        )


def test_no_room_while_others_run() -> None:
    """A copy that finds no room while a request runs waits for it instead of falling back."""
    with engine(slots=330) as made:
        ask(made, SOURCE)
        ask(made, SOURCE, session="s")
        running = made.submit(Request(OTHER[:40], greedy(60)))
        next(running.events())
        answer = ask(made, TARGET, greedy(4), "s")
        assert answer.report is not None
        assert (answer.report.fallback, answer.report.copied) == (None, True)
        list(running.events())


def test_switched_off() -> None:
    """An engine without directives serves sessions as plain requests, and holds none."""
    with engine(directives=False) as made:
        ask(made, SOURCE, session="s")
        refused(made, TARGET, Fallback.SWITCHED_OFF)
        served(made, Fallback.SWITCHED_OFF, directives=EDIT)
        served(made, Fallback.SWITCHED_OFF, mode=Mode.FORGET)
        assert made.stats().sessions == 0
        again = ask(made, TARGET)
        assert again.report is not None and again.report.shared == len(TARGET) - 1


def test_too_long() -> None:
    """An edited prompt over the limit is refused, and nothing is changed."""
    with engine(max_tokens=200) as made:
        ask(made, SOURCE, session="s")
        before = snapshot(made)
        grown = (Directive(10, 12, tuple(OTHER[:60].tolist())),)
        with pytest.raises(PromptTooLong, match="218"):
            ask(made, None, greedy(1), "s", directives=grown)
        with pytest.raises(PromptTooLong):
            ask(made, OTHER[:201], PREFILL, "s")
        with pytest.raises(PromptTooLong):
            ask(made, SOURCE, greedy(41), "s")
        assert_unchanged(before, snapshot(made))
        assert ask(made, SOURCE, greedy(40), "s").tokens == generated("llama", SOURCE, 40)


def test_edits_that_leave_nothing() -> None:
    with engine() as made:
        ask(made, SOURCE, session="s")
        before = snapshot(made)
        with pytest.raises(EngineError, match="nothing"):
            ask(made, None, PREFILL, "s", directives=(Directive(0, 160),))
        assert_unchanged(before, snapshot(made))


def malformed(rng: random.Random) -> tuple[Directive, ...]:
    """Directives of which at least one can't be applied to 160 tokens."""
    ok: list[Any] = [
        Directive(5, 9, (4,)),
        Directive(20, 30, (), Mode.REPAIR, 4),
        Directive(150, 160, (5, 6), Mode.FORGET),
    ]
    bad: Any = rng.choice(
        [
            Directive(rng.randint(161, 10**6), 10**6, (1,)),
            Directive(40, rng.randint(161, 10**12)),
            Directive(-rng.randint(1, 99), 50, (1,)),
            Directive(50, 50 - rng.randint(1, 50)),
            Directive(60, 60),
            Directive(rng.randint(6, 8), 12, (1,)),  # overlaps the first
            Directive(60, 61, (rng.randint(512, 2**40),)),
            Directive(60, 61, (-1,)),
            Directive(60, 61, (1.5,)),  # type: ignore[arg-type]
            Directive(60, 61, ("x",)),  # type: ignore[arg-type]
            Directive(True, 61),
            Directive(60.0, 61),  # type: ignore[arg-type]
            Directive(60, 61, (), "amortise"),  # type: ignore[arg-type]
            Directive(60, 61, (), Mode.AMORTIZE, 3),
            Directive(60, 61, (), Mode.REPAIR, -1),
            "delete everything",
            None,
        ]
    )
    ok.insert(rng.randint(0, 3), bad)
    return tuple(ok)


@pytest.mark.parametrize("with_prompt", [True, False])
def test_malformed_directives(with_prompt: bool) -> None:
    """I6: each is refused with the field's name, and nothing is changed; the session goes on."""
    rng = random.Random(1)
    with engine(slots=400) as made:
        ask(made, SOURCE, session="s")
        before = snapshot(made)
        for _ in range(150):
            with pytest.raises(DirectiveError) as caught:
                prompt = TARGET if with_prompt else None
                ask(made, prompt, greedy(2), "s", directives=malformed(rng))
            assert caught.value.field.startswith("directives[")
            assert caught.value.message.endswith(".") and len(str(caught.value)) < 300
        assert_unchanged(before, snapshot(made))
        answer = ask(made, TARGET, greedy(2), "s", directives=EDIT, strict=True)
        assert answer.report is not None and answer.report.moved == 90


@pytest.mark.parametrize("way", ["moved", "copied"])
def test_forward_pass_that_fails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6, I7: a pass fails in the middle of a splice: an error for it, no slot lost, the next
    request is right and says what was missing. A copy leaves the source as it was."""
    real = scheduler.forward
    calls: list[int] = []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return real(*args)

    with engine(chunk=4) as made:
        if way == "copied":
            ask(made, SOURCE)
        ask(made, SOURCE, session="s")
        monkeypatch.setattr(scheduler, "forward", failing)
        with pytest.raises(EngineError, match="out of memory") as caught:
            ask(made, TARGET, greedy(4), "s")
        assert caught.value.reason == "internal"
        check_slots(made)
        answer = ask(made, TARGET, greedy(4, ALL), "s")
        assert answer.report is not None
        if way == "copied":
            assert (answer.report.fallback, answer.report.moved) == (None, 90)
        else:
            assert (answer.report.fallback, answer.report.moved) == (
                Fallback.SOURCE_PARTLY_EVICTED,
                0,
            )
            assert_same(answer, fresh("llama", TARGET, answer.tokens), 1e-4)


@pytest.mark.parametrize("way", ["moved", "copied"])
@pytest.mark.parametrize("aborted_after", [0, 1, 2, 3])
def test_client_hangs_up_in_a_splice(
    way: str, aborted_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4, I6, I7: aborted in the middle of a splice with holes still to fill. No slot is lost; the
    next request of the session is spliced from what is there and answered as the reference, or as a
    fresh prefill of what is not."""
    edits = (Directive(20, 30, (5, 6, 7, 8)), Directive(60, 70, (9, 10, 11, 12)))
    target = np.concatenate(
        [SOURCE[:20], [5, 6, 7, 8], SOURCE[30:60], [9, 10, 11, 12], SOURCE[70:], OTHER[:8]]
    )
    real = scheduler.forward
    calls: list[int] = []
    with engine(chunk=3) as made:
        if way == "copied":
            ask(made, SOURCE)
        ask(made, SOURCE, session="s")
        before = session_rows(made)
        handles: list[Any] = []

        def hanging_up(*args: Any) -> Any:
            out = real(*args)
            if len(calls) == aborted_after:
                handles[0].run.aborted = True
            calls.append(1)
            return out

        def start() -> None:  # all in one go on the engine's thread, so that the pass is known
            monkeypatch.setattr(scheduler, "forward", hanging_up)

        made.call(start)
        ready: list[Any] = []
        handle = made.submit(Request(target, greedy(4), Channel("s")), ready.append)
        handles.append(handle)
        while not ready or type(ready[-1]).__name__ not in ("Done", "Failed"):
            made.call(lambda: None)
        assert (type(ready[-1]).__name__, ready[-1].reason) == ("Done", "abort")
        assert not any(type(event).__name__ == "Delta" for event in ready)
        monkeypatch.setattr(scheduler, "forward", real)
        check_slots(made)

        answer = ask(made, target, greedy(4, ALL), "s")
        report = answer.report
        assert report is not None and report.fallback is None
        tokens = np.concatenate([target, answer.tokens[:-1]])
        plan = segments(160, edits, 8)
        assert report.cached + report.computed == len(target)
        assert_same(
            answer, reference("llama", before, plan, tokens, model=plain_model("llama")), 1e-4
        )
        if way == "moved":
            # What was moved is found where it went, and so is what was computed: both holes.
            done = max(8, 3 * (aborted_after + 1))
            assert (report.moved, report.computed) == (0, 16 - done)
