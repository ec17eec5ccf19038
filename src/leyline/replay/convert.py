"""Logs of the OpenAI API into traces.

A line is one of

- a request with its response: `{"messages": […], "choices": [{"message": …}]}`, or the two apart,
  as `request` or `body`, and `response` (whose own `body` may hold it, as in batch files);
- a transcript, or a request alone: `{"messages": […]}`.

Lines that go on from an earlier line's messages belong to one session with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leyline.api.messages import check_messages, for_template
from leyline.traces import Message, Session, TraceError

ROLES = {"developer": "system", "function": "tool"}
"""Roles by newer and older names."""


def convert(path: Path) -> list[Session]:
    """The sessions of a log, in the order in which they began. Raises TraceError, with the line
    that is bad, and OSError."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text ({error})") from error
    conversations = []
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                conversations.append(_conversation(json.loads(line)))
            except ValueError as error:
                kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
                raise TraceError(f"{path}, line {n}: {kind}{error}") from error
    grown = [messages for messages in _grow(conversations) if _answered(messages)]
    if not grown:
        raise TraceError(f"{path}: no model's answer in it")
    return [Session(f"{path.stem}-{i}", tuple(each), ()) for i, each in enumerate(grown, 1)]


def _grow(conversations: Iterable[list[Message]]) -> list[list[Message]]:
    """Conversations, each with all that went on from it. One that is the beginning of another, as
    when a request is sent again, adds nothing."""
    sessions: list[list[Message]] = []
    for messages in conversations:
        begun = [each for each in sessions if messages[: len(each)] == each]
        if begun:
            longest = max(begun, key=len)
            longest.extend(messages[len(longest) :])
        elif not any(each[: len(messages)] == messages for each in sessions):
            sessions.append(messages)
    return sessions


def _conversation(row: Any) -> list[Message]:
    """A line's messages, the answer included. Raises ValueError."""
    if not isinstance(row, dict):
        raise ValueError("must be an object")
    request = row.get("request", row.get("body", row))
    if not isinstance(request, dict):
        raise ValueError("the request must be an object")
    messages = check_messages(request.get("messages"))
    messages = [*messages, *_answer(row)]
    check_messages(messages)
    return [_plain(message) for message in for_template(messages)]


def _answer(row: dict[str, Any]) -> list[Message]:
    response = row.get("response", row)
    if isinstance(response, dict):
        response = response.get("body", response)
    choices = response.get("choices") if isinstance(response, dict) else None
    if choices is None:
        return []
    try:
        return [{"role": "assistant", **choices[0]["message"]}]
    except (LookupError, TypeError):
        raise ValueError("choices must hold an object with a message") from None


def _plain(message: Message) -> Message:
    """A role and a text; tool calls are written behind it."""
    role = ROLES.get(message["role"], message["role"])
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = {"name": function.get("name"), "arguments": function.get("arguments")}
        parts.append(f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>")
    return {"role": role, "content": "\n".join(parts)}


def _answered(messages: list[Message]) -> bool:
    """Whether there is a call in it; a greeting that comes first is none."""
    return any(message["role"] == "assistant" for message in messages[1:])
