"""What policies change in messages. Each is replaced by another of the same origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leyline.policy.look import Look, content_text
from leyline.policy.turns import WHOLE, Message, Place, Unit, Use, clear_fences, tool_calls


def put_outputs(
    messages: Sequence[Message], texts: Mapping[Place, str], look: Look
) -> list[Message]:
    """Messages with other texts for the results at these places."""
    edited = list(messages)
    parts: dict[Place, Any] = {}
    for place, text in texts.items():
        message = messages[place.message]
        if place.part == WHOLE:
            edited[place.message] = look.edit(message, content=text)
        else:
            parts[place] = {**message["content"][place.part], "content": text}
    return _put_parts(edited, parts, look)


def clear_inputs(
    messages: Sequence[Message], calls: Iterable[Place], text: str, look: Look
) -> list[Message]:
    """Messages with no arguments for the calls at these places; a plain command becomes `text`."""
    edited = list(messages)
    parts: dict[Place, Any] = {}
    for place in calls:
        message = messages[place.message]
        if place.part == WHOLE:
            said = clear_fences(content_text(message.get("content")), text)
            edited[place.message] = look.edit(message, content=said)
        else:
            field = _field(message)
            parts[place] = _emptied(message[field][place.part], field)
    return _put_parts(edited, parts, look)


def without(
    messages: Sequence[Message], unit: Unit, gone: Iterable[Use], look: Look
) -> list[Message]:
    """A unit's messages without some of its uses. With the last call, all of it goes."""
    gone = set(gone)
    if not any(use.call for use in unit.uses if use not in gone):
        return []
    parts: dict[int, set[int]] = {}
    for use in gone:
        for place in (use.call, use.result):
            if place is not None:
                parts.setdefault(place.message, set()).add(place.part)
    kept = []
    for i in range(unit.start, unit.end):
        message = messages[i]
        if i not in parts:
            kept.append(message)
        elif WHOLE not in parts[i]:
            field = _field(message)
            left = [part for j, part in enumerate(message[field]) if j not in parts[i]]
            if left:
                kept.append(look.edit(message, **{field: left}))
    return kept


def _field(message: Message) -> str:
    """Where a message's calls or results stand."""
    is_openai = message.get("role") == "assistant" and tool_calls(message)
    return "tool_calls" if is_openai else "content"


def _put_parts(messages: list[Message], parts: Mapping[Place, Any], look: Look) -> list[Message]:
    """`messages`, changed: each edited once, however many of its parts are."""
    lists: dict[int, list[Any]] = {}
    for place, part in parts.items():
        if place.message not in lists:
            message = messages[place.message]
            lists[place.message] = list(message[_field(message)])
        lists[place.message][place.part] = part
    for i, each in lists.items():
        messages[i] = look.edit(messages[i], **{_field(messages[i]): each})
    return messages


def _emptied(call: Any, field: str) -> Any:
    """A call without arguments; a malformed one as it is, for the server to refuse."""
    if field == "content":
        return {**call, "input": {}}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    empty: Any = "{}" if isinstance(function.get("arguments"), str) else {}
    return {**call, "function": {**function, "arguments": empty}}
