"""Tool calls with their results, by position, whatever shape the messages have.

Three shapes: OpenAI's (`tool_calls`, then messages of role `tool`), Anthropic's (`tool_use` and
`tool_result` among the parts of a content), and plain ones, where an assistant's text with a fenced
command is answered by a message of role `tool`. Ids are used only within one step: harnesses repeat
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Message = dict[str, Any]
WHOLE = -1
"""In the place of a part: the message itself."""

_AGENT = ("step", "answer")
_FENCE, _WORD = "```", re.compile(r"\w*")


class Place(NamedTuple):
    """Where a call or a result stands. part: of `tool_calls` or of the content; or WHOLE."""

    message: int
    part: int


@dataclass(frozen=True, slots=True)
class Use:
    """One tool call and its result. arguments: JSON, or the command of a plain call. call: None for
    a result that nobody asked for. result: None for a call without one yet."""

    name: str
    arguments: str
    call: Place | None
    result: Place | None


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages `[start, end)` that only go together.

    A step is an assistant's message with calls and the results behind it, an answer one without. A
    step is fixed where a user's words stand in one message with a result, or nobody called.
    """

    kind: Literal["system", "user", "step", "answer"]
    start: int
    end: int
    uses: tuple[Use, ...] = ()
    fixed: bool = False


class Call(NamedTuple):
    """A call in one message."""

    part: int
    id: object
    name: str
    arguments: str


class Result(NamedTuple):
    """A result in one message."""

    part: int
    id: object


@dataclass(frozen=True, slots=True)
class Facts:
    """What one message is. words: something that a user said, and not only results."""

    role: str
    calls: tuple[Call, ...] = ()
    results: tuple[Result, ...] = ()
    words: bool = False


def facts_of(message: Message) -> Facts:
    """A message by itself. Malformed parts count as nothing: their checks are elsewhere."""
    role = message.get("role")
    if role == "assistant":
        return Facts("assistant", calls=_calls(message))
    if role == "tool":
        return Facts("tool", results=(Result(WHOLE, message.get("tool_call_id")),))
    if role != "user":
        return Facts("system")
    parts = _parts(message)
    found = [(i, part) for i, part in enumerate(parts) if part.get("type") == "tool_result"]
    results = tuple(Result(i, part.get("tool_use_id")) for i, part in found)
    words = not results or len(results) < len(parts)
    return Facts("tool" if results else "user", results=results, words=words)


def groups_of(facts: Sequence[Facts], first: int = 0) -> list[tuple[int, int]]:
    """Where the units begin and end; from `first`, where one begins."""
    groups, i, n = [], first, len(facts)
    while i < n:
        start, role = i, facts[i].role
        if role != "tool":
            i += 1
        if role in ("assistant", "tool"):
            while i < n and facts[i].role == "tool":
                i += 1
        groups.append((start, i))
    return groups


def unit_of(messages: Sequence[Message], facts: Sequence[Facts], start: int, end: int) -> Unit:
    """The unit of messages `[start, end)`. facts: of all messages."""
    role = facts[start].role
    if role == "user":
        return Unit("user", start, end)
    return _step(messages, facts, start, end) if role != "system" else Unit("system", start, end)


def is_prompt(facts: Sequence[Facts]) -> list[bool]:
    """For each message: could everything up to it be sent to a model? Depends on nothing after it.

    So after a user's words, and after the last result that an assistant's message waits for.
    """
    points, open_calls = [], 0
    for each in facts:
        open_calls = len(each.calls) if each.role == "assistant" else open_calls
        open_calls = 0 if each.words else max(0, open_calls - len(each.results))
        points.append(each.role in ("user", "tool") and open_calls == 0)
    return points


