"""Recorded agent sessions, for replay."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]


class TraceError(ValueError):
    """A trace file that can't be read; says which file, which line, and what is wrong."""


@dataclass(frozen=True)
class Session:
    """One recorded conversation."""

    id: str
    messages: tuple[Message, ...]
    gaps_ms: tuple[float, ...]  # between consecutive model calls, so one fewer than calls


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
    """The model calls of a session, in order: one for each ``assistant`` message."""
    for i, message in enumerate(session.messages):
        if message["role"] == "assistant":
            yield Call(list(session.messages[:i]), message["content"])


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
    if not isinstance(gaps, list) or not all(isinstance(gap, int | float) for gap in gaps):
        raise TraceError(f'{where}: "gaps_ms" must be a list of numbers')
    return Session(row["session"], tuple(messages), tuple(gaps))


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
