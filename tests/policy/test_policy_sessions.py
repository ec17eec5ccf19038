"""On the recorded sessions, against counts made by other means; and the tables in the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leyline.policy import BUILT_IN, apply_policy
from leyline.policy.__main__ import freed, options_of
from leyline.traces import calls, load_traces

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
Message = dict[str, Any]


def prompts() -> Iterator[list[Message]]:
    """The last prompt of each session: a task, then pairs of a call and a result."""
    for session in load_traces():
        yield list(calls(session))[-1].messages


def size(text: str) -> int:
    return -(-len(text) // 4)


def commands(prompt: list[Message]) -> list[str | None]:
    """Of each step; None where there is no command."""
    found = [re.findall(r"```bash\n(.*?)\n```", m["content"], re.DOTALL) for m in prompt[1::2]]
    return ["\n".join(each) if each else None for each in found]


def test_clear_tool_outputs() -> None:
    for prompt in prompts():
        (applied,) = apply_policy({"name": "clear_tool_outputs", "keep": 2}, prompt).applied
        old = [message["content"] for message in prompt[2::2]][:-2]
        assert applied.tool_uses == len(old)
        assert applied.tokens == sum(map(size, old)) - size("[evicted: old tool output]") * len(old)


def test_clear_tool_outputs_with_a_trigger() -> None:
    """The same from the other end: keep track of what stands, call by call."""
    for prompt in prompts():
        spec = {"name": "clear_tool_outputs", "keep": 3, "trigger_tokens": 4000, "at_least": 500}
        standing = [size(prompt[0]["content"])]
        live: list[int] = []
        freed = cleared = 0
        for call, result in zip(prompt[1::2], prompt[2::2], strict=True):
            standing.append(size(call["content"]))
            live.append(size(result["content"]))
            old = live[:-3]
            n = len(old)
            words = [f"[evicted: {n} old tool outputs]", *["[evicted]"] * (n - 1)]
            left = sum(map(size, words if n > 1 else ["[evicted: old tool output]"]))
            if n and sum(standing) + sum(live) > 4000 and sum(old) - left >= 500:
                standing.append(left)
                live, freed, cleared = live[-3:], freed + sum(old) - left, cleared + n
        (applied,) = apply_policy(spec, prompt).applied
        assert (applied.tool_uses, applied.tokens) == (cleared, freed)


def test_drop_failed_calls() -> None:
    dropped = 0
    for prompt in prompts():
        steps = list(zip(commands(prompt), prompt[1::2], prompt[2::2], strict=True))
        want = [prompt[0]]
        for i, (command, call, result) in enumerate(steps):
            code = re.match(r"<returncode>(-?\d+)", result["content"])
            failed = command is not None and code is not None and code[1] != "0"
            again = [
                later
                for later, _, output in steps[i + 1 :]
                if later == command and output["content"].startswith("<returncode>0<")
            ]
            if failed and again:
                dropped += 1
            else:
                want += [call, result]
        assert apply_policy({"name": "drop_failed_calls"}, prompt).messages == want
    assert dropped > 5  # there are some in the recordings


def test_drop_stale_reads_of_repeated_commands() -> None:
    for prompt in prompts():
        edited = apply_policy({"name": "drop_stale_reads"}, prompt).messages
        made = commands(prompt)
        for i, (command, before, after) in enumerate(
            zip(made, prompt[2::2], edited[2::2], strict=True)
        ):
            if command is not None and command in made[i + 1 :]:
                assert after["content"] == "[evicted: stale tool output]"
            elif not re.match(r"(cd .* && )?(cat|nl|tac|head|tail|sed -n) ", command or ""):
                assert after == before


def test_keep_window() -> None:
    for prompt in prompts():
        edited = apply_policy({"name": "keep_window", "newest": 1500}, prompt).messages
        kept = (len(edited) - 1) // 2
        sizes = [size(message["content"]) for message in prompt[1:]]
        pairs = [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
        assert edited == [prompt[0], *prompt[len(prompt) - 2 * kept :]]
        assert sum(pairs[-kept:]) <= 1500 or kept == 1
        assert kept == len(pairs) or sum(pairs[-kept - 1 :]) > 1500


def test_counted_as_asked() -> None:
    """By the counter that is given, for the trigger as for the report."""
    prompt = next(prompts())
    spec = {"name": "clear_tool_outputs", "trigger_tokens": 500_000}
    assert apply_policy(spec, prompt, count=len).tokens == 0
    spec["trigger_tokens"] = 50_000
    edited = apply_policy(spec, prompt, count=len)
    assert edited.tokens == sum(len(a["content"]) for a in prompt) - sum(
        len(a["content"]) for a in edited.messages
    )
    assert apply_policy(spec, prompt).tokens == 0 < edited.tokens


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_docs_have_the_options(name: str) -> None:
    assert f"## {name}\n" in DOCS.read_text()
    assert options_of(BUILT_IN[name]) in DOCS.read_text()


def test_the_docs_have_what_is_freed() -> None:
    assert freed(load_traces()) in DOCS.read_text()
