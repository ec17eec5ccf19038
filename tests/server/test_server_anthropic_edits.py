"""Anthropic's `context_management`, and the `leyline` object on its routes, over HTTP."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from tiny_claude import BETA, HELLO, SYSTEM, TOOL, agent_turn, ask, client_of, prompt_of
from tiny_server import Running, tiny_tokenizer, words

from leyline.api.clearable import PLACEHOLDER


@pytest.fixture
def claude(server: Running) -> Anthropic:
    return client_of(server)


def managed(client: Anthropic, messages: list[Any], leyline: Any = None, **more: Any) -> Any:
    """With a rule that clears all but the newest three results once six are left."""
    rule: Any = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 5},
    }
    return client.beta.messages.create(
        model="tiny",
        max_tokens=4,
        system=SYSTEM,
        tools=[TOOL],
        messages=messages,
        betas=BETA,
        context_management={"edits": [rule]},
        extra_body={"temperature": 0, "leyline": leyline},
        **more,
    )


def size(text: str) -> int:
    return len(tiny_tokenizer()(text, add_special_tokens=False).input_ids)


CLEARED = [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]
"""Results gone with each turn."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("session", ["agent", None])
def test_clearing_does_not_cost_the_cached_prefix(
    claude: Anthropic, session: str | None, stream: bool
) -> None:
    """With a session all is read from the cache but placeholders and what is new; without one, all
    behind the first placeholder is computed again."""
    leyline = {"session": f"{session} {stream}"} if session else None
    messages: list[Any] = [{"role": "user", "content": f"{session} {stream} {words(7, 20)}"}]
    placeholder = size(PLACEHOLDER)
    before = whole = 0
    for i, cleared in enumerate(CLEARED):
        messages += agent_turn(i)
        usage, applied, report = last(managed(claude, messages, leyline, stream=stream))
        whole, before = counted(claude, messages), whole
        new = whole - before + size("\nassistant") + 10  # the turn that was opened to answer
        computed = usage.input_tokens
        gone = sum(size(words(500 + k, 60)) - placeholder for k in range(cleared))
        assert computed + usage.cache_read_input_tokens == whole - gone
        assert sum(edit.cleared_tool_uses for edit in applied) == cleared
        assert sum(edit.cleared_input_tokens for edit in applied) == gone
        clears_now = i > 0 and cleared > CLEARED[i - 1]
        if session:
            assert computed <= new + 3 * placeholder * clears_now
            assert report["tokens"]["computed"] == computed and report["fallback"] is None
            assert (report["tokens"]["moved"] > 0) is clears_now
        elif clears_now:
            kept = sum(size(words(500 + k, 60)) for k in (i - 2, i - 1))
            assert computed > whole - before + 3 * placeholder + kept


def counted(client: Anthropic, messages: list[Any]) -> int:
    """Tokens of the prompt with nothing cleared."""
    more: dict[str, Any] = {"system": SYSTEM, "tools": [TOOL]}
    return client.messages.count_tokens(model="tiny", messages=messages, **more).input_tokens


def last(answer: Any) -> tuple[Any, list[Any], Any]:
    """Usage, applied edits and report of an answer, streamed or not."""
    if not isinstance(answer, anthropic.types.beta.BetaMessage):
        answer = list(answer)[-2]
        assert answer.type == "message_delta"
    report = (answer.model_extra or {}).get("leyline")
    return answer.usage, answer.context_management.applied_edits, report


def test_what_is_prompted_with_is_the_edited_conversation(
    server: Running, claude: Anthropic
) -> None:
    """The same tokens as those of a client that has edited its messages itself."""
    messages: list[Any] = [{"role": "user", "content": words(20, 20)}]
    for i in range(6):
        messages += agent_turn(i)
    edited = json.loads(json.dumps(messages))
    for message in edited[2:7:2]:
        message["content"][0]["content"] = PLACEHOLDER
    plain = ask(claude, edited, max_tokens=4, tools=[TOOL])
    answer = managed(claude, messages)
    assert answer.usage.input_tokens == 1 and prompt_of(answer) == prompt_of(plain)
    assert answer.content[0].text == plain.content[0].text
    count = claude.beta.messages.count_tokens(
        model="tiny",
        messages=messages,
        betas=BETA,
        context_management={
            "edits": [
                {
                    "type": "clear_tool_uses_20250919",
                    "trigger": {"type": "tool_uses", "value": 5},
                }
            ]
        },
        system=SYSTEM,
        tools=[TOOL],
    )
    assert count.input_tokens == prompt_of(plain)
    assert count.context_management is not None
    assert count.context_management.original_input_tokens == counted(claude, messages)


