"""What of an Anthropic conversation can be cleared: where it stands and how large it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Place = tuple[int, int]
"""A block: the message's number and the block's in it."""

PLACEHOLDER = "[cleared: old tool result]"
"""Always the same text: what was cleared once must not change again."""
PER_MESSAGE = 5
"""Tokens that a chat template puts around a message, about."""
THINKING = ("thinking", "redacted_thinking")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool use that has its result. The tokens are those that clearing would free."""

    name: str
    call: Place
    result: Place
    result_tokens: int
    input_tokens: int


@dataclass(slots=True)
class Turn:
    """A turn with thinking, which stands in `messages`; `start`: the first of them."""

    start: int
    messages: set[int] = field(default_factory=set)
    tokens: int = 0


class Clearable:
    """A conversation's tool uses, in the order of their results, and its turns with thinking.

    ends: the lengths of those beginnings that may have been sent as requests: all that end with a
    message which isn't the assistant's. Whether one is among them depends on nothing behind it.
    """

    def __init__(
        self, messages: Sequence[Message], count: Callable[[str], int], head: int = 0
    ) -> None:
        """count: tokens of a text. head: tokens in front of the messages."""
        self._count = count
        self._sums = [head]
        self.uses: list[ToolUse] = []
        self.turns: list[Turn] = []
        self.ends: list[int] = []
        open_uses: dict[str, tuple[Place, dict[str, Any]]] = {}
        turn: Turn | None = None
        for m, message in enumerate(messages):
            if message["role"] != "assistant":
                self.ends.append(m + 1)
            if message["role"] == "user" and _speaks(message):
                turn = None
            size = PER_MESSAGE
            for b, block in enumerate(blocks_of(message)):
                tokens = self._size(block)
                size += tokens
                kind = block.get("type")
                if kind in THINKING:
                    if turn is None:
                        self.turns.append(turn := Turn(m))
                    turn.tokens += tokens
                    turn.messages.add(m)
                elif kind == "tool_use":
                    open_uses[block["id"]] = ((m, b), block)
                elif kind == "tool_result" and block["tool_use_id"] in open_uses:
                    self._pair(*open_uses.pop(block["tool_use_id"]), (m, b), tokens)
            self._sums.append(self._sums[-1] + size)

    def tokens(self, end: int) -> int:
        """Of a prompt with the first `end` messages, nothing cleared."""
        return self._sums[end]

    def _pair(self, call: Place, block: dict[str, Any], result: Place, tokens: int) -> None:
        self.uses.append(
            ToolUse(
                name=block["name"],
                call=call,
                result=result,
                result_tokens=tokens - self._count(PLACEHOLDER),
                input_tokens=self._size(block) - self._size({**block, "input": {}}),
            )
        )

    def _size(self, block: dict[str, Any]) -> int:
        return sum(self._count(text) for text in _texts(block))


def emptied(
    messages: Sequence[Message], thoughtless: set[int], results: set[Place], inputs: set[Place]
) -> list[Message]:
    """The messages without the thinking of the messages `thoughtless`, with a placeholder in
    `results` and nothing in `inputs`."""
    touched = thoughtless | {m for m, _ in results | inputs}
    out = []
    for m, message in enumerate(messages):
        if m not in touched:
            out.append(message)
            continue
        content = []
        for b, block in enumerate(blocks_of(message)):
            if m in thoughtless and block.get("type") in THINKING:
                continue
            if (m, b) in results:
                block = {**block, "content": PLACEHOLDER}
            elif (m, b) in inputs:
                block = {**block, "input": {}}
            content.append(block)
        out.append({**message, "content": content})
    return out


def blocks_of(message: Message) -> list[dict[str, Any]]:
    """A message's content as blocks."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _speaks(message: Message) -> bool:
    """Whether the user says something, and doesn't only hand in results of tools."""
    return any(block.get("type") != "tool_result" for block in blocks_of(message))


def _texts(block: dict[str, Any]) -> Iterator[str]:
    """What a model reads of a block."""
    match block.get("type"):
        case "text":
            yield block["text"]
        case "thinking":
            yield block["thinking"]
        case "tool_use":
            call = {"name": block["name"], "arguments": block["input"]}
            yield json.dumps(call, ensure_ascii=False)
        case "tool_result":
            content = block.get("content") or ""
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                yield from _texts(part)
