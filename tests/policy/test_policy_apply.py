"""Policies: pure functions from messages to edited messages (design §3)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.policy import (
    PLACEHOLDER,
    PolicyError,
    apply_policy,
    clear_tool_outputs,
    estimate,
    policies,
)
from leyline.policy.base import Step, fold, own
from leyline.policy.look import content_text

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"

TEXT = st.text(max_size=12)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3)
OUTPUT = TEXT | st.text(min_size=1, max_size=3).map(lambda text: text * 40)
OUTPUT_PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": OUTPUT}) | st.just({"type": "image"}),
    max_size=3,
)
CALL = st.fixed_dictionaries(
    {"id": TEXT, "function": st.fixed_dictionaries({"name": TEXT, "arguments": TEXT})}
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXT | PARTS}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT | st.none()},
        optional={"tool_calls": st.lists(CALL, max_size=2)},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": OUTPUT | OUTPUT_PARTS},
        # Ids repeat in real harnesses: only the position counts.
        optional={"tool_call_id": st.sampled_from(["a", "b"]), "name": TEXT},
    ),
)
MESSAGES = st.lists(MESSAGE, max_size=12)
KEEP = st.integers(0, 6)
Messages = list[dict[str, Any]]


def tool_positions(messages: Messages) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "tool"]


@given(MESSAGES, KEEP, TEXT)
def test_only_old_tool_outputs_change(messages: Messages, keep: int, placeholder: str) -> None:
    edited = clear_tool_outputs(messages, keep=keep, placeholder=placeholder)
    assert len(edited) == len(messages)
    tools = tool_positions(messages)
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    # The model could be asked then.
    points = [i for i in sorted(tools + users) if is_whole(messages[: i + 1])]
    for i, (before, after) in enumerate(zip(messages, edited, strict=True)):
        newer = max((sum(i < j <= n for j in tools) for n in points if n >= i), default=-1)
        if i in tools and newer >= keep and frees(before["content"], placeholder):
            assert content_text(after["content"]) == placeholder
            assert {**after, "content": None} == {**before, "content": None}
        else:
            assert after == before


def frees(content: Any, placeholder: str) -> bool:
    """Whether a result has a picture, or is longer than what would stand for it."""
    return {"type": "image"} in list(content) or len(content_text(content)) > len(placeholder)


def is_whole(messages: Messages) -> bool:
    """Whether the last assistant's calls all have a result, or the user waits no longer."""
    waiting = 0
    for message in messages:
        match message["role"]:
            case "assistant":
                waiting = len(message.get("tool_calls", ()))
            case "tool":
                waiting = max(0, waiting - 1)
            case "user":
                waiting = 0
    return waiting == 0


@given(MESSAGES, KEEP)
def test_idempotent(messages: Messages, keep: int) -> None:
    once = clear_tool_outputs(messages, keep=keep)
    assert clear_tool_outputs(once, keep=keep) == once


@given(MESSAGES, KEEP)
def test_clearing_step_by_step_equals_clearing_once(messages: Messages, keep: int) -> None:
    """A client may send edited or full history: the prompt is the same (edits are monotone)."""
    grown: Messages = []
    for message in messages:
        grown = clear_tool_outputs([*grown, message], keep=keep, placeholder=PLACEHOLDER)
    assert grown == clear_tool_outputs(messages, keep=keep, placeholder=PLACEHOLDER)


@given(MESSAGES, KEEP)
def test_input_is_not_changed(messages: Messages, keep: int) -> None:
    before = copy.deepcopy(messages)
    edited = clear_tool_outputs(messages, keep=keep)
    assert messages == before
    edited.append({"role": "user", "content": "new"})
    assert messages == before


@given(MESSAGES, KEEP)
def test_by_name_is_the_same(messages: Messages, keep: int) -> None:
    spec = {"name": "clear_tool_outputs", "keep": keep, "placeholder": "gone"}
    want = clear_tool_outputs(messages, keep=keep, placeholder="gone")
    assert apply_policy(spec, messages).messages == want
    assert apply_policy([spec], messages).messages == want


def test_defaults() -> None:
    messages = [{"role": "tool", "content": f"{i}" * 40} for i in range(4)]
    edited = apply_policy({"name": "clear_tool_outputs"}, messages).messages
    assert [m["content"] for m in edited] == [PLACEHOLDER, PLACEHOLDER, "2" * 40, "3" * 40]
    assert PLACEHOLDER == "[evicted: old tool output]"


