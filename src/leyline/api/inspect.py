"""Answers of `/v1/leyline/sessions` (the list), `/v1/leyline/turns` and `/v1/leyline/events`."""

from __future__ import annotations

from pydantic import BaseModel

from leyline.api.leyline_object import LeylineReport
from leyline.channel import Fallback
from leyline.directive import Mode
from leyline.outline import Kind

WHY: dict[str, str] = {
    Fallback.SOURCE_MISSING: "Nothing was cached for this session, so all of it was prefilled.",
    Fallback.SOURCE_PARTLY_EVICTED: "Some rows to keep had been evicted; the rest was spliced.",
    Fallback.NO_ROOM: "Others use the rows too, and there were not enough free slots for a copy.",
    Fallback.UNSUPPORTED_FEATURE: "The request uses something that a splice doesn't go with.",
    Fallback.SWITCHED_OFF: "The engine runs without directives.",
}
"""Why something was prefilled instead of spliced, for people."""


class SessionSummary(BaseModel):
    """A session with turns on record. turns: ever; `recorded` of them are still there. state: of
    the newest. active: Unix time of its last change. last_prompt, last_cached: tokens of the newest
    turn; the others of all turns together. prefix_cache_computed: what a prefix cache without edits
    would have computed."""

    session: str
    turns: int
    recorded: int
    state: str
    active: float
    last_prompt: int | None
    last_cached: int | None
    prompt: int
    computed: int
    prefix_cache_computed: int


class SessionList(BaseModel):
    """Newest first. more: sessions that were left out."""

    sessions: list[SessionSummary]
    more: int = 0


class TurnPart(BaseModel):
    """Prompt tokens from `start` on. source: where moved rows lay in the session's sequence."""

    kind: Kind
    start: int
    tokens: int
    source: int | None


class TurnEvicted(BaseModel):
    """Tokens of the session's sequence, from `start` on, that the prompt has no more. at: where in
    the prompt their replacement begins. text: None where it is not told, or was to be forgotten."""

    at: int
    start: int
    tokens: int
    replacement_tokens: int
    mode: Mode
    text: str | None = None


class TurnMessage(BaseModel):
    """A message's part of the prompt. index: which of the messages sent; None for what opens the
    answer. text: as the model saw it; None where it is not told, or was to be forgotten."""

    index: int | None
    role: str
    start: int
    tokens: int
    text: str | None = None


class FallbackView(BaseModel):
    reason: str
    why: str


class TurnView(BaseModel):
    """One request of a session.

    began: Unix time. state: waiting, running, done or failed. reason: how the answer ended, or in
    one word why it failed; error: in a sentence. ttft_s, whole_s: seconds since it was submitted.
    report: the `leyline` object of the answer. parts: cover the prompt once, in order. repaired:
    tokens, part of the report's `computed`. prefix_cache_computed: what a prefix cache without
    edits would have computed. messages: cover the prompt, too; one without an index and role where
    the prompt was no messages. wiped: texts were to be forgotten.
    """

    number: int
    version: int
    began: float
    endpoint: str
    state: str
    reason: str | None
    error: str | None
    ttft_s: float | None
    whole_s: float | None
    generated: int
    report: LeylineReport | None
    fallback: FallbackView | None
    repaired: int
    prefix_cache_computed: int | None
    source: int | None
    parts: list[TurnPart]
    evicted: list[TurnEvicted]
    messages: list[TurnMessage]
    wiped: bool


class TurnList(BaseModel):
    """Turns of a session, oldest first. record: another one means that the session began anew.
    older: turns on record that were not asked for."""

    session: str
    record: int
    older: int
    turns: list[TurnView]
