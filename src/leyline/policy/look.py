"""A view of a conversation for policies: tokens, calls and results, each found once a message."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

from leyline.policy.turns import (
    WHOLE,
    Facts,
    Message,
    Place,
    Unit,
    as_json,
    facts_of,
    groups_of,
    tool_calls,
    unit_of,
)

T = TypeVar("T")
Count = Callable[[str], int]
"""Tokens of a text."""

THOUGHTS = ("reasoning_content", "reasoning")
"""Fields that servers put a model's reasoning in."""

_OPEN, _CLOSE = "<think>", "</think>"
_BLANKS = re.compile(r"\s*")
_BLOCKS = ("thinking", "redacted_thinking")
_TEXTS = ("text", "input_text", "refusal")
_EVICTED = re.compile(r"\[(evicted|cleared)(: [^\n\]]*)?\]")
"""Policies' own words, and those of the rules that `context_management` brings."""


def estimate(text: str) -> int:
    """Tokens of a text, at four characters each: near enough, and the same everywhere."""
    return (len(text) + 3) // 4


class Look:
    """What policies ask about messages. Messages are told apart by identity, so they must neither
    be changed nor stand twice in a view. placeholders: texts that policies put for results."""

    def __init__(self, count: Count = estimate, placeholders: Iterable[str] = ()) -> None:
        self.count = count
        self._placeholders = frozenset(placeholders)
        self._counted: dict[str, int] = {}
        self._seen: dict[int, Message] = {}  # keeps them alive, so that no id is used again
        self._origin: dict[int, int] = {}
        self._tokens: dict[int, int] = {}
        self._facts: dict[int, Facts] = {}
        self._last: tuple[Sequence[Message], list[Facts], list[Unit]] = ([], [], [])
        self._known: dict[tuple[Hashable, ...], Any] = {}
        self.given = 0

    def take(self, message: Message) -> Message:
        """The next message of the conversation, as a copy of its own."""
        copy = dict(message)
        self._seen[id(copy)] = copy
        self._origin[id(copy)] = self.given
        self.given += 1
        return copy

    def edit(self, message: Message, **changes: Any) -> Message:
        """The message with other fields, known to be the same one."""
        new = {**message, **changes}
        self.follow(new, message)
        return new

    def follow(self, new: Message, message: Message) -> None:
        """From now on `new` is known to be the same message."""
        self._seen[id(new)] = new
        if id(message) in self._origin:
            self._origin[id(new)] = self._origin[id(message)]

    def forget(self, messages: Iterable[Message]) -> None:
        """Nothing is known of edited messages that weren't taken after all."""
        known: tuple[dict[int, Any], ...] = (self._seen, self._origin, self._tokens, self._facts)
        for message in messages:
            for each in known:
                each.pop(id(message), None)

    def origin(self, message: Message) -> int | None:
        """Its place among the messages that were given; None for one that a policy added."""
        return self._origin.get(id(message))

    def facts(self, message: Message) -> Facts:
        """What it is."""
        found = self._facts.get(id(message))
        if found is None:
            self._seen[id(message)] = message
            found = self._facts[id(message)] = facts_of(message)
        return found

    def tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of the messages' texts, each by itself; what a template puts around them isn't
        counted."""
        return sum(map(self._tokens_of, messages))

    def units(self, messages: Sequence[Message]) -> list[Unit]:
        """The messages in units, with positions in `messages`. From one look to the next little
        changes, and that near the end: what stands before it is taken over."""
        old, facts, units = self._last
        same = common(old, messages)
        facts = facts[:same] + [self.facts(message) for message in messages[same:]]
        n = len(units)
        while n and units[n - 1].end >= same:  # one that ended there may go on now
            n -= 1
        units = units[:n]
        for start, end in groups_of(facts, units[-1].end if units else 0):
            units.append(unit_of(messages, facts, start, end))
        self._last = (list(messages), facts, units)
        return units

    def is_evicted(self, text: str) -> bool:
        """Whether a result is what a policy put in its place."""
        if text in self._placeholders:
            return True
        return text.startswith("[") and _EVICTED.fullmatch(text) is not None

    def once(self, function: Callable[..., T], *arguments: Hashable) -> T:
        """What a function without side effects gives, called once in a conversation: policies are
        asked again at each of its calls."""
        key = (function, *arguments)
        if key not in self._known:
            self._known[key] = function(*arguments)
        found: T = self._known[key]
        return found

    def _tokens_of(self, message: Message) -> int:
        found = self._tokens.get(id(message))
        if found is None:
            self._seen[id(message)] = message
            found = self._tokens[id(message)] = sum(map(self._count, texts_of(message)))
        return found

    def _count(self, text: str) -> int:
        found = self._counted.get(text)
        if found is None:
            found = self._counted[text] = self.count(text)
        return found


def common(a: Sequence[Message], b: Sequence[Message]) -> int:
    """How many messages both begin with."""
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        if one is not other:
            return i
    return min(len(a), len(b))


def texts_of(message: Message) -> list[str]:
    """The texts in a message: content, reasoning, calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts: list[str] = [content] if isinstance(content, str) else []
    texts += [_part_text(part) for part in parts if isinstance(part, dict)]
    texts += [message[field] for field in THOUGHTS if isinstance(message.get(field), str)]
    if tool_calls(message):
        for call in facts_of(message).calls:
            texts += [call.name, call.arguments]
    return [text for text in texts if text]


