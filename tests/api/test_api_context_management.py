"""Anthropic's context edits as pure functions: what they clear, and that it stays cleared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leyline.api.anthropic_messages import check_conversation
from leyline.api.clearable import PER_MESSAGE, PLACEHOLDER
from leyline.api.context_management import Edited, apply, parse_context_management
from leyline.api.errors import FieldError

TOOLS = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
Messages = list[dict[str, Any]]


def edit(messages: Messages, *edits: dict[str, Any], head: int = 0) -> Edited:
    """With a token a character."""
    return apply(parse_context_management({"edits": list(edits)}), messages, len, head)


def use(i: int, name: str = "run", thinking: str = "", said: str = "") -> dict[str, Any]:
    blocks: Messages = [{"type": "thinking", "thinking": thinking}] if thinking else []
    blocks += [{"type": "text", "text": said}] if said else []
    call = {"type": "tool_use", "id": f"t{i}", "name": name, "input": {"n": "i" * 20}}
    return {"role": "assistant", "content": [*blocks, call]}


def result(i: int, size: int, **more: Any) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": f"t{i}", "content": "r" * size, **more}
    return {"role": "user", "content": [block]}


def agent(sizes: list[int], **more: Any) -> Messages:
    """A user's wish, and a tool use for each size."""
    messages: Messages = [{"role": "user", "content": "go"}]
    for i, size in enumerate(sizes):
        messages += [use(i, **more), result(i, size)]
    return messages


def cleared(edited: Edited) -> list[str]:
    """Ids of the uses whose results are gone."""
    return [
        block["tool_use_id"]
        for message in edited.messages
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] == "tool_result" and block["content"] == PLACEHOLDER
    ]


def tool_uses(trigger: int = 1, keep: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "type": TOOLS,
        "trigger": {"type": "tool_uses", "value": trigger},
        "keep": {"type": "tool_uses", "value": keep},
        **more,
    }


def test_results_go_and_everything_else_stays() -> None:
    messages = agent([100, 200, 300])
    before = copy.deepcopy(messages)
    edited = edit(messages, tool_uses())
    assert messages == before
    assert cleared(edited) == ["t0", "t1"]
    (applied,) = edited.applied
    assert applied.model_dump() == {
        "type": TOOLS,
        "cleared_tool_uses": 2,
        "cleared_input_tokens": 300 - 2 * len(PLACEHOLDER),
    }
    for message in before[2::2][:2]:
        message["content"][0]["content"] = PLACEHOLDER
    assert edited.messages == before
    assert all(edited.messages[i] is messages[i] for i in (0, 1, 3, 5, 6))


def test_the_defaults_are_the_documented_ones() -> None:
    """More than 100 000 tokens, three uses stay."""
    call = PER_MESSAGE + len('{"name": "run", "arguments": {"n": ""}}') + 20
    frame = PER_MESSAGE + len("go") + 5 * (call + PER_MESSAGE)
    just = [100_000 - frame - 4000, 1000, 1000, 1000, 1000]
    assert edit(agent(just), {"type": TOOLS}).applied == ()
    assert cleared(edit(agent([just[0] + 1, *just[1:]]), {"type": TOOLS})) == ["t0", "t1"]
    assert cleared(edit(agent(just), {"type": TOOLS}, head=1)) == ["t0", "t1"]


def test_uses_that_are_left_trigger_and_not_all_there_ever_were() -> None:
    """So that results go a few at a time, and not one with every turn."""
    seen = [len(cleared(edit(agent([50] * n), tool_uses(3, 1)))) for n in range(10)]
    assert seen == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6]


def test_excluded_tools_inputs_and_clear_at_least() -> None:
    messages = agent([100, 100, 100])
    messages[1] = use(0, "memory")
    only = edit(messages, tool_uses(exclude_tools=["memory"]))
    assert cleared(only) == ["t1"]
    gain = 100 - len(PLACEHOLDER)
    for inputs, freed in ((True, gain + 27), (["run"], gain + 27), (["other"], gain)):
        rule = tool_uses(exclude_tools=["memory"], clear_tool_inputs=inputs)
        edited = edit(messages, rule)
        assert edited.applied[0].cleared_input_tokens == freed
        call = edited.messages[3]["content"][0]
        assert call["input"] == ({} if freed > gain else {"n": "i" * 20})
        assert edited.messages[1] is messages[1]
        least = {"clear_at_least": {"type": "input_tokens", "value": freed}}
        assert cleared(edit(messages, rule | least)) == ["t1"]
        least["clear_at_least"]["value"] += 1
        assert edit(messages, rule | least) == Edited(messages)


