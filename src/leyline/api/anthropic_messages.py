"""Anthropic's messages from untrusted data, and as chat messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from leyline.api.clearable import blocks_of
from leyline.api.errors import FieldError
from leyline.api.messages import Message
from leyline.policy.errors import short

Block = dict[str, Any]
_BLOCKS = {
    # What a role's messages may have; for each block the fields that must be there, as what.
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_FIELDS: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
_UNREADABLE = ("image", "document", "container_upload")
_KINDS: dict[type, str] = {str: "text", dict: "an object"}


def check_system(given: object, field: str = "system") -> str | list[Block] | None:
    """The system prompt: text, text blocks, or none. Raises FieldError."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise FieldError(field, f"must be text or a list of text blocks, not {short(given)}.")
    for i, block in enumerate(given):
        _check_block(block, ("text",), f"{field}[{i}]")
    return given


def check_conversation(given: object, field: str = "messages") -> list[Message]:
    """The messages as they came, every block one that is known here. Raises FieldError.

    Fields that are not known, as cache_control, stay and mean nothing. Every tool use must have its
    result in the user's next message, in front of all else, and every result its use.
    """
    if not isinstance(given, list) or not given:
        raise FieldError(field, f"must be a list of at least one message, not {short(given)}.")
    for i, message in enumerate(given):
        _check_message(message, f"{field}[{i}]")
    if given[-1]["role"] == "assistant":
        what = "is the assistant's; to go on with it is not supported, end with a user's message."
        raise FieldError(f"{field}[{len(given) - 1}]", what, "unsupported_parameter")
    _check_pairs(given, field)
    return given


def to_chat(system: str | list[Block] | None, messages: Iterable[Message]) -> list[Message]:
    """Checked messages behind their system prompt, as chat messages.

    Messages of one role in a row are one. A tool result becomes a message of role tool, thinking
    the field `reasoning_content`; redacted thinking can't be read and is left out.
    """
    chat = [{"role": "system", "content": _content(_as_blocks(system))}] if system else []
    for role, group in groupby(messages, key=lambda message: message["role"]):
        blocks = [block for message in group for block in blocks_of(message)]
        chat += [_assistant(blocks)] if role == "assistant" else _others(role, blocks)
    return chat


def _assistant(blocks: list[Block]) -> Message:
    message: Message = {"role": "assistant", "content": _content(_only("text", blocks))}
    if thinking := [block["thinking"] for block in _only("thinking", blocks)]:
        message["reasoning_content"] = "\n".join(thinking)
    if calls := [_call(block) for block in _only("tool_use", blocks)]:
        message["tool_calls"] = calls
    return message


def _others(role: str, blocks: list[Block]) -> list[Message]:
    """A message for each tool result and for each run of text blocks, in their order. Checked
    ones have the results in front, where templates want them: right behind the calls."""
    messages: list[Message] = []
    for kind, group in groupby(blocks, key=lambda block: block["type"]):
        if kind == "text":
            messages.append({"role": role, "content": _content(list(group))})
        else:
            messages += [_result(block) for block in group]
    return messages


def _call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block["input"], ensure_ascii=False)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Block) -> Message:
    content = _content(_as_blocks(block.get("content") or ""))
    message = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
    return message | ({"is_error": True} if block.get("is_error") else {})


def _content(blocks: list[Block]) -> str | list[Block]:
    """Text blocks as the content of a chat message."""
    if len(blocks) > 1:
        return [{"type": "text", "text": block["text"]} for block in blocks]
    return blocks[0]["text"] if blocks else ""


def _as_blocks(content: str | list[Block]) -> list[Block]:
    return blocks_of({"content": content})


def _only(kind: str, blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block["type"] == kind]


def _check_message(message: object, field: str) -> None:
    if not isinstance(message, dict):
        raise FieldError(field, f"must be an object, not {short(message)}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _BLOCKS:
        what = f"must be user, assistant or system, not {short(role)}."
        raise FieldError(f"{field}.role", what)
    if isinstance(content, str):
        return
    if not isinstance(content, list) or (not content and role != "assistant"):
        what = f"must be text or a list of blocks, not {short(content)}."
        raise FieldError(f"{field}.content", what)
    for i, block in enumerate(content):
        _check_block(block, _BLOCKS[role], f"{field}.content[{i}]")


def _check_block(block: object, allowed: tuple[str, ...], field: str) -> None:
    if not isinstance(block, dict):
        raise FieldError(field, f"must be an object, not {short(block)}.")
    kind = block.get("type")
    if kind in _UNREADABLE:
        what = f"{kind} is not supported, models are given text only here."
        raise FieldError(f"{field}.type", what, "unsupported_parameter")
    if not isinstance(kind, str) or kind not in allowed:
        what = f"must be one of {', '.join(allowed)} here, not {short(kind)}."
        raise FieldError(f"{field}.type", what)
    for name, expected in _FIELDS[kind].items():
        if not isinstance(block.get(name), expected):
            what = f"must be {_KINDS[expected]}, not {short(block.get(name))}."
            raise FieldError(f"{field}.{name}", what)
    if kind == "tool_result":
        _check_result(block, field)


def _check_result(block: Block, field: str) -> None:
    if not isinstance(block.get("is_error"), bool | None):
        what = f"must be true or false, not {short(block['is_error'])}."
        raise FieldError(f"{field}.is_error", what)
    content = block.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        what = f"must be text or a list of text blocks, not {short(content)}."
        raise FieldError(f"{field}.content", what)
    for i, part in enumerate(content):
        _check_block(part, ("text",), f"{field}.content[{i}]")


def _check_pairs(messages: list[Message], field: str) -> None:
    """Raises FieldError for a tool use without its result behind the assistant's messages, for the
    other way round, and for anything between the two."""
    waiting: dict[str, str] = {}
    """Ids of the assistant's last tool uses, and where these stand."""
    numbered = enumerate(messages)
    for is_calling, group in groupby(numbered, key=lambda each: each[1]["role"] == "assistant"):
        blocks = [each for i, message in group for each in _placed(message, f"{field}[{i}]")]
        if is_calling:
            _open(waiting, blocks)
        else:
            _close(waiting, blocks)


def _placed(message: Message, field: str) -> list[tuple[str, Block]]:
    """A message's blocks, each with where it stands."""
    if isinstance(message["content"], str):
        return [(f"{field}.content", block) for block in blocks_of(message)]
    return [(f"{field}.content[{b}]", block) for b, block in enumerate(message["content"])]


def _open(waiting: dict[str, str], blocks: Iterable[tuple[str, Block]]) -> None:
    """Note the assistant's tool uses, each block with its place."""
    for where, block in blocks:
        if block["type"] != "tool_use":
            continue
        if block["id"] in waiting:
            what = f"{short(block['id'])} is the id of {waiting[block['id']]} too."
            raise FieldError(f"{where}.id", what)
        waiting[block["id"]] = where


def _close(waiting: dict[str, str], blocks: Iterable[tuple[str, Block]]) -> None:
    """Take out all that is waiting, by the results among what others say then."""
    early: str | None = None
    """Where something else stands while results are still to come."""
    for where, block in blocks:
        if block["type"] != "tool_result":
            early = early or (where if waiting else None)
            continue
        name = block["tool_use_id"]
        if waiting.pop(name, None) is None:
            what = f"{short(name)} is no tool use of the assistant's message before."
            raise FieldError(f"{where}.tool_use_id", what)
        if early is not None:
            raise FieldError(early, "stands before a tool's result; results come first.")
    if waiting:
        raise FieldError(next(iter(waiting.values())), "has no result in the user's message.")
