"""Each policy's rule on small conversations whose outcome is plain to see."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyline.api.clearable import PLACEHOLDER as CLEARED
from leyline.policy import (
    Look,
    apply_policy,
    clear_thinking,
    clear_tool_outputs,
    drop_failed_calls,
    drop_stale_reads,
    heavy_hitters,
    keep_window,
)
from leyline.policy.results import return_code
from leyline.policy.shell import touched

Message = dict[str, Any]
GOOD, BAD = "<returncode>0</returncode>\nok", "<returncode>1</returncode>\nno"
USER = {"role": "user", "content": "Fix it."}


def step(command: str, output: str, said: str = "") -> list[Message]:
    """A plain call and its result."""
    text = f"{said}\n```bash\n{command}\n```"
    return [{"role": "assistant", "content": text}, {"role": "tool", "content": output}]


def calls(*pairs: tuple[str, str], name: str = "bash", said: str | None = None) -> list[Message]:
    """One turn with some OpenAI calls, all with the same id, and their results."""
    made = [
        {"id": "same", "function": {"name": name, "arguments": json.dumps({"command": command})}}
        for command, _ in pairs
    ]
    results = [{"role": "tool", "tool_call_id": "same", "content": output} for _, output in pairs]
    return [{"role": "assistant", "content": said, "tool_calls": made}, *results]


def outputs(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def test_turns_and_excluded_tools() -> None:
    a, b, c, d, e, m = (letter * 40 for letter in "ABCDEM")
    messages = [USER, *calls(("a", a), ("b", b)), *calls(("m", m), name="memory")]
    messages += [*calls(("c", c), ("d", d)), *calls(("e", e))]
    options = {"keep": 2, "by": "turns", "exclude": ["memory"]}
    gone, rest = "[evicted: 2 old tool outputs]", "[evicted]"
    assert outputs(clear_tool_outputs(messages, **options)) == [gone, rest, m, c, d, e]
    one = "[evicted: old tool output]"
    edited = clear_tool_outputs(messages, keep=3, exclude=["memory"])
    assert outputs(edited) == [one, one, m, c, d, e]
    edited = clear_tool_outputs(messages, keep=2, exclude=["memory"])
    assert outputs(edited) == [gone, rest, m, one, d, e]


def test_short_outputs_stay() -> None:
    """Clearing frees something: else the words that stand for an output are longer than it."""
    long, short = "x" * 32, "y" * 31
    messages = [USER, *calls(("a", short), ("b", long), ("c", long), ("d", ""))]
    assert outputs(clear_tool_outputs(messages, keep=0)) == [
        short,
        "[evicted: 2 old tool outputs]",
        "[evicted]",
        "",
    ]
    own = clear_tool_outputs(messages, keep=0, placeholder="z" * 32)
    assert outputs(own) == outputs(messages)
    # Where a call's arguments go, its result says so.
    some = clear_tool_outputs(messages, keep=0, inputs=True)
    assert outputs(some) == ["[evicted: 4 old tool outputs]", *["[evicted]"] * 3]
    # Short outputs never make a trigger fire.
    assert outputs(clear_tool_outputs(messages, keep=0, trigger_uses=2)) == outputs(messages)


def test_short_outputs_in_parts_stay() -> None:
    """Whatever a part with text is called; a picture always goes."""
    kinds = [("text", "text"), ("input_text", "text"), ("refusal", "refusal")]
    parts: list[Message] = [{"type": kind, field: "no"} for kind, field in kinds]
    messages = [USER, *calls(*[("a", "")] * 4)]
    for message, part in zip(messages[2:], [*parts, {"type": "image"}], strict=True):
        message["content"] = [part]
    edited = outputs(clear_tool_outputs(messages, keep=0))
    assert edited == [*([part] for part in parts), "[evicted: old tool output]"]


def test_what_would_free_too_little_leaves_nothing_behind() -> None:
    """It is tried at each call: else all that was tried stays in memory, and is counted again."""
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    messages = [USER]
    for i in range(20):
        messages += calls((f"ls {i}", f"{i:3}" * 20), (f"ls -l {i}", f"{i:3}" * 30))
    for inputs in (False, True):
        look = Look(len)
        view = [look.take(message) for message in messages]
        whole = look.tokens([each for each in view if inputs or each["role"] == "tool"])
        look.tokens(view)
        options = {"keep": 0, "at_least": whole - 100, "inputs": inputs}
        assert clear_tool_outputs.rule(view, look, **options) is view
        assert len(look._seen) == len(look._origin) == len(look._tokens) == len(view)
        for at_least in (10**9, whole - 100):
            spec = {"name": "clear_tool_outputs", **options, "at_least": at_least}
            counted.clear()
            assert apply_policy(spec, messages, count).messages == messages
            assert len(counted) == len(set(counted))


def test_triggers_and_at_least() -> None:
    messages = [USER]
    for i in range(4):
        messages += step("ls", f"{i}" * 100)  # 25 tokens
    uses = {"keep": 1, "trigger_uses": 2}
    lengths = [len(text) for text in outputs(clear_tool_outputs(messages, **uses))]
    assert lengths == [29, 9, 100, 100]
    # Two outputs free 25 - 8 + 25 - 3 tokens; one alone 25 - 7, which must wait for the next.
    enough = clear_tool_outputs(messages, keep=1, at_least=39)
    assert outputs(enough)[:2] == ["[evicted: 2 old tool outputs]", "[evicted]"]
    assert outputs(enough)[2:] == outputs(messages)[2:]
    assert outputs(clear_tool_outputs(messages, keep=1, at_least=1000)) == outputs(messages)


def test_inputs_go_too() -> None:
    messages = [USER, *calls(("rm x", "A")), *step("rm y", "B", "Well."), *calls(("ls", "C"))]
    edited = clear_tool_outputs(messages, keep=1, inputs=True)
    assert edited[1]["tool_calls"][0]["function"] == {"name": "bash", "arguments": "{}"}
    assert edited[3]["content"] == "Well.\n```bash\n[evicted]\n```"
    assert edited[5:] == messages[5:]
    some = clear_tool_outputs(messages, keep=1, inputs=["other"])
    assert [m["content"] for m in some if m["role"] != "tool"] == [
        m["content"] for m in messages if m["role"] != "tool"
    ]


def test_anthropic_parts() -> None:
    use = {"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "A"}]}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "So."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And hurry."}]},
    ]
    edited = clear_tool_outputs(messages, keep=0, inputs=True)
    cleared = {**result, "content": "[evicted: old tool output]"}
    assert edited[1]["content"][1] == {**use, "input": {}}
    assert edited[2]["content"] == [cleared, {"type": "text", "text": "And hurry."}]


def test_calls_beside_a_field_that_makes_no_sense() -> None:
    """SGLang checks messages after the policy; what stands in the content is what counts then."""
    use = {"type": "tool_use", "id": "1", "name": "bash", "input": {"command": "make"}}
    other = {**use, "id": "2", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": BAD}
    listed = {**result, "tool_use_id": "2", "content": "x" * 40}
    messages = [
        USER,
        {"role": "assistant", "tool_calls": 7, "content": [use, other]},
        {"role": "user", "tool_calls": [{}, {}], "content": [result, listed]},
    ]
    edited = clear_tool_outputs(messages, keep=0, inputs=True)
    assert [part["input"] for part in edited[1]["content"]] == [{}, {}]
    assert edited[1]["tool_calls"] == 7
    edited = drop_failed_calls([*messages, *calls(("make", GOOD))])
    assert edited[1:3] == [
        {**messages[1], "content": [other]},
        {**messages[2], "content": [listed]},
    ]
    thought = {"role": "assistant", "tool_calls": 7, "content": "<think>Hm.</think>"}
    assert clear_thinking([USER, thought, USER], keep=0) == [USER, thought, USER]


THOUGHTS: list[tuple[Message, Message]] = [
    ({"content": "<think>Hm.\n</think>\n\nYes."}, {"content": "Yes."}),
    ({"content": "Hm.\n</think>\n\nYes."}, {"content": "Yes."}),
    ({"content": "Yes.", "reasoning_content": "Hm."}, {"content": "Yes."}),
    ({"content": "Yes.", "reasoning": "Hm."}, {"content": "Yes."}),
    (
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]},
        {"content": [{"type": "text", "text": "Yes."}]},
    ),
    ({"content": "<think>Hm.</think>"}, {"content": "<think>Hm.</think>"}),  # nothing else in it
    ({"content": "In <think> and </think>."}, {"content": "In <think> and </think>."}),
    # What looks like reasoning in what is left goes too: a later call would cut it off else.
    ({"content": "<think>a</think>\n<think>b</think>c"}, {"content": "c"}),
    ({"content": "<think>The tag </think> closes it.</think>Yes."}, {"content": "Yes."}),
    ({"content": "a</think> </think>b</think>\nc <think>"}, {"content": "c <think>"}),
    ({"content": "a</think> In <think>, </think>."}, {"content": "In <think>, </think>."}),
    ({"content": "<think>a</think> b</think>"}, {"content": "<think>a</think> b</think>"}),
]


@pytest.mark.parametrize(("thoughtful", "without"), THOUGHTS)
def test_thinking(thoughtful: Message, without: Message) -> None:
    one, bare = ({"role": "assistant", **each} for each in (thoughtful, without))
    messages = [USER, one, USER]
    assert clear_thinking(messages, keep=0) == [USER, bare, USER]
    # The newest with any reasoning keeps it, be there ones without behind it.
    plain = {"role": "assistant", "content": "No."}
    assert clear_thinking([USER, one, USER, plain, USER]) == [USER, one, USER, plain, USER]


def test_a_failed_call_goes_when_it_went_well() -> None:
    failed, other = step("make", BAD), step("ls", GOOD)
    assert drop_failed_calls([USER, *failed, *other]) == [USER, *failed, *other]
    done = step("make", GOOD)
    assert drop_failed_calls([USER, *failed, *other, *done]) == [USER, *other, *done]
    # A failure after the success stays, and so does one before the user spoke again.
    assert drop_failed_calls([USER, *done, *failed]) == [USER, *done, *failed]
    spoken = [USER, *failed, USER, *done]
    assert drop_failed_calls(spoken) == spoken


def test_what_is_the_same_call() -> None:
    failed, fixed = step("cd x && pytest -k a", BAD), step("cd y && pytest", GOOD)
    messages = [USER, *failed, *fixed]
    assert drop_failed_calls(messages) == messages
    assert drop_failed_calls(messages, same="program") == [USER, *fixed]


def test_commands_that_cannot_be_taken_apart() -> None:
    """Nobody knows what they run: the same is only the very same."""
    failed, other = step("make 'open", BAD), step("echo 'open", GOOD)
    messages = [USER, *failed, *other]
    assert drop_failed_calls(messages, same="program") == messages
    done = step("make 'open", GOOD)
    assert drop_failed_calls([*messages, *done], same="program") == [USER, *other, *done]
    # A comment is no open quote.
    failed, done = step("# don't stop\nmake -j", BAD), step("make", GOOD)
    assert drop_failed_calls([USER, *failed, *done], same="program") == [USER, *done]
    # Of tools without commands the tool alone.
    made = [calls(("a", BAD), name="f"), calls(("b", GOOD), name="f")]
    for each, path in zip(made, "ab", strict=True):
        each[0]["tool_calls"][0]["function"]["arguments"] = json.dumps({"path": path})
    assert drop_failed_calls([USER, *made[0], *made[1]], same="program") == [USER, *made[1]]


@pytest.mark.parametrize("failed", [step("make", BAD), calls(("make", BAD))], ids=["plain", "call"])
def test_a_second_result_goes_with_its_call(failed: list[Message]) -> None:
    """A result stays no longer than a call that it can belong to."""
    more = {**failed[1], "content": "and more"}
    done = calls(("make", GOOD)) if "tool_calls" in failed[0] else step("make", GOOD)
    assert drop_failed_calls([USER, *failed, more, *done]) == [USER, *done]


def test_a_turn_without_one_of_its_calls_is_known_to_be_the_same() -> None:
    """So what it got of the model's attention is reported, and counts for heavy_hitters."""
    messages = [USER, *calls(("make", BAD), ("ls", "files")), *calls(("make", GOOD))]
    edited = apply_policy({"name": "drop_failed_calls"}, messages)
    assert edited.origins == (0, 1, 3, 4, 5)
    hitters = {"name": "heavy_hitters", "mass": [1.0] * 6, "budget": 0}
    edited = apply_policy([{"name": "drop_failed_calls"}, hitters], messages)
    assert edited.messages == [USER, *messages[4:]]