def closed(units: Sequence[Unit], keep: set[int]) -> set[int]:
    """The units to keep so that a conversation remains.

    System messages and fixed steps always; with anything of an exchange also its user's words and
    its answer, or its last step where the user broke in.
    """
    keep = keep | {i for i, unit in enumerate(units) if unit.kind == "system" or unit.fixed}
    exchanges: list[list[int]] = [[]]
    for i, unit in enumerate(units):
        if unit.kind == "user" and any(units[j].kind in _AGENT for j in exchanges[-1]):
            exchanges.append([])
        exchanges[-1].append(i)
    for exchange in exchanges:
        if keep.isdisjoint(exchange):
            continue
        keep.update(i for i in exchange if units[i].kind != "step")
        if exchange is not exchanges[-1]:
            keep.add(exchange[-1])
    return keep


def opening(units: Sequence[Unit]) -> int:
    """How many units stand before the assistant's first: the task, which always stays."""
    for i, unit in enumerate(units):
        if unit.kind in _AGENT:
            return i
    return len(units)


def _step(messages: Sequence[Message], facts: Sequence[Facts], start: int, end: int) -> Unit:
    is_called = facts[start].role == "assistant"
    if is_called and end == start + 1 and not facts[start].calls:
        return Unit("answer", start, end)
    waiting = [(call, Place(start, call.part)) for call in facts[start].calls]
    if is_called and not waiting:
        waiting = [(_plain(messages[start]), Place(start, WHOLE))]
    uses = []
    for i in range(start + is_called, end):
        for result in facts[i].results:
            at = Place(i, result.part)
            if not waiting:
                uses.append(Use("", "", None, at))
                continue
            same = (n for n, (call, _) in enumerate(waiting) if call.id == result.id)
            call, place = waiting.pop(next(same, 0))
            uses.append(Use(call.name, call.arguments, place, at))
    uses += [Use(call.name, call.arguments, place, None) for call, place in waiting]
    fixed = not is_called or any(each.words for each in facts[start + 1 : end])
    return Unit("step", start, end, tuple(uses), fixed)


def _parts(message: Message) -> list[Message]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [part if isinstance(part, dict) else {} for part in content]


def tool_calls(message: Message) -> list[Any]:
    """OpenAI's calls in a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _calls(message: Message) -> tuple[Call, ...]:
    calls = tool_calls(message)
    if calls:
        found = []
        for i, call in enumerate(calls):
            call = call if isinstance(call, dict) else {}
            function = call.get("function")
            function = function if isinstance(function, dict) else {}
            name, arguments = str(function.get("name", "")), function.get("arguments")
            found.append(Call(i, call.get("id"), name, as_json(arguments)))
        return tuple(found)
    return tuple(
        Call(i, part.get("id"), str(part.get("name", "")), as_json(part.get("input")))
        for i, part in enumerate(_parts(message))
        if part.get("type") == "tool_use"
    )


def _plain(message: Message) -> Call:
    text = message.get("content")
    blocks = list(_fences(text)) if isinstance(text, str) else []
    name = blocks[0].name or "bash" if blocks else ""
    return Call(WHOLE, None, name, "\n".join(block.body for block in blocks))


def as_json(arguments: object) -> str:
    """Arguments as text, which they often are; "" for what is nested too deeply to be any."""
    if isinstance(arguments, str):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False, default=str)
    except RecursionError:
        return ""


def clear_fences(text: str, body: str) -> str:
    """A plain call's text with `body` in place of its commands."""
    pieces, at = [], 0
    for fence in _fences(text):
        pieces += [text[at : fence.start], f"{_FENCE}{fence.name}\n{body}\n{_FENCE}"]
        at = fence.end
    return "".join([*pieces, text[at:]])


class _Fence(NamedTuple):
    """A block of commands, at text[start:end] with its fences. name: of the language."""

    start: int
    end: int
    name: str
    body: str


def _fences(text: str) -> Iterator[_Fence]:
    """In one pass: texts come from strangers, and are long."""
    at = 0
    while (start := text.find(_FENCE, at)) >= 0:
        line = text.find("\n", start)
        close = text.find(_FENCE, line + 1) if line >= 0 else -1
        if close < 0:
            return
        named = _WORD.match(text, start + len(_FENCE), line)
        at = close + len(_FENCE)
        body = text[line + 1 : close].removesuffix("\n")
        yield _Fence(start, at, named[0] if named else "", body)