def test_thinking_stays_for_the_newest_turns() -> None:
    """A turn goes on while only tools answer; redacted thinking goes, too."""
    hidden = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}
    messages = [
        {"role": "user", "content": "a"},
        use(0, thinking="one"),
        result(0, 9),
        use(1, thinking="two"),
        result(1, 9),
        hidden,
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "nothing thought"},
        {"role": "user", "content": "c"},
        use(2, thinking="three"),
        result(2, 9),
    ]
    for keep in ({}, {"keep": {"type": "thinking_turns", "value": 1}}):
        edited = edit(messages, {"type": THINKING, **keep})
        kinds = [[b["type"] for b in edited.messages[i]["content"]] for i in (1, 3, 5, 9)]
        assert kinds == [["tool_use"], ["tool_use"], [], ["thinking", "tool_use"]]
        assert edited.applied[0].model_dump() == {
            "type": THINKING,
            "cleared_thinking_turns": 1,
            "cleared_input_tokens": 6,
        }
    for keep_more in ({"type": "thinking_turns", "value": 2}, "all", {"type": "all"}):
        assert edit(messages, {"type": THINKING, "keep": keep_more}) == Edited(messages)


def test_freed_thinking_counts_for_the_trigger() -> None:
    messages = [
        {"role": "user", "content": "a"},
        use(0, thinking="x" * 1000),
        result(0, 100),
        {"role": "user", "content": "b"},
        use(1, thinking="y"),
        result(1, 100),
    ]
    rule = tool_uses() | {"trigger": {"type": "input_tokens", "value": 1000}}
    assert cleared(edit(messages, rule)) == ["t0"]
    # Without its thinking the conversation is small by the time that there are two uses.
    assert cleared(edit(messages, {"type": THINKING}, rule)) == []


def conversations() -> st.SearchStrategy[Messages]:
    """Turns of a user who speaks, and of an assistant that thinks, speaks and uses tools; now and
    then the system says something."""
    step = st.tuples(
        st.integers(0, 60),  # a result's size
        st.integers(0, 300),  # how much is thought
        st.sampled_from(["run", "read", "memory"]),
        st.booleans(),  # the user speaks then
        st.integers(1, 3),  # uses at a time
        st.integers(0, 200),  # how much the system says
    )

    def built(steps: list[Any]) -> Messages:
        messages: Messages = [{"role": "user", "content": "go"}]
        for i, (size, thought, name, speaks, several, told) in enumerate(steps):
            # Ids repeat, as some harnesses have it.
            calls = [use(i % 3 + 10 * k, name, said="s")["content"][1] for k in range(several)]
            thinking = [{"type": "thinking", "thinking": "h" * thought}] if thought else []
            messages.append({"role": "assistant", "content": [*thinking, *calls]})
            results = [result(i % 3 + 10 * k, size + k)["content"][0] for k in range(several)]
            messages.append({"role": "user", "content": results})
            if speaks:
                messages[-1]["content"].append({"type": "text", "text": "and then"})
            if told:
                messages.append({"role": "system", "content": "s" * told})
            if speaks:
                messages += [
                    {"role": "assistant", "content": "well"},
                    {"role": "user", "content": "on"},
                ]
        return messages

    return st.lists(step, max_size=9).map(built)


def rules() -> st.SearchStrategy[list[dict[str, Any]]]:
    trigger = st.one_of(
        st.fixed_dictionaries({"type": st.just("tool_uses"), "value": st.integers(1, 8)}),
        st.fixed_dictionaries({"type": st.just("input_tokens"), "value": st.integers(1, 1500)}),
    )
    least = st.fixed_dictionaries({"type": st.just("input_tokens"), "value": st.integers(0, 90)})
    tools = st.fixed_dictionaries(
        {
            "type": st.just(TOOLS),
            "trigger": trigger,
            "keep": st.fixed_dictionaries(
                {"type": st.just("tool_uses"), "value": st.integers(0, 4)}
            ),
        },
        optional={
            "clear_at_least": least,
            "exclude_tools": st.lists(st.sampled_from(["read", "memory"])),
            "clear_tool_inputs": st.sampled_from([True, ["run"]]),
        },
    )
    keep = st.fixed_dictionaries({"type": st.just("thinking_turns"), "value": st.integers(1, 3)})
    thinking = st.fixed_dictionaries({"type": st.just(THINKING), "keep": keep})
    return st.one_of(
        tools.map(lambda t: [t]), thinking.map(lambda t: [t]), st.tuples(thinking, tools).map(list)
    )


