"""The arms of an evaluation: what each makes of a request that the agent sends."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal

from leyline.policy import clear_tool_outputs

Arm = Literal["append", "truncate", "splice"]
Body = dict[str, Any]

ARMS: dict[Arm, str] = {
    "append": "nothing is edited; plain requests",
    "truncate": "old tool outputs cleared; plain requests: what is behind is prefilled again",
    "splice": "the same messages in a session: Leyline splices",
}
"""In the order in which they run."""

PAIRS: tuple[tuple[Arm, Arm], ...] = (
    ("truncate", "append"),
    ("splice", "append"),
    ("splice", "truncate"),
)
"""An arm, and what it is compared with."""

MARKS = 10**10


@dataclass(frozen=True, slots=True)
class Key:
    """One episode of an evaluation."""

    arm: Arm
    task: str
    seed: int


def edited(arm: Arm, body: Body, keep: int, session: str) -> Body:
    """The body as the arm sends it. Tool outputs are told apart by their place: ids can repeat.

    keep: the newest tool outputs, which stay. session: the episode's name for the server.
    """
    if arm == "append":
        return body
    sent = {**body, "messages": clear_tool_outputs(body["messages"], keep=keep)}
    return sent if arm == "truncate" else {**sent, "leyline": {"session": session}}


def new_mark() -> str:
    """First words of an episode's prompts, so that no two episodes share what the server caches:
    a number that no other has, and always as long."""
    return f"[{secrets.randbelow(MARKS):010d}] "