def test_one_failed_call_of_a_turn() -> None:
    """The others of that turn stay, with what was said; a success in the same turn is no retry."""
    turn = calls(("make", BAD), ("ls", "files"), said="Both.")
    same = calls(("make", BAD), ("make", GOOD))
    assert drop_failed_calls([USER, *same]) == [USER, *same]
    edited = drop_failed_calls([USER, *turn, *calls(("make", GOOD))])
    assert edited[1]["tool_calls"] == turn[0]["tool_calls"][1:]
    assert edited[1]["content"] == "Both."
    assert outputs(edited) == ["files", GOOD]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("<returncode>2</returncode>\n<output>", 2),
        ("<returncode>0</returncode>\nTraceback (most recent call last):", 0),
        ("Exit code: 1", 1),
        ('{"output": "x", "exit_code": 127}', 127),
        ("some output\n" * 99 + "\nProcess finished with exit status 3", 3),
        ("some output\n" * 99 + "exit code: 1\n" + "some output\n" * 99, None),
        ("the barcode: 7", None),
        ("returncode", None),
        ("exit code " + "9" * 5000, int("9" * 20)),
    ],
)
def test_return_codes(text: str, code: int | None) -> None:
    assert return_code(text) == code


def test_failures_without_a_code() -> None:
    trace = "Traceback (most recent call last):\n  ValueError"
    messages = [USER, *calls(("x", trace)), *calls(("x", "fine"))]
    assert outputs(drop_failed_calls(messages)) == ["fine"]
    assert drop_failed_calls(messages, marks=["error:"]) == messages
    result = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": "fine"}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    failed = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    done = [failed[0], {"role": "user", "content": [{**result, "is_error": False}]}]
    assert drop_failed_calls([USER, *failed, *done]) == [USER, *done]


