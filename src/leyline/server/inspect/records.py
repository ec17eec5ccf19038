"""What is kept of turns: bounded, by owner and session, gone when the session is.

Recording is done on the engine's thread, so that it is right also when the client has hung up; it
keeps references and counts, and everything that costs is left to whoever looks.

What was to be forgotten is not kept: with FORGET, all earlier turns of the session keep their
numbers and lose their text, as it is not known where in them the span was.
"""

from __future__ import annotations

import itertools
import json
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from leyline.api.messages import Message
from leyline.channel import Channel, Report
from leyline.engine.request import Delta, Done, Event, Failed, Started
from leyline.policy import Applied
from leyline.server.errors import ApiError
from leyline.server.inspect.watcher import Watcher

log = logging.getLogger("leyline.server")

MIB = 1024**2
MOST_EXACT = 2**53
"""Numbers in JSON are exact below this, to a browser."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """All bounds of records. turns: of a session. size: bytes of prompts and messages, all sessions
    together. ttl_s: seconds that a session may be idle. watchers: open streams of one owner."""

    sessions: int = 1024
    turns: int = 256
    size: int = 64 * MIB
    ttl_s: float = 3600.0
    watchers: int = 16


@dataclass(frozen=True, slots=True)
class Sent:
    """What the chat template was given. size: its bytes, at first those of the request's body."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any] | None
    size: int

    def measured(self) -> Sent:
        """With the size of what is kept, as JSON: a body may also have had spaces, or have been
        edited."""
        try:
            kept = json.dumps([self.messages, self.tools, self.kwargs], ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            return self
        return replace(self, size=len(kept.encode(errors="surrogatepass")))


@dataclass(frozen=True, slots=True)
class Bound:
    """Prompt tokens `[start, start + n)` of one message. index: which message; None for what opens
    the answer."""

    index: int | None
    role: str
    start: int
    n: int


class State(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (State.DONE, State.FAILED)


@dataclass(slots=True)
class Turn:
    """One request of a session.

    order: grows from turn to turn of all sessions. began: Unix time. sent: kept until `bounds` is
    known. report: with its outline, whose ids are int32. ttft_s, whole_s: seconds since the request
    was submitted. size: bytes, which count while it is `kept`. wiped: its text was to be forgotten.
    """

    number: int
    order: int
    endpoint: str
    began: float
    sent: Sent | None
    applied: tuple[Applied, ...]
    forgets: bool
    version: int = 0
    state: State = State.WAITING
    reason: str | None = None
    error: str | None = None
    report: Report | None = None
    ttft_s: float | None = None
    whole_s: float | None = None
    generated: int = 0
    bounds: tuple[Bound, ...] | None = None
    size: int = 0
    kept: bool = True
    wiped: bool = False

    def wipe(self) -> None:
        """Keep the numbers, drop every text."""
        self.sent, self.error, self.wiped = None, None, True
        if self.report is not None and self.report.outline is not None:
            outline = self.report.outline
            gone = tuple(replace(each, tokens=None) for each in outline.evicted)
            bare = replace(outline, tokens=outline.tokens[:0].copy(), evicted=gone)
            self.report = replace(self.report, outline=bare)


@dataclass(slots=True, eq=False)
class Session:
    """The turns kept of one session, oldest first.

    serial: tells it from an earlier one of the same name, also of a server before. begun: turns
    ever; recorded: in a copy, how many are kept. version: of its summary. active: Unix time of its
    last change. prompt, computed, reprefill: tokens, all turns together.
    """

    serial: int
    owner: str
    name: str
    turns: deque[Turn] = field(default_factory=deque)
    begun: int = 0
    recorded: int = 0
    version: int = 0
    touched: float = 0.0
    active: float = 0.0
    prompt: int = 0
    computed: int = 0
    reprefill: int = 0

    def count(self, report: Report) -> None:
        self.prompt += report.prompt
        self.computed += report.computed
        self.reprefill += 0 if report.outline is None else report.outline.reprefill

    def begin_anew(self, serial: int, turns: list[Turn]) -> None:
        """Be another session of this name, which has only these of its turns."""
        self.serial, self.turns, self.begun = serial, deque(turns), len(turns)
        self.prompt = self.computed = self.reprefill = 0
        for number, turn in enumerate(turns, 1):
            turn.number = number
            if turn.report is not None:
                self.count(turn.report)


@dataclass(slots=True)
class Share:
    """What one owner has on record. order: the session of each turn kept, oldest first. size:
    bytes."""

    order: dict[int, Session] = field(default_factory=dict)
    size: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of turns at one moment. older: turns on record that were not asked for. version: to
    ask for what changes from here on."""

    serial: int
    turns: tuple[Turn, ...]
    older: int
    version: int


class Records:
    """The records of one application. Thread-safe."""

    def __init__(
        self, bounds: Bounds | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bounds = bounds or Bounds()
        self.closed = False
        self._clock = clock
        self._lock = threading.RLock()
        self._held: OrderedDict[tuple[str, str], Session] = OrderedDict()  # least recent first
        self._shares: dict[str, Share] = {}  # of owners with turns
        self._version = itertools.count(1)
        # A page may have seen those of a server before this one.
        self._serial = itertools.count(1 + secrets.randbelow(MOST_EXACT // 2))
        self._watchers: set[Watcher] = set()

    def recording(
        self,
        channel: Channel | None,
        endpoint: str,
        sent: Sent | None = None,
        applied: tuple[Applied, ...] = (),
    ) -> Recording | None:
        """Where a request's events are to go; None without a session."""
        if channel is None:
            return None
        kept = None if sent is None else sent.measured()
        return Recording(self, channel, endpoint, kept, applied)

    # -- looking ---------------------------------------------------------------------------------

    def sessions(self, owner: str) -> list[Session]:
        """Copies of an owner's sessions, with their newest turn only; newest first."""
        with self._lock:
            self.expire()
            mine = [each for each in self._held.values() if each.owner == owner]
            return [
                replace(each, turns=deque(each.turns, 1), recorded=len(each.turns))
                for each in reversed(mine)
            ]

    def turns(
        self,
        owner: str,
        session: str,
        last: int | None = None,
        after: int = 0,
        number: int | None = None,
    ) -> Snapshot | None:
        """The newest `last` turns, those changed since version `after`, or the one with this
        number; None for an unknown session."""
        with self._lock:
            self.expire()
            held = self._held.get((owner, session))
            if held is None:
                return None
            newest = list(held.turns)[-last:] if last else list(held.turns)
            older = len(held.turns) - len(newest)
            if number is not None:
                newest = [each for each in held.turns if each.number == number]
            changed = tuple(copy(each) for each in newest if each.version > after)
            return Snapshot(held.serial, changed, older, next(self._version))

    def keep_bounds(self, owner: str, session: str, turn: Turn, found: tuple[Bound, ...]) -> None:
        """Note where a turn's messages lie, so that they need not be kept. turn: a copy."""
        with self._lock:
            held = self._held.get((owner, session))
            for each in held.turns if held else ():
                if each.sent is not None and each.sent is turn.sent:
                    self._drop_sent(owner, each)
                    each.bounds = found

    def watch(self, owner: str) -> Watcher:
        """To be told of an owner's changes. Raises ApiError 429 for one too many."""
        with self._lock:
            mine = sum(each.owner == owner for each in self._watchers)
            if mine >= self.bounds.watchers:
                raise ApiError(
                    429,
                    f"{mine} streams of this API key's sessions are open, no more are; close one",
                    "rate_limit_error",
                    code="too_many_streams",
                )
            watcher = Watcher(owner, self._leave)
            self._watchers.add(watcher)
            return watcher

    def _leave(self, watcher: Watcher) -> None:
        with self._lock:
            self._watchers.discard(watcher)

    # -- ends ------------------------------------------------------------------------------------

    def drop(self, owner: str, session: str) -> None:
        """Forget a session's turns, but for those that wait or run: they came after what ended it,
        and are the first of one that begins anew. A session that is deleted has none."""
        with self._lock:
            held = self._held.get((owner, session))
            if held is None:
                return
            left = [turn for turn in held.turns if not turn.state.ended]
            if not left:
                self._remove(held)
                return
            for turn in held.turns:
                if turn.state.ended:
                    self._let_go(owner, turn)
            held.begin_anew(next(self._serial), left)
            for turn in left:
                self._changed(held, turn, summary=True)

    def expire(self) -> None:
        """Drop the sessions that were idle for too long."""
        with self._lock:
            oldest = self._clock() - self.bounds.ttl_s
            while self._held and next(iter(self._held.values())).touched < oldest:
                self.drop(*next(iter(self._held)))

    def close(self) -> None:
        """End all streams: the server is to stop."""
        with self._lock:
            self.closed = True
            for watcher in self._watchers:
                watcher.wake()

    # -- recording; under the lock ---------------------------------------------------------------

    def _begin(self, owner: str, name: str, turn: Turn) -> Session:
        self.expire()
        session = self._held.get((owner, name))
        if session is None:
            session = Session(next(self._serial), owner, name)
            self._held[owner, name] = session
        session.begun += 1
        turn.number, turn.order = session.begun, next(self._version)
        session.turns.append(turn)
        self._shares.setdefault(owner, Share()).order[turn.order] = session
        self._resize(owner, turn, turn.sent.size if turn.sent else 0)
        while len(session.turns) > self.bounds.turns:
            self._let_go(owner, session.turns.popleft())
        self._changed(session, turn, summary=True)
        self._fit()
        return session

    def _changed(self, session: Session, turn: Turn, summary: bool = False) -> None:
        turn.version = next(self._version)
        session.touched = self._clock()
        if summary:
            session.active, session.version = time.time(), turn.version
        key = (session.owner, session.name)
        if self._held.get(key) is session:
            self._held.move_to_end(key)
            self._tell(session.owner)

    def _started(self, session: Session, turn: Turn, report: Report) -> None:
        if (outline := report.outline) is not None:
            report = replace(
                report, outline=replace(outline, tokens=outline.tokens.astype(np.int32))
            )
            gone = sum(each.tokens.nbytes for each in outline.evicted if each.tokens is not None)
            self._resize(session.owner, turn, 4 * len(outline.tokens) + gone)
        session.count(report)
        turn.report, turn.state = report, State.RUNNING
        if turn.wiped:
            turn.wipe()
        if turn.forgets and _removes(report):
            for each in session.turns:
                if each.number < turn.number and not each.wiped:
                    each.wipe()
                    self._resize(session.owner, each, -each.size)
                    each.version = next(self._version)
        self._changed(session, turn, summary=True)
        self._fit()

    def _failed(self, session: Session, turn: Turn) -> None:
        turn.state = State.FAILED
        if turn.report is None:  # refused: there will be no prompt to find the messages in
            self._drop_sent(session.owner, turn)

    def _drop_sent(self, owner: str, turn: Turn) -> None:
        if turn.sent is not None:
            self._resize(owner, turn, -turn.sent.size)
            turn.sent = None

    def _resize(self, owner: str, turn: Turn, by: int) -> None:
        turn.size += by
        if turn.kept:
            self._shares[owner].size += by

    def _remove(self, session: Session) -> None:
        """Hold a session no more."""
        del self._held[session.owner, session.name]
        while session.turns:
            self._let_go(session.owner, session.turns.popleft())
        self._tell(session.owner)

    def _let_go(self, owner: str, turn: Turn) -> None:
        """Keep a turn no more. It may still run, and be recorded for nobody."""
        share = self._shares[owner]
        del share.order[turn.order]
        share.size -= turn.size
        turn.kept = False
        if not share.order:
            del self._shares[owner]

    def _fit(self) -> None:
        """Until all bounds hold, drop the least recent session, or the oldest turn, of the owner
        who has the most: nobody can push out what others have."""
        while len(self._held) > self.bounds.sessions:
            most = Counter(owner for owner, _ in self._held).most_common(1)[0][0]
            self._remove(next(each for each in self._held.values() if each.owner == most))
        while sum(share.size for share in self._shares.values()) > self.bounds.size:
            largest = max(self._shares.values(), key=lambda share: share.size)
            session = next(iter(largest.order.values()))
            self._let_go(session.owner, session.turns.popleft())
            if not session.turns:
                self._remove(session)

    def _tell(self, owner: str) -> None:
        for watcher in self._watchers:
            if watcher.owner == owner:
                watcher.wake()


class Recording:
    """One request's place in the records."""

    def __init__(
        self,
        records: Records,
        channel: Channel,
        endpoint: str,
        sent: Sent | None,
        applied: tuple[Applied, ...],
    ) -> None:
        self._records = records
        self._channel = channel
        self._turn = Turn(0, 0, endpoint, 0.0, sent, applied, channel.forgets)
        self._session: Session | None = None
        self._began = 0.0

    def begin(self) -> None:
        """The request is about to be submitted."""
        self._began = time.perf_counter()
        self._turn.began = time.time()
        with self._records._lock:
            channel = self._channel
            self._session = self._records._begin(channel.owner, channel.session, self._turn)

    def observe(self, event: Event) -> None:
        """Note one of its events, whatever thread it comes on."""
        try:
            self._observe(event)
        except Exception:  # a look inside must not cost a request its answer
            log.exception("a request could not be recorded for the page")

    def _observe(self, event: Event) -> None:
        turn, session = self._turn, self._session
        assert session is not None
        seconds = time.perf_counter() - self._began
        with self._records._lock:
            match event:
                case Started(report):
                    self._records._started(session, turn, report)
                    return
                case Delta(_, tokens):
                    turn.generated += len(tokens)
                    if turn.ttft_s is None and tokens:
                        turn.ttft_s = seconds
                case Done(reason):
                    turn.state, turn.reason, turn.whole_s = State.DONE, reason, seconds
                case Failed(error):
                    self._records._failed(session, turn)
                    turn.whole_s = seconds
                    turn.reason = str(getattr(error, "reason", "") or type(error).__name__)
                    turn.error = None if turn.wiped else str(error)
            self._records._changed(session, turn, summary=not isinstance(event, Delta))


def _removes(report: Report) -> bool:
    """Whether a FORGET takes anything out of what the session was. Not known without a source."""
    outline = report.outline
    if outline is None or outline.source is None:
        return True
    return bool(report.edits or report.forgotten or report.kept_by_others)
