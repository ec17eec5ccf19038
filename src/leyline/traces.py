"""Recorded agent sessions, for replay."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]


class TraceError(ValueError):
    """A trace file that can't be read; says which file, which line, and what is wrong."""


@dataclass(frozen=True)
class Session:
    """One recorded conversation. is_copy: with first words of its own, to have more of them."""

    id: str
    messages: tuple[Message, ...]
    gaps_ms: tuple[float, ...]  # between consecutive assistant messages: one fewer, or none
    is_copy: bool = False


class Call(NamedTuple):
    """One model call: what the model was sent, and what it answered then."""

    messages: list[Message]
    answer: str


def load_traces(path: str | Path | None = None) -> list[Session]:
    """Read sessions from a ``.jsonl`` or ``.jsonl.gz`` file; by default the 12 shipped ones.

    A line is ``{"session": id, "messages": [{"role", "content"}, …], "gaps_ms": [number, …]}``.
    Raises TraceError for a malformed file and OSError for one that can't be opened.
    """
    source = files("leyline") / "data" / "miniswe.jsonl.gz" if path is None else Path(path)
    data = source.read_bytes()
    try:
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: neither UTF-8 text nor whole gzip data ({error})") from error
    # Not splitlines(): it would also cut at U+2028, which may stand inside a JSON string.
    lines = enumerate(text.split("\n"), 1)
    return [_session(line, f"{source}, line {n}") for n, line in lines if line.strip()]


def calls(session: Session) -> Iterator[Call]:
    """The model calls of a session, in order: one for each ``assistant`` message, but for one that
    the session begins with, as a greeting does: no model was asked for it."""
    for i, message in enumerate(session.messages):
        if i and message["role"] == "assistant":
            yield Call(list(session.messages[:i]), message["content"])


def gaps_of(session: Session) -> tuple[float, ...]:
    """Milliseconds before each of `calls` but the first; fewer where the trace has fewer. What
    passed between a greeting and the first call is none of them."""
    greeted = session.messages and session.messages[0]["role"] == "assistant"
    return session.gaps_ms[1:] if greeted else session.gaps_ms


def save_traces(path: str | Path, sessions: Sequence[Session]) -> None:
    """Write sessions as `load_traces` reads them. Raises OSError."""
    rows = [
        {"session": each.id, "messages": each.messages, "gaps_ms": each.gaps_ms}
        for each in sessions
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8", "backslashreplace")
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def take(sessions: Sequence[Session], n: int | None = None) -> list[Session]:
    """The first `n` sessions, all by default. Where there are fewer, copies follow, which begin
    with words of their own and so share no prefix with what they are copies of."""
    if n is None or not sessions:
        return list(sessions)
    return [_copy(sessions[i % len(sessions)], i // len(sessions)) for i in range(n)]


def shortest(sessions: Sequence[Session], n: int) -> list[Session]:
    """The `n` sessions with the least text."""

    def length(session: Session) -> int:
        return sum(len(str(message["content"])) for message in session.messages)

    return sorted(sessions, key=length)[:n]


def _copy(session: Session, number: int) -> Session:
    if number == 0 or not session.messages:
        return session
    first, *rest = session.messages
    marked = {**first, "content": f"(copy {number}) {first['content']}"}
    return Session(f"{session.id}-copy{number}", (marked, *rest), session.gaps_ms, is_copy=True)


def _session(line: str, where: str) -> Session:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON ({error})") from error
    if not isinstance(row, dict) or not isinstance(row.get("session"), str):
        raise TraceError(f'{where}: must be an object with a string "session"')
    messages, gaps = row.get("messages"), row.get("gaps_ms", [])
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise TraceError(f'{where}: "messages" must be a list of {{"role": …, "content": string}}')
    if not isinstance(gaps, list) or not all(map(_is_gap, gaps)):
        raise TraceError(f'{where}: "gaps_ms" must be a list of numbers from 0 on')
    return Session(row["session"], tuple(messages), tuple(gaps))


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )


def _is_gap(gap: object) -> bool:
    return isinstance(gap, int | float) and math.isfinite(gap) and gap >= 0