@pytest.mark.parametrize(
    ("spec", "field", "says"),
    [
        (None, "policy", "must be an object or a list of them, not None"),
        ("clear_thinking", "policy", "must be an object or a list of them"),
        ([{"name": "clear_thinking"}, 3], "policy[1]", "must be an object"),
        ([{"name": "clear_thinking"}, {"name": "x"}], "policy[1].name", "'x'"),
        ([{"name": "clear_thinking"}] * 17, "policy", "up to 16, not 17"),
        (
            [{"name": "clear_thinking"}, {"name": "clear_thinking", "keep": -1}],
            "policy[1].keep",
            "whole number from 0 on, not -1",
        ),
        ({"name": "keep_window"}, "policy.newest", "is missing; tokens at the end that stay"),
        ({"name": "clear_tool_outputs", "by": "days"}, "policy.by", "one of outputs, turns"),
        ({"name": "clear_tool_outputs", "exclude": "bash"}, "policy.exclude", "a list of up to"),
        ({"name": "drop_failed_calls", "marks": ["a"] * 1001}, "policy.marks", "1,000 strings"),
        ({"name": "clear_tool_outputs", "inputs": 1}, "policy.inputs", "true, false or a list"),
        ({"name": "clear_tool_outputs", "trigger_tokens": -1}, "policy.trigger_tokens", "or null"),
        ({"name": "drop_stale_reads", "repeats": 0}, "policy.repeats", "true or false"),
        ({"name": "heavy_hitters", "mass": [-1.0], "budget": 1}, "policy.mass", "from 0 on"),
        ({"name": "heavy_hitters", "mass": [float("nan")], "budget": 1}, "policy.mass", "numbers"),
        ({"name": "heavy_hitters", "mass": [1] * 5, "budget": 1}, "policy.mass", "5 numbers for 4"),
        ({}, "policy.name", "clear_tool_outputs"),
        ({"name": "forget_all"}, "policy.name", "'forget_all'"),
        ({"name": ["clear_tool_outputs"]}, "policy.name", "must be one of"),
        ({"name": "clear_tool_outputs", "kep": 2}, "policy.kep", "which has keep, by, placeholder"),
        ({"name": "clear_tool_outputs", "messages": []}, "policy.messages", "is not an option"),
        ({"name": "clear_tool_outputs", 3: 2}, "policy.3", "is not an option"),
        ({"name": "clear_tool_outputs", "keep": -1}, "policy.keep", "not -1"),
        ({"name": "clear_tool_outputs", "keep": True}, "policy.keep", "not True"),
        ({"name": "clear_tool_outputs", "keep": 2.0}, "policy.keep", "not 2.0"),
        ({"name": "clear_tool_outputs", "keep": "2"}, "policy.keep", "not '2'"),
        ({"name": "clear_tool_outputs", "keep": None}, "policy.keep", "not None"),
        ({"name": "clear_tool_outputs", "keep": -(10**5000)}, "policy.keep", "too long to show"),
        ({"name": "clear_tool_outputs", "placeholder": 7}, "policy.placeholder", "not 7"),
        ({"name": "x" * 10_000}, "policy.name", "…"),
        ({"name": "clear_tool_outputs", "y" * 10_000: 1}, "policy." + "y" * 60, "not an option"),
    ],
)
def test_malformed_policies_get_a_sentence(spec: Any, field: str, says: str) -> None:
    """I6: a malformed request is one clear sentence naming the field, and nothing changed."""
    messages = [{"role": "tool", "content": f"{i}" * 40} for i in range(4)]
    before = copy.deepcopy(messages)
    with pytest.raises(PolicyError) as caught:
        apply_policy(spec, messages)
    assert caught.value.field == field
    assert says in caught.value.message
    assert caught.value.message.endswith(".") and len(str(caught.value)) < 300
    assert messages == before


def test_messages_that_are_no_objects() -> None:
    with pytest.raises(PolicyError) as caught:
        apply_policy({"name": "clear_tool_outputs"}, [{"role": "user"}, "hello"])  # type: ignore[list-item]
    assert caught.value.field == "messages[1]"


def test_an_empty_list_does_nothing() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert apply_policy([], messages).messages == messages
    assert len(apply_policy([], messages * 10_001).messages) == 10_001


MANY_CALLS = {"role": "assistant", "tool_calls": [{}] * 2000, "content": [{"type": "text"}] * 2001}
MANY_PARTS = {"role": "tool", "content": [{"content": [{"type": "text", "text": "a"}] * 4000}]}


