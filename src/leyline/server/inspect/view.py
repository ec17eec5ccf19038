"""A turn as it is shown: made when somebody looks, and slow on long prompts."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import numpy as np

from leyline.api.inspect import (
    WHY,
    FallbackView,
    SessionList,
    SessionSummary,
    TurnEvicted,
    TurnList,
    TurnMessage,
    TurnPart,
    TurnView,
)
from leyline.api.leyline_object import LeylineReport
from leyline.channel import Report
from leyline.outline import Kind, Outline
from leyline.server.inspect.messages import bounds_of
from leyline.server.inspect.records import Bound, Records, Session, Snapshot, Turn
from leyline.server.text import Text

Teller = Callable[[np.ndarray], str | None]

HEAD, TAIL = 240, 60
"""Tokens shown of a longer text, in front and behind."""
MOST_SESSIONS = 200
"""In one list, newest first."""


class Texts(StrEnum):
    """How much of the texts to tell."""

    NONE = "none"
    SHORT = "short"
    WHOLE = "whole"


def session_list(records: Records, owner: str) -> SessionList:
    """An owner's sessions, newest first."""
    found = records.sessions(owner)
    summaries = [_summary(each) for each in found[:MOST_SESSIONS]]
    return SessionList(sessions=summaries, more=max(0, len(found) - MOST_SESSIONS))


def turn_list(
    records: Records, text: Text, owner: str, session: str, seen: Snapshot, texts: Texts
) -> TurnList:
    """A snapshot of an owner's session as it is shown. Works out where messages lie, and has the
    records keep that."""
    turns = []
    for turn in seen.turns:
        bounds = _bounds(text, turn)
        if bounds is not None and turn.sent is not None:
            records.keep_bounds(owner, session, turn, bounds)
        turns.append(_turn(text, turn, bounds or (), texts))
    return TurnList(session=session, record=seen.serial, older=seen.older, turns=turns)


def _summary(session: Session) -> SessionSummary:
    last = session.turns[-1]
    report = last.report
    return SessionSummary(
        session=session.name,
        turns=session.begun,
        recorded=session.recorded,
        state=last.state,
        active=round(session.active, 3),
        last_prompt=None if report is None else report.prompt,
        last_cached=None if report is None else report.cached,
        prompt=session.prompt,
        computed=session.computed,
        prefix_cache_computed=session.reprefill,
    )


def _bounds(text: Text, turn: Turn) -> tuple[Bound, ...] | None:
    """Where its messages lie; None as long as there is no prompt to look at."""
    outline = _outline(turn.report)
    if turn.bounds is not None or outline is None or turn.wiped:
        return turn.bounds
    if turn.sent is None:
        return ()
    return bounds_of(text, turn.sent, outline.tokens)


def _turn(text: Text, turn: Turn, bounds: tuple[Bound, ...], texts: Texts) -> TurnView:
    report, outline = turn.report, _outline(turn.report)
    show = _teller(text, texts)
    reason = None if report is None else report.fallback
    return TurnView(
        number=turn.number,
        version=turn.version,
        began=round(turn.began, 3),
        endpoint=turn.endpoint,
        state=turn.state,
        reason=turn.reason,
        error=turn.error,
        ttft_s=_rounded(turn.ttft_s),
        whole_s=_rounded(turn.whole_s),
        generated=turn.generated,
        report=None if report is None else LeylineReport.of(report, turn.applied),
        fallback=None if reason is None else FallbackView(reason=str(reason), why=WHY[reason]),
        repaired=_repaired(outline),
        prefix_cache_computed=None if outline is None else outline.reprefill,
        source=None if outline is None else outline.source,
        parts=_parts(outline),
        evicted=_evicted(outline, show),
        messages=_messages(report, outline, bounds, show),
        wiped=turn.wiped,
    )


def _parts(outline: Outline | None) -> list[TurnPart]:
    return [
        TurnPart(kind=part.kind, start=part.start, tokens=part.n, source=part.source)
        for part in (outline.parts if outline else ())
    ]


def _evicted(outline: Outline | None, show: Teller) -> list[TurnEvicted]:
    return [
        TurnEvicted(
            at=each.at,
            start=each.start,
            tokens=each.n,
            replacement_tokens=each.replacement,
            mode=each.mode,
            text=None if each.tokens is None else show(each.tokens),
        )
        for each in (outline.evicted if outline else ())
    ]


def _messages(
    report: Report | None,
    outline: Outline | None,
    bounds: tuple[Bound, ...],
    show: Teller,
) -> list[TurnMessage]:
    if report is None or outline is None:
        return []
    known = len(outline.tokens) > 0
    return [
        TurnMessage(
            index=each.index,
            role=each.role,
            start=each.start,
            tokens=each.n,
            text=show(outline.tokens[each.start : each.start + each.n]) if known else None,
        )
        for each in bounds or (Bound(None, "", 0, report.prompt),)
    ]


def _teller(text: Text, texts: Texts) -> Teller:
    """Tokens to as much of their text as is asked for."""

    def show(tokens: np.ndarray) -> str | None:
        if texts == Texts.NONE:
            return None
        if texts == Texts.WHOLE or len(tokens) <= HEAD + TAIL:
            return text.decode(tokens)
        left_out = len(tokens) - HEAD - TAIL
        head, tail = text.decode(tokens[:HEAD]), text.decode(tokens[-TAIL:])
        return f"{head}\n[… {left_out} tokens …]\n{tail}"

    return show


def _outline(report: Report | None) -> Outline | None:
    return None if report is None else report.outline


def _repaired(outline: Outline | None) -> int:
    return sum(part.n for part in outline.parts if part.kind == Kind.REPAIRED) if outline else 0


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