STALE = "[evicted: stale tool output]"


@pytest.mark.parametrize(
    ("first", "then", "output", "is_stale"),
    [
        ("cat a.py", "sed -i s/x/y/ a.py", GOOD, True),
        ("cat a.py", "sed -i s/x/y/ a.py", BAD, False),
        ("cat a.py", "cat ./a.py", GOOD, True),
        ("cat a.py", "cat b.py", GOOD, False),
        ("cat a.py", "head -n 5 a.py", GOOD, False),
        ("head -n 5 a.py", "cat a.py", GOOD, True),
        ("cat x/a.py", "cd x && echo 1 >> a.py", GOOD, True),
        ("cat a.py b.py", "cat a.py", GOOD, False),
        ("cat a.py && pytest", "cat a.py", GOOD, False),
        ("pytest", "pytest", BAD, True),
        ("pytest", "pytest -x", GOOD, False),
        ("cat genes.fa", "grep -c '>' genes.fa", GOOD, False),
        ("cat genes.fa", "grep '>' genes.fa > genes.fa", GOOD, True),
        ("cat 'a;b'", "cat a\\;b", GOOD, True),
    ],
)
def test_stale_reads(first: str, then: str, output: str, is_stale: bool) -> None:
    messages = [USER, *step(first, "the first"), *step(then, output)]
    want = [STALE if is_stale else "the first", output]
    assert outputs(drop_stale_reads(messages)) == want