@pytest.mark.parametrize(
    "messages",
    [[{"role": "user", "content": ""}] * 4001, [MANY_CALLS], [MANY_PARTS]],
    ids=["messages", "calls", "parts"],
)
def test_too_many_messages(messages: Messages) -> None:
    """They would be gone through again for each: hours, for a small body."""
    with pytest.raises(PolicyError) as caught:
        apply_policy({"name": "clear_thinking"}, messages)
    assert caught.value.field == "messages"
    assert caught.value.message == (
        "may be up to 4,000 for a policy, parts and tool calls counted, not 4,001."
    )
    just = [{"role": "system", "content": [{"type": "text", "text": ""}]}] * 4000
    assert len(apply_policy({"name": "clear_thinking"}, just).messages) == 4000


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real distribution with the policy of docs/policies.md."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "def only_errors" in block]
    (tmp_path / "my_policies.py").write_text(code)
    info = tmp_path / "my_policies-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1\n")
    lines = "[leyline.policies]\nonly_errors = my_policies:only_errors\nbroken = my_policies:no\n"
    (info / "entry_points.txt").write_text(lines + "clear_thinking = my_policies:only_errors\n")
    monkeypatch.syspath_prepend(tmp_path)
    policies.cache_clear()
    yield
    policies.cache_clear()


def test_ones_own_by_an_entry_point(installed: None, caplog: pytest.LogCaptureFixture) -> None:
    """As documented, with options, a report, and looking back like the others."""
    messages: Messages = [{"role": "user", "content": "go"}]
    for i in range(3):
        messages.append({"role": "assistant", "content": f"```bash\nmake {i}\n```"})
        messages.append(
            {"role": "tool", "content": "fine\n" * 20 + f"Error: {i}\n" + "fine\n" * 20}
        )
    edited = apply_policy({"name": "only_errors", "word": "Error"}, messages)
    assert [m["content"] for m in edited.messages if m["role"] == "tool"] == [
        "Error: 0",
        "Error: 1",
        messages[-1]["content"],
    ]
    (applied,) = edited.applied
    assert (applied.policy, applied.tool_uses, applied.messages) == ("only_errors", 2, 0)
    assert applied.tokens == 2 * (53 - 2)
    with pytest.raises(PolicyError, match=r"policy\.wrd: is not an option of only_errors"):
        apply_policy({"name": "only_errors", "wrd": "x"}, messages)
    assert "policy broken (my_policies:no) can't be loaded" in caplog.text
    # A name of Leyline's can't be taken.
    assert policies()["clear_thinking"].name == "clear_thinking"
    assert apply_policy({"name": "clear_thinking"}, messages).messages == messages


def test_ones_own_messages_have_their_places(installed: None) -> None:
    """So attention that they got is known, and heavy_hitters can drop them."""
    messages: Messages = [{"role": "user", "content": "go"}]
    for i in range(3):
        messages.append({"role": "assistant", "content": f"```bash\nmake {i}\n```"})
        messages.append({"role": "tool", "content": "fine\n" * 20 + "error"})
    hitters = {"name": "heavy_hitters", "mass": [1.0] * 7, "budget": 0}
    edited = apply_policy([{"name": "only_errors"}, hitters], messages)
    assert edited.messages == [messages[0], *messages[5:]]
    edited = apply_policy([{"name": "only_errors"}], messages)
    assert edited.messages[2]["content"] == "error"
    assert edited.origins == tuple(range(7))


def test_one_message_of_ones_own_in_place_of_others() -> None:
    """Where one came and another went, each of the given ones still has its own place."""
    note = {"role": "user", "content": "note"}

    def shift(messages: Messages) -> Messages:
        return messages if note in messages else [*messages[1:], note]

    given = [{"role": "user", "content": word} for word in "abc"]
    edited = fold([Step(own("shift", shift), {}, "policy")], given, estimate)
    assert [message["content"] for message in edited.messages] == ["note", "b", "c"]
    assert edited.origins == (0, 1, 2)

    def swap(messages: Messages) -> Messages:
        return [*messages[1:], note] if len(messages) == 3 else messages

    edited = fold([Step(own("swap", swap), {}, "policy")], given, estimate)
    assert [message["content"] for message in edited.messages] == ["b", "c", "note"]
    assert edited.origins == (1, 2, None)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.sampled_from(["tool", "user", "", "{", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "text",
                    "id",
                    "function",
                    "arguments",
                    "name",
                    "input",
                    "content",
                    "thinking",
                ]
            ),
            inner | st.sampled_from(["tool_use", "tool_result", "thinking"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
JUNK_MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "reasoning", "is_error"]),
    st.sampled_from(["assistant", "user", "tool"]) | JUNK,
)


@given(st.lists(JUNK_MESSAGE, max_size=6))
def test_messages_that_make_no_sense_are_left_to_the_server(messages: Messages) -> None:
    """SGLang checks messages after the policy has seen them: it must get that far."""
    names = [name for name in policies() if name not in ("keep_window", "heavy_hitters")]
    spec: list[dict[str, Any]] = [{"name": name} for name in names]
    spec[0] |= {"inputs": True, "keep": 0}
    spec += [
        {"name": "keep_window", "newest": 3},
        {"name": "heavy_hitters", "mass": [], "budget": 1},
    ]
    assert len(apply_policy(spec, messages).messages) <= len(messages)
