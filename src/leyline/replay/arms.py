"""The arms of a replay: what each sends for the same recorded call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from leyline.policy import clear_tool_outputs
from leyline.traces import Call, Message, Session, calls, gaps_of

Arm = Literal["append", "truncate", "splice", "forget"]

ARMS: dict[Arm, str] = {
    "append": "the recorded messages, nothing edited: the warm path",
    "truncate": "old tool outputs cleared, plain requests: an exact prefix is cached",
    "splice": "the same messages in a session: Leyline splices",
    "forget": "the same in a session with mode forget: nothing of what was cleared survives",
}
"""In the order in which they run."""

SESSIONS: tuple[Arm, ...] = ("splice", "forget")
"""Arms that name a session, which the server must know what to do with."""


@dataclass(frozen=True, slots=True)
class Job:
    """One session's work. lengths: tokens to generate for each call. gaps_s: before each call but
    the first; fewer where the trace has fewer. is_copy: of another session, for more at once."""

    session: str
    calls: tuple[Call, ...]
    lengths: tuple[int, ...]
    gaps_s: tuple[float, ...] = ()
    is_copy: bool = False


def jobs_of(
    sessions: Sequence[Session], calls_each: int | None = None, answer: int = 1, skip: int = 0
) -> list[Job]:
    """`calls_each` calls of each session, all by default, each answered with `answer` tokens.

    skip: so many of a session's calls are left out first. Sessions without a call are left out.
    Raises ValueError where there is nothing to do, and for two sessions of one name.
    """
    jobs = []
    for session in sessions:
        taken = tuple(calls(session))[skip:][:calls_each]
        gaps = tuple(ms / 1000 for ms in gaps_of(session)[skip:])
        if taken:
            lengths = (answer,) * len(taken)
            jobs.append(Job(session.id, taken, lengths, gaps, session.is_copy))
    twice = [name for name, n in Counter(job.session for job in jobs).items() if n > 1]
    if twice:
        raise ValueError(f"the traces hold session {twice[0]!r} more than once; give each a name")
    if not jobs:
        raise ValueError(
            "the traces hold no model call: no message with the role assistant has one before it"
        )
    return jobs


def messages_of(arm: Arm, call: Call, keep: int, mark: str = "") -> list[Message]:
    """What the arm sends. mark: see `marked`."""
    edited = call.messages if arm == "append" else clear_tool_outputs(call.messages, keep=keep)
    return marked(edited, mark)


def marked(messages: list[Message], mark: str) -> list[Message]:
    """With a mark before the first message's text, so that runs don't meet in the server's
    cache."""
    if not mark or not messages:
        return messages
    first = messages[0]
    return [{**first, "content": mark + first["content"]}, *messages[1:]]


def leyline_of(arm: Arm, name: str) -> dict[str, Any] | None:
    """The request's `leyline` object; None for a plain request."""
    if arm not in SESSIONS:
        return None
    return {"session": name} if arm == "splice" else {"session": name, "mode": "forget"}
