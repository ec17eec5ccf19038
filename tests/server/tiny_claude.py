"""Anthropic's official client for the tiny server, and conversations for it."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from tiny_server import Running, words

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SYSTEM = words(1, 40)
BETA = ["context-management-2025-06-27"]
TOOL: dict[str, Any] = {
    "name": "run",
    "description": "Runs a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = {"type": "tool_use", "id": "t1", "name": "run", "input": {"command": "ls", "deep": [1, 2.5]}}


def client_of(server: Running, **auth: Any) -> Anthropic:
    """It must not try again: tests want to see the first answer."""
    auth = auth or {"api_key": server.keys[0] if server.keys else "none"}
    return Anthropic(base_url=server.url, max_retries=0, timeout=60, **auth)


def ask(client: Anthropic, messages: list[Any] = HELLO, **more: Any) -> Any:
    """Greedily, unless told otherwise. What this client has no word for goes into `extra_body`."""
    extra = {"temperature": 0, **more.pop("extra_body", {})}
    given = {"model": "tiny", "system": SYSTEM, "max_tokens": 6, "extra_body": extra, **more}
    return client.messages.create(messages=messages, **given)


def prompt_of(answer: Any) -> int:
    usage = answer.usage
    return usage.input_tokens + usage.cache_read_input_tokens


def agent_turn(i: int, size: int = 60) -> list[Any]:
    """A tool use and its result."""
    call = {"type": "tool_use", "id": f"t{i}", "name": "run", "input": {"command": f"step {i}"}}
    result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": words(500 + i, size)}
    text = {"type": "text", "text": words(300 + i, 10)}
    return [{"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result]}]