def test_placeholders_of_one_policy_are_known_to_the_others() -> None:
    """And those of `context_management`. Such a result says nothing about its call."""
    assert Look().is_evicted(CLEARED) and not Look().is_evicted("[cleared]: 3")
    messages = [USER, *step("cat a.py", CLEARED), *step("cat a.py", "x = 1")]
    assert drop_stale_reads(messages) == messages
    # The second failed too; what stands for it must not pass for a success.
    messages = [USER, *step("make", "exit code: 1"), *step("make", "exit code: 1 " + "x" * 40)]
    messages += step("ls", "files")
    clear = {"name": "clear_tool_outputs", "keep": 1, "placeholder": "y" * 20}
    edited = apply_policy([clear, {"name": "drop_failed_calls"}], messages).messages
    assert outputs(edited) == ["exit code: 1", "y" * 20, "files"]


def test_stale_reads_by_tool() -> None:
    def tool(name: str, output: str, **values: Any) -> list[Message]:
        function = {"name": name, "arguments": json.dumps(values)}
        call = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
        return [call, {"role": "tool", "tool_call_id": "1", "content": output}]

    part = tool("read_file", "part", path="a", offset=3)
    whole, edit = tool("read_file", "whole", path="a"), tool("edit", "done", file_path="./a")
    view = tool("editor", "view", command="view", path="a")
    assert outputs(drop_stale_reads([USER, *whole, *part])) == ["whole", "part"]
    assert outputs(drop_stale_reads([USER, *part, *whole])) == [STALE, "whole"]
    assert outputs(drop_stale_reads([USER, *part, *edit])) == [STALE, "done"]
    assert outputs(drop_stale_reads([USER, *view, *edit])) == [STALE, "done"]
    assert outputs(drop_stale_reads([USER, *whole, *edit], writers=["w"])) == ["whole", "done"]
    twice = [USER, *step("pytest", "1"), *step("pytest", "2")]
    assert drop_stale_reads(twice, repeats=False) == twice