def test_the_trigger_counts_what_the_prompt_has(claude: Anthropic) -> None:
    """To a few in a hundred, system prompt, tools and the template's own tokens included."""
    messages: list[Any] = [{"role": "user", "content": words(20, 20)}]
    for i in range(6):
        messages += agent_turn(i, 250)
    n = counted(claude, messages)
    for value, clears in ((int(n * 0.95), True), (int(n * 1.05), False)):
        edit: Any = {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "input_tokens", "value": value},
        }
        count = claude.beta.messages.count_tokens(
            model="tiny",
            system=SYSTEM,
            tools=[TOOL],
            messages=messages,
            betas=BETA,
            context_management={"edits": [edit]},
        )
        assert (count.input_tokens < n) is clears


def test_a_policy_comes_behind_the_rules(claude: Anthropic) -> None:
    """It is given the conversation alone, with as many messages as were sent: `heavy_hitters` has a
    number for each."""
    messages: list[Any] = [{"role": "user", "content": words(20, 20)}]
    for i in range(6):
        messages += agent_turn(i)
    mass = [0.05] * (1 + len(messages))  # the system prompt has one, too
    policy = {"name": "heavy_hitters", "mass": mass, "budget": 0}
    answer = managed(claude, messages, {"session": "both", "policy": policy})
    assert answer.context_management.applied_edits[0].cleared_tool_uses == 3
    (did,) = answer.leyline["policy"]
    assert did["name"] == "heavy_hitters" and did["messages"] == 2 * 5


def test_no_edit_is_told_as_none(claude: Anthropic) -> None:
    answer = claude.beta.messages.create(
        model="tiny",
        max_tokens=1,
        messages=HELLO,
        betas=BETA,
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
    )
    assert answer.context_management is not None and answer.context_management.applied_edits == []


def test_the_leyline_object(server: Running, claude: Anthropic) -> None:
    """As on the OpenAI API's routes: derived edits, directives, policies, errors."""
    messages: list[Any] = [{"role": "user", "content": words(40, 20)}, *agent_turn(1, 80)]
    messages[-1]["content"].append({"type": "text", "text": words(41, 40)})
    extra: dict[str, Any] = {"leyline": {"session": "object"}}
    first = ask(claude, messages, extra_body=extra)
    assert first.leyline["tokens"]["prompt"] == prompt_of(first)
    policy = {"name": "clear_tool_outputs", "keep": 0, "placeholder": "gone"}
    extra["leyline"]["policy"] = policy
    second = ask(claude, [*messages, *agent_turn(2, 5)], extra_body=extra)
    (edit,) = second.leyline["edits"]
    assert edit["mode"] == "amortize" and edit["shift"] < -60
    assert second.usage.cache_read_input_tokens == (
        second.leyline["tokens"]["shared"] + second.leyline["tokens"]["moved"]
    )
    for leyline, field in (
        ({"session": ""}, "leyline.session"),
        ({"session": "a", "policy": {"name": "no"}}, "leyline.policy.name"),
        ({"session": "a", "directives": [{"start": 5, "end": 5}]}, "leyline.directives[0]"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=f"{field}: ".replace("[", r"\[")):
            ask(claude, messages, extra_body={"leyline": leyline})
    strict = {"session": "never", "strict": True, "directives": [{"start": 0, "end": 2}]}
    for stream in (False, True):
        with pytest.raises(anthropic.ConflictError, match="source_missing") as caught:
            ask(claude, messages, extra_body={"leyline": strict}, stream=stream)
        assert caught.value.response.headers["x-should-retry"] == "false"
    server.settled()


def test_an_answer_that_is_ended_is_an_error(server: Running, claude: Anthropic) -> None:
    """Too late for a status: the stream's last event is an error, which the client raises."""
    more = {"session": "ended"}
    stream = ask(
        claude, max_tokens=4000, stream=True, extra_body={"leyline": more, "ignore_eos": True}
    )
    seen = [next(stream)]
    with server.http() as http:
        assert http.delete("/v1/leyline/sessions/ended").status_code == 200
    with pytest.raises(anthropic.APIStatusError, match="ended before"):
        seen += stream
    assert seen[0].type == "message_start" and seen[-1].type != "message_stop"
    server.settled()
