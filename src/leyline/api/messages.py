"""Chat messages from untrusted data, made uniform for chat templates."""

from __future__ import annotations

import json
from typing import Any

from leyline.api.errors import FieldError
from leyline.policy.errors import short

Message = dict[str, Any]
_TEXT = {"text": "text", "input_text": "text", "refusal": "refusal"}


def check_messages(given: object, field: str = "messages") -> list[Message]:
    """The messages, each an object with a role and a content. Raises FieldError.

    Contents stay as they are, text or a list of text parts; fields that are not known are kept for
    the chat template.
    """
    if not isinstance(given, list) or not given:
        raise FieldError(field, f"must be a list of at least one message, not {short(given)}.")
    for i, message in enumerate(given):
        _check(message, f"{field}[{i}]")
    return given


def check_tools(given: object, field: str = "tools") -> list[dict[str, Any]]:
    """Tools, each an object that the chat template gets as it is. Raises FieldError."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise FieldError(field, f"must be a list, not {short(given)}.")
    for i, tool in enumerate(given):
        if not isinstance(tool, dict):
            raise FieldError(f"{field}[{i}]", f"must be an object, not {short(tool)}.")
    return given


def for_template(messages: list[Message]) -> list[Message]:
    """Checked messages as chat templates expect them: contents as text, no content as an empty one,
    arguments of tool calls as objects."""
    return [_uniform(message) for message in messages]


def _check(message: object, field: str) -> None:
    if not isinstance(message, dict):
        raise FieldError(field, f"must be an object, not {short(message)}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise FieldError(f"{field}.role", f"must be a word like user, not {short(role)}.")
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(calls, f"{field}.tool_calls")
    if content is None:
        if role != "assistant":
            raise FieldError(f"{field}.content", f"is missing in a message of role {short(role)}.")
    elif isinstance(content, list):
        for i, part in enumerate(content):
            _check_part(part, f"{field}.content[{i}]")
    elif not isinstance(content, str):
        raise FieldError(
            f"{field}.content", f"must be text or a list of text parts, not {short(content)}."
        )


def _check_part(part: object, field: str) -> None:
    if not isinstance(part, dict):
        raise FieldError(field, f"must be an object, not {short(part)}.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT:
        raise FieldError(f"{field}.type", f"{short(kind)} is not supported, only text is.")
    if not isinstance(part.get(_TEXT[kind]), str):
        raise FieldError(
            f"{field}.{_TEXT[kind]}", f"must be text, not {short(part.get(_TEXT[kind]))}."
        )


def _check_calls(calls: object, field: str) -> None:
    if not isinstance(calls, list):
        raise FieldError(field, f"must be a list, not {short(calls)}.")
    for i, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise FieldError(f"{field}[{i}]", "must be an object with a function.")


def _uniform(message: Message) -> Message:
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part[_TEXT[part["type"]]] for part in content)
    message["content"] = content or ""
    if message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return message


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The API has arguments as JSON in a string, chat templates write objects."""
    function = call["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