@pytest.mark.parametrize(
    ("command", "reads", "writes", "whole"),
    [
        ("cat a b", {"a", "b"}, set(), True),
        ("cat a | grep x > b", {"a"}, {"b"}, False),
        ("cat > a <<'EOF'\nit's > b\nEOF", set(), {"a"}, False),
        ("mkdir -p x\ncat <<EOF > x/a\n'\nEOF", set(), {"x/a"}, False),
        ("sed -n '1,5p' a", {"a"}, set(), False),
        ("sed -i.bak 's/>/</' a", set(), {"a"}, False),
        ("pytest 2>&1 | tee log", set(), {"log"}, False),
        ("cat a.py 2>/dev/null", {"a.py"}, set(), True),
        ("head -n 2 >/dev/null a.py", set(), {"/dev/null"}, False),
        ("make &> log", set(), {"log"}, False),
        ("cat $(find . -name a)", set(), set(), False),
        ("cat *.py", set(), set(), False),
        ("cp a b; mv c d && rm -f e", set(), {"b", "c", "d", "e"}, False),
        ("echo 'open", set(), set(), False),
        ("tail -n +5 a", {"a"}, set(), False),
        ("cd sub; cat ../a", {"a"}, set(), True),
        ("cd a; cd b; cd ../c && cat x > y", set(), {"a/c/y"}, False),
        ("", set(), set(), False),
        ('grep ">" index.html', set(), set(), False),
        ("grep \\> a; echo '; rm b' | cat", set(), set(), False),
        ("find . -name a -exec cat {} \\; > b", set(), {"b"}, False),
        ("cat a | grep ';' | wc -l", {"a"}, set(), False),
        ("cat a |\n\n  head", {"a"}, set(), False),
        ("cat a  # don't > b", {"a"}, set(), True),
        ("cat a \\\n  b", {"a", "b"}, set(), True),
        ("cat 'a (1)'", {"a (1)"}, set(), True),
        ("cat <(ls) a", set(), set(), False),
        ("cat a $(ls)", set(), set(), False),
        ("cat a; (cat b)", set(), set(), False),
        ("rm a 2>/dev/null", set(), {"a"}, False),
        ("echo ' 2>/dev/null ' > a 2> b", set(), {"a", "b"}, False),
        ("make 1>a >|b &>>c", set(), {"a", "b", "c"}, False),
    ],
)
def test_what_a_command_touches(
    command: str, reads: set[str], writes: set[str], whole: bool
) -> None:
    assert touched("bash", command) == (reads, writes, whole)