def told_last() -> Messages:
    """A conversation that is largest behind the system's words: then thinking goes."""
    messages: Messages = [{"role": "user", "content": "go"}]
    messages += [use(0, thinking="x" * 1000), result(0, 100), use(1), result(1, 100)]
    messages[-1]["content"].append({"type": "text", "text": "and"})
    messages += [{"role": "system", "content": "s" * 200}, use(2, thinking="y"), result(2, 100)]
    return messages


ABOVE_1400 = tool_uses() | {"trigger": {"type": "input_tokens", "value": 1400}}


@settings(max_examples=150, deadline=None)
@given(conversations(), rules())
@example(told_last(), [{"type": THINKING}, ABOVE_1400])
def test_what_is_cleared_stays_cleared(messages: Messages, edits: list[dict[str, Any]]) -> None:
    """A session's lineage is never edited back: a later request's view of an earlier one's messages
    differs in what has been cleared since, and in nothing else."""
    before = copy.deepcopy(messages)
    ends = [i + 1 for i, message in enumerate(messages) if message["role"] != "assistant"]
    views = [edit(messages[:end], *edits) for end in ends]
    for i, (end, view) in enumerate(zip(ends, views, strict=True)):
        check_conversation(view.messages)  # every use still has its result
        for later in views[i:]:
            for old, now, sent in zip(view.messages, later.messages, messages[:end], strict=False):
                assert_only_more_is_gone(sent, old, now)
    assert messages == before


def assert_only_more_is_gone(sent: Any, old: Any, now: Any) -> None:
    """Each block is in `now` as it was in `old`, or as it was sent there and is cleared now."""
    if isinstance(sent["content"], str):
        assert old == now == sent
        return
    was = [b for b in sent["content"] if b["type"] != "thinking"]
    for message in (old, now):
        kept = [b for b in message["content"] if b["type"] != "thinking"]
        assert len(kept) == len(was)
    thoughts = [sum(b["type"] == "thinking" for b in m["content"]) for m in (sent, old, now)]
    assert thoughts == sorted(thoughts, reverse=True)
    olds, nows = ([b for b in m["content"] if b["type"] != "thinking"] for m in (old, now))
    for first, then, later in zip(was, olds, nows, strict=True):
        assert later == then or then == first
        if later != first:
            empty = {"tool_result": {"content": PLACEHOLDER}, "tool_use": {"input": {}}}
            assert later == first | empty[first["type"]]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([], "context_management"),
        ("clear", "context_management"),
        ({"edit": []}, "context_management.edit"),
        ({"edits": {}}, "context_management.edits"),
        ({"edits": [5]}, "context_management.edits[0]"),
        ({"edits": [{}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": "compact_20260112"}]}, "context_management.edits[0].type"),
        ({"edits": [{"type": TOOLS}] * 2}, "context_management.edits[1]"),
        ({"edits": [{"type": THINKING}] * 2}, "context_management.edits[1]"),
        ({"edits": [{"type": TOOLS}, {"type": THINKING}]}, "context_management.edits[1]"),
    ],
)
def test_malformed_objects_are_named(given: Any, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_context_management(given)
    assert caught.value.field == field
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        ({"trigger": 5}, "trigger"),
        ({"trigger": None}, "trigger"),
        ({"trigger": {"type": "input_tokens"}}, "trigger.value"),
        ({"trigger": {"type": "turns", "value": 5}}, "trigger.type"),
        ({"trigger": {"type": "tool_uses", "value": 0}}, "trigger.value"),
        ({"trigger": {"type": "tool_uses", "value": True}}, "trigger.value"),
        ({"keep": {"type": "tool_uses", "value": -1}}, "keep.value"),
        ({"keep": {"type": "input_tokens", "value": 1}}, "keep.type"),
        ({"clear_at_least": {"type": "tool_uses", "value": 1}}, "clear_at_least.type"),
        ({"clear_at_least": {"type": "input_tokens", "value": 1.5}}, "clear_at_least.value"),
        ({"exclude_tools": "run"}, "exclude_tools"),
        ({"exclude_tools": [5]}, "exclude_tools[0]"),
        ({"clear_tool_inputs": "run"}, "clear_tool_inputs"),
        ({"clear_tool_inputs": [5]}, "clear_tool_inputs"),
        ({"kep": 1}, "kep"),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}, "keep.value"),
        ({"type": THINKING, "keep": {"type": "thinking_turns"}}, "keep.value"),
        ({"type": THINKING, "keep": "none"}, "keep"),
    ],
)
def test_malformed_rules_are_named(rule: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        parse_context_management({"edits": [{"type": TOOLS, **rule}]})
    assert caught.value.field == f"context_management.edits[0].{field}"
