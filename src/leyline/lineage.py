"""Lineages: the sequence cached for a session, and where its rows came from."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .plan import Keep, Plan

MARK_BITS = 32
"""A marked key is `token + (serial << 32)`; token ids stay below 2**31."""


@dataclass(frozen=True, slots=True)
class Span:
    """Provenance of rows `[start, start+n)`.

    `exact`: computed over exactly the tokens now before them.
    `rotations`: how often their keys were turned (each one rounds once).
    """

    start: int
    n: int
    exact: bool
    rotations: int


@dataclass(slots=True, eq=False)
class Lineage:
    """What is cached for one session of one owner.

    `tokens` and `key` are int64 `[n]`. `key` is what the radix tree files the rows under: the
    tokens, but marked at the first amortized row, so that no other request walks into them (I8).
    """

    owner: str
    session: str
    tokens: np.ndarray
    key: np.ndarray
    spans: tuple[Span, ...]
    edits: int = 0
    created: float = 0
    touched: float = 0

    @property
    def exact(self) -> int:
        """Length of the exact rows at the front."""
        n = 0
        for span in self.spans:
            if not span.exact:
                break
            n += span.n
        return n

    @property
    def max_rotations(self) -> int:
        return max((span.rotations for span in self.spans), default=0)


def mark_key(tokens: np.ndarray, at: int, serial: int) -> np.ndarray:
    """The tokens as a key, int64, with mark `serial` (1 to 2**31 - 1) on the token `at`.

    `at == len(tokens)`, no amortized row, leaves it unmarked.
    """
    if not 1 <= serial < 2**31:
        raise ValueError(f"serial is {serial}; marks are 1 to {2**31 - 1}")
    if not 0 <= at <= len(tokens):
        raise ValueError(f"mark at {at}, outside of {len(tokens)} tokens")
    key = np.array(tokens, dtype=np.int64)
    if at < len(key):
        key[at] += serial << MARK_BITS
    return key


def spans_after(plan: Plan, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Provenance of the target's rows, from that of the source's.

    A moved row is amortized, and rotated once more if its shift is not 0. A computed row is exact
    unless an amortized row is before it. Raises ValueError if the plan keeps rows outside `spans`.
    """
    result: list[Span] = []
    exact = True
    for segment in plan.segments:
        if isinstance(segment, Keep):
            pieces = [
                (n, was_exact, rotations + (segment.shift != 0))
                for n, was_exact, rotations in _slice(spans, segment.src, segment.n)
            ]
        else:
            pieces = [(segment.n, True, 0)]
        at = segment.dst
        for n, was_exact, rotations in pieces:
            before = min(n, max(0, plan.amortized_from - at)) if exact and was_exact else 0
            _append(result, Span(at, before, True, rotations))
            _append(result, Span(at + before, n - before, False, rotations))
            exact = exact and before == n
            at += n
    return tuple(result)


def _slice(spans: tuple[Span, ...], start: int, n: int) -> Iterator[tuple[int, bool, int]]:
    """(length, exact, rotations) of the parts of rows `[start, start+n)`."""
    left = n
    for span in spans:
        overlap = min(span.start + span.n, start + n) - max(span.start, start)
        if overlap > 0:
            yield overlap, span.exact, span.rotations
            left -= overlap
    if left:
        raise ValueError(f"the plan keeps source rows [{start}, {start + n}), {left} not in spans")


def _append(spans: list[Span], span: Span) -> None:
    if not span.n:
        return
    last = spans[-1] if spans else None
    if last and (last.exact, last.rotations) == (span.exact, span.rotations):
        spans[-1] = Span(last.start, last.n + span.n, last.exact, last.rotations)
    else:
        spans.append(span)


class Lineages:
    """Lineages by owner and session, bounded in sessions, tokens and idle time.

    Whoever holds the rows of a lineage is told of each one dropped: `put` and `expire` return them.
    Not thread-safe.
    """

    def __init__(
        self,
        max_sessions: int,
        max_tokens: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_sessions < 1 or max_tokens < 1 or ttl_s <= 0:
            raise ValueError(
                f"bounds must be positive: max_sessions={max_sessions}, "
                f"max_tokens={max_tokens}, ttl_s={ttl_s}"
            )
        self.max_sessions = max_sessions
        self.max_tokens = max_tokens
        self.ttl_s = ttl_s
        self._clock = clock
        self._held: OrderedDict[tuple[str, str], Lineage] = OrderedDict()  # least recent first
        self._tokens = 0

    def get(self, owner: str, session: str) -> Lineage | None:
        """The session's lineage, now the most recent; None if unknown or expired.

        An expired one stays until `expire` or `put` hands it out.
        """
        lineage = self.peek(owner, session)
        if lineage is not None:
            lineage.touched = self._clock()
            self._held.move_to_end((owner, session))
        return lineage

    def peek(self, owner: str, session: str) -> Lineage | None:
        """The same, but it stays as recent as it was: for who only looks."""
        lineage = self._held.get((owner, session))
        if lineage is None or self._clock() - lineage.touched > self.ttl_s:
            return None
        return lineage

    def put(self, lineage: Lineage) -> list[Lineage]:
        """Hold a lineage, in place of its session's last one; return those dropped for it.

        Those are the expired and, to stay in bounds, the least recently used; not the one replaced.
        Raises ValueError if it alone is over `max_tokens`.
        """
        if len(lineage.tokens) > self.max_tokens:
            raise ValueError(
                f"session {lineage.session!r} has {len(lineage.tokens)} tokens, "
                f"more than the {self.max_tokens} that all sessions may hold"
            )
        dropped = self.expire()
        self.drop(lineage.owner, lineage.session)
        lineage.touched = self._clock()
        lineage.created = lineage.created or lineage.touched
        self._held[lineage.owner, lineage.session] = lineage
        self._tokens += len(lineage.tokens)
        while len(self._held) > self.max_sessions or self._tokens > self.max_tokens:
            dropped.append(self._drop_oldest())
        return dropped

    def drop(self, owner: str, session: str) -> Lineage | None:
        """Forget a session; returns what was held for it."""
        lineage = self._held.pop((owner, session), None)
        if lineage is not None:
            self._tokens -= len(lineage.tokens)
        return lineage

    def expire(self) -> list[Lineage]:
        """Drop and return the lineages not touched for `ttl_s`."""
        oldest_allowed = self._clock() - self.ttl_s
        dropped = []
        while self._held and next(iter(self._held.values())).touched < oldest_allowed:
            dropped.append(self._drop_oldest())
        return dropped

    @property
    def tokens(self) -> int:
        """Tokens of all lineages held."""
        return self._tokens

    def _drop_oldest(self) -> Lineage:
        _, lineage = self._held.popitem(last=False)
        self._tokens -= len(lineage.tokens)
        return lineage

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lineage]:
        """Least recently used first; a snapshot, so that dropping while iterating is safe."""
        return iter(list(self._held.values()))
