"""Made-up conversations in three shapes, and what holds of every conversation that is sent."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Message = dict[str, Any]
SHAPES = ("openai", "anthropic", "plain")
COMMANDS = ("cat a.py", "cat b.py", "head -n 3 a.py", "sed -i s/x/y/ a.py", "pytest", "pytest -x")
TAG = "tag"
"""A field with each message's place in the conversation; policies keep it."""


@st.composite
def conversations(draw: st.DrawFn, shape: str, exchanges: int = 3, steps: int = 4) -> list[Message]:
    """A whole conversation: exchanges of a user's words, steps with calls, and mostly an answer."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": "Be brief."})
    for _ in range(draw(st.integers(1, exchanges))):
        messages.append({"role": "user", "content": "Do it. " * draw(st.integers(1, 30))})
        for _ in range(draw(st.integers(0, steps))):
            messages += draw(_step(shape))
        if draw(st.integers(0, 3)) or messages[-1]["role"] == "user":
            messages.append(draw(_said("Done.", shape)))
    return [{**message, TAG: i} for i, message in enumerate(messages)]


@st.composite
def _said(draw: st.DrawFn, text: str, shape: str) -> Message:
    thought = draw(st.sampled_from(["", "I wonder. " * 9]))
    message: Message = {"role": "assistant", "content": text}
    if thought and shape == "anthropic":
        parts = [{"type": "thinking", "thinking": thought}, {"type": "text", "text": text}]
        message["content"] = parts
    elif thought and draw(st.booleans()):
        message["reasoning_content"] = thought
    elif thought:
        blocks = draw(st.integers(1, 2))
        message["content"] = f"<think>{thought}</think>\n" * blocks + text
    return message


@st.composite
def _step(draw: st.DrawFn, shape: str) -> list[Message]:
    n = 1 if shape == "plain" else draw(st.integers(1, 3))
    calls = [draw(st.sampled_from(COMMANDS)) for _ in range(n)]
    outputs = [draw(_output()) for _ in calls]
    said = draw(_said("So.", shape))
    if shape == "plain":
        said["content"] += f"\n```bash\n{calls[0]}\n```"
        return [said, {"role": "tool", "content": outputs[0]}]
    ids = [draw(st.sampled_from("xyz")) for _ in calls]  # ids repeat in real harnesses
    name = draw(st.sampled_from(["bash", "shell"]))
    if shape == "anthropic":
        parts = said["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        for id, call in zip(ids, calls, strict=True):
            parts.append({"type": "tool_use", "id": id, "name": name, "input": {"command": call}})
        results = [
            {"type": "tool_result", "tool_use_id": id, "content": output}
            for id, output in zip(ids, outputs, strict=True)
        ]
        return [{**said, "content": parts}, {"role": "user", "content": results}]
    said["tool_calls"] = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": _json(call)}}
        for id, call in zip(ids, calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "content": output}
        for id, output in zip(ids, outputs, strict=True)
    ]
    return [said, *results]


@st.composite
def _output(draw: st.DrawFn) -> str:
    code = draw(st.sampled_from([0, 0, 1]))
    return f"<returncode>{code}</returncode>\n" + "line of output\n" * draw(st.integers(0, 40))


def _json(command: str) -> str:
    return json.dumps({"command": command})


def assert_whole(messages: list[Message]) -> None:
    """Calls have their results and results their calls, side by side; user and assistant take
    turns, as the strictest templates want it."""
    waiting: list[Any] = []
    last = "assistant"
    for message in messages:
        role, content = message["role"], message["content"]
        parts = content if isinstance(content, list) else []
        results = [part["tool_use_id"] for part in parts if part["type"] == "tool_result"]
        if role == "tool":
            results = [message.get("tool_call_id")]
        if results:
            for id in results:
                assert id in waiting, f"a result without its call: {message}"
                waiting.remove(id)
            last = "tool"
            continue
        assert not waiting, f"a call without its result before {message}"
        if role == "system":
            continue
        assert role != last, f"two of {role} in a row"
        last = role
        if role == "assistant":
            waiting = [call["id"] for call in message.get("tool_calls") or []]
            waiting += [part["id"] for part in parts if part["type"] == "tool_use"]
            if isinstance(content, str) and "```bash" in content:
                waiting.append(None)
    assert not waiting


POLICIES: list[st.SearchStrategy[dict[str, Any]]] = [
    st.fixed_dictionaries(
        {"name": st.just("clear_tool_outputs"), "keep": st.integers(0, 3)},
        optional={
            "by": st.sampled_from(["outputs", "turns"]),
            "trigger_tokens": st.integers(0, 600),
            "trigger_uses": st.integers(0, 4),
            "at_least": st.integers(0, 200),
            "exclude": st.just(["shell"]),
            "inputs": st.sampled_from([True, False, ["bash"]]),
            "placeholder": st.sampled_from(["gone", None]),
        },
    ),
    st.fixed_dictionaries({"name": st.just("clear_thinking"), "keep": st.integers(0, 2)}),
    st.fixed_dictionaries(
        {"name": st.just("drop_failed_calls"), "same": st.sampled_from(["call", "program"])}
    ),
    st.fixed_dictionaries(
        {"name": st.just("drop_stale_reads"), "repeats": st.booleans()},
        optional={"placeholder": st.sampled_from(["gone", "old"])},
    ),
    st.fixed_dictionaries(
        {"name": st.just("keep_window"), "newest": st.integers(0, 500)},
        optional={"first": st.integers(0, 300)},
    ),
]
"""Those that look back, with all kinds of options."""