def content_text(content: object) -> str:
    """The text of a content, of whichever shape."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(_part_text(part) for part in content if isinstance(part, dict))


def content_of(messages: Sequence[Message], place: Place) -> object:
    """The content of the result that stands there, of whichever shape."""
    message = messages[place.message]
    part = message if place.part == WHOLE else message["content"][place.part]
    return part.get("content")


def output_of(messages: Sequence[Message], place: Place) -> str:
    """The text of the result that stands there."""
    return content_text(content_of(messages, place))


def is_error(messages: Sequence[Message], place: Place) -> bool:
    """Whether the result there says itself that the call failed."""
    message = messages[place.message]
    part = message if place.part == WHOLE else message["content"][place.part]
    return part.get("is_error") is True


def has_thoughts(message: Message, look: Look) -> bool:
    """Whether an assistant's message has reasoning."""
    if message.get("role") != "assistant":
        return False
    if any(message.get(field) for field in THOUGHTS):
        return True
    content = message.get("content")
    if isinstance(content, str):
        return look.once(behind_thoughts, content) is not None
    return isinstance(content, list) and any(map(is_thought, content))


def behind_thoughts(text: str) -> str | None:
    """A text behind its reasoning, one block or several; None if there is none.

    A block ends with `</think>`; the first may lack its `<think>`, which stands in the prompt then,
    and so may any other: what is left has no reasoning, else it would be cut again.
    """
    start, found = _behind_blanks(text, 0), False
    while True:
        inside = start + len(_OPEN) * text.startswith(_OPEN, start)
        close = text.find(_CLOSE, inside)
        if close < 0 or text.find(_OPEN, inside, close) >= 0:
            return text[start:] if found else None
        start, found = _behind_blanks(text, close + len(_CLOSE)), True


def _behind_blanks(text: str, start: int) -> int:
    blanks = _BLANKS.match(text, start)
    return blanks.end() if blanks else start


def is_thought(part: object) -> bool:
    """Whether a part of a content is reasoning."""
    return isinstance(part, dict) and part.get("type") in _BLOCKS


def is_text(part: object) -> bool:
    """Whether a part of a content is plain text."""
    return isinstance(part, dict) and part.get("type") in _TEXTS


def _part_text(part: Message) -> str:
    kind = part.get("type")
    if kind == "tool_result":
        return content_text(part.get("content"))
    if kind == "tool_use":
        return f"{part.get('name', '')}\n{as_json(part.get('input'))}"
    for field in ("text", "thinking", "data", "refusal", "input_text"):
        if isinstance(part.get(field), str):
            return str(part[field])
    return ""
