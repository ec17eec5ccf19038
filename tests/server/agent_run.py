"""A session as an agent would have it: it grows, and old tool outputs are cleared."""

from __future__ import annotations

from typing import Any

import httpx
from tiny_server import words

POLICY = {"name": "clear_tool_outputs", "keep": 1}


def history(turn: int, seed: int = 0) -> list[dict[str, Any]]:
    """The messages of call number `turn`, from 1 on."""
    messages = [{"role": "system", "content": words(seed, 30)}]
    for i in range(turn):
        messages += [
            {"role": "user", "content": words(seed + 100 * i + 1, 20)},
            {"role": "tool", "content": words(seed + 100 * i + 2, 60)},
            {"role": "assistant", "content": words(seed + 100 * i + 3, 40)},
        ]
    return messages


def ask(
    http: httpx.Client, session: str, messages: list[dict[str, Any]], **leyline: Any
) -> dict[str, Any]:
    """One call; returns the report."""
    body = {
        "messages": messages,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "leyline": {"session": session, **leyline},
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["leyline"]


def run_agent(http: httpx.Client, session: str, turns: int = 4, seed: int = 0) -> list[Any]:
    """Calls 1 to `turns` with the policy; their reports."""
    return [ask(http, session, history(i, seed), policy=POLICY) for i in range(1, turns + 1)]


def turns_of(http: httpx.Client, session: str, **query: Any) -> list[dict[str, Any]]:
    """What is on record."""
    answer = http.get("/v1/leyline/turns", params={"session": session, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()["turns"]