def test_window() -> None:
    """A step has 29 tokens: 4 for the call, 25 for the result. The words have 2 each."""
    steps = [step("ls", f"{i}" * 100) for i in range(6)]
    answer = {"role": "assistant", "content": "Done."}
    flat = [message for each in steps for message in each]
    assert keep_window([USER, *flat], newest=60) == [USER, *steps[4], *steps[5]]
    assert keep_window([USER, *flat], newest=86, first=31) == [
        USER, *steps[0], *steps[4], *steps[5],
    ]  # fmt: skip
    assert keep_window([USER, *flat], newest=0) == [USER, *steps[5]]
    # What of an exchange stays has its user's words and its answer; all of one can go.
    task, thanks = {"role": "user", "content": "Task."}, {"role": "user", "content": "Thanks."}
    long = [USER, *steps[0], answer, task, *steps[1], answer, thanks, *steps[2], *steps[3]]
    assert keep_window(long, newest=30) == [USER, answer, thanks, *steps[3]]
    assert keep_window(long, newest=61) == [USER, answer, thanks, *steps[2], *steps[3]]
    assert keep_window(long, newest=96) == [
        USER, answer, task, *steps[1], answer, thanks, *steps[2], *steps[3],
    ]  # fmt: skip


def test_heavy_hitters() -> None:
    """A step has 29 tokens. The heaviest that fit stay, and the task, the newest and the new."""
    steps = [step("ls", f"{i}" * 100) for i in range(6)]
    flat = [message for each in steps for message in each]
    mass: list[float | None] = [9.0, *[0.0, 1.0], *[2.0, 5.0], *[3.0, 3.0], *[0.0, 2.0], *[0, 0]]
    kept = heavy_hitters([USER, *flat], mass=mass, budget=60)
    assert kept == [USER, *steps[1], *steps[2], *steps[5]]
    kept = heavy_hitters([USER, *flat], mass=mass, budget=30, newest=60)
    assert kept == [USER, *steps[1], *steps[4], *steps[5]]
    # What was dropped before stays dropped, however much room there is.
    mass[1] = mass[2] = None
    assert heavy_hitters([USER, *flat], mass=mass, budget=999) == [USER, *flat[2:]]


def test_heavy_hitters_behind_another_policy() -> None:
    """Masses belong to the messages as they were sent, whatever the others left of them."""
    messages = [USER, *step("make", BAD), *step("a", "1" * 100), *step("make", GOOD)]
    messages += [*step("b", "2" * 100), *step("c", "3" * 100)]
    mass = [1.0, 9.0, 9.0, 0.0, 1.0, 0.0, 1.0, 5.0, 5.0, 0.0, 0.0]
    hitters = {"name": "heavy_hitters", "mass": mass, "budget": 30}
    edited = apply_policy([hitters, {"name": "drop_failed_calls"}], messages)
    assert edited.messages == [USER, *messages[7:9], *messages[9:]]
    assert [(each.policy, each.messages) for each in edited.applied] == [
        ("heavy_hitters", 4),
        ("drop_failed_calls", 2),
    ]


def test_heavy_hitters_turn_by_turn() -> None:
    """With null for what was dropped, nothing comes back, whatever attention does."""
    messages: list[Message] = [USER]
    sent: set[int] = {0}
    gone: set[int] = set()
    for turn in range(12):
        messages += step(f"ls {turn}", f"{turn}" * 100)
        mass = [
            None if i in gone else float((i // 2 * 7 + turn * 5) % 11)
            for i in range(len(messages) - 2)
        ]
        edited = heavy_hitters(messages, mass=mass, budget=90)
        sent = {i for i, message in enumerate(messages) if message in edited}
        assert not sent & gone and len(sent) <= 9
        gone = set(range(len(messages))) - sent
    assert len(gone) == 16
