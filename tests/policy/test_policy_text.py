"""Commands in texts of strangers: found as plain expressions find them, but in one pass."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.policy import PolicyError, apply_policy
from leyline.policy.look import behind_thoughts
from leyline.policy.shell import Touched, programs, touched
from leyline.policy.turns import _fences, clear_fences
from leyline.policy.words import LONGEST, tokens, without_heredocs

FENCE = re.compile(r"```(\w*)[^\n]*\n(.*?)\n?```", re.DOTALL)
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w++)\1(.*)\n(?:.*\n)*?[ \t]*\2[ \t]*(?=\n|\Z)")
"""They say what is meant. On some texts they take a time that grows with the square."""

PIECES = ["```", "`", "\n", "bash", "a", " ", "x = 1", "``", "é"]
SHELL = ["<<", "<<-", "E", "'E'", '"E"', "\n", " ", "\t", "cat", "F", "<", "<<E", "\nE\n", ">f"]


def texts(pieces: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=30).map("".join)


@given(texts(PIECES))
def test_fences_are_those_of_the_expression(text: str) -> None:
    found = [(fence.name, fence.body) for fence in _fences(text)]
    assert found == FENCE.findall(text)
    assert clear_fences(text, "gone") == FENCE.sub(
        lambda each: f"```{each.group(1)}\ngone\n```", text
    )


@given(texts(SHELL))
def test_heredocs_are_those_of_the_expression(command: str) -> None:
    expected = HEREDOC.sub(lambda found: f"<<{found.group(2)}{found.group(3)}", command)
    assert without_heredocs(command) == expected


@given(texts(["a", "b.py", "'", '"', "\\", " ", "\t", "''", '"a b"', "=", "-n"]))
def test_words_are_those_of_the_library(command: str) -> None:
    """shlex, which copies what it has of a word for each character, says what is meant."""
    try:
        expected = shlex.split(command)
    except ValueError:  # an open quote
        expected = []
    assert tokens(command) == [(word, False) for word in expected]


WORD = st.text(st.sampled_from("ab;&|()<>\n'\"\\ #2$`"), max_size=6)
OPERATORS = ["|", "||", "&&", ";", "&", "\n", "(", ")", ">", ">>", "2>", "2>&", "&>", "<", "<<"]


@given(st.lists(st.tuples(st.lists(WORD, min_size=1), st.sampled_from(OPERATORS)), max_size=6))
def test_what_is_quoted_is_no_operator(parts: list[tuple[list[str], str]]) -> None:
    command = " ".join(f"{shlex.join(words)} {operator}" for words, operator in parts)
    expected = []
    for words, operator in parts:
        expected += [*((word, False) for word in words), (operator, True)]
    assert tokens(command) == expected


def test_comments_and_joined_lines() -> None:
    assert tokens("# don't\nmake a#b \\\n-j # > x") == tokens("\nmake 'a#b' -j")
    assert tokens("a\\\nb 2>&1;#c") == [("ab", False), ("2>&", True), ("1", False), (";", True)]


MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "said",
    ["```" + "a" * MEGABYTE, "`" * MEGABYTE, "```a" * (MEGABYTE // 4), "```\n" * (MEGABYTE // 4)],
    ids=["word", "ticks", "open", "many"],
)
def test_long_texts_come_to_an_end(said: str) -> None:
    """In hours, if it grew with the square."""
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": said},
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "?"},
    ]
    assert apply_policy({"name": "clear_tool_outputs", "keep": 0}, messages).messages


LONG = {
    "heredocs": "cat <<a\n" * (MEGABYTE // 8),
    "heredocs in a line": "<<a " * (MEGABYTE // 4),
    "word": f"echo '{'QUJD' * (MEGABYTE // 4)}' | base64 -d > f",
    "escapes": 'echo "' + "\\a" * (MEGABYTE // 2),
    "quotes": "''" * (MEGABYTE // 2),
    "folders": "cd a;" * MEGABYTE,
    "files": "rm " + "a " * (MEGABYTE // 2),
    "operators": ">" * MEGABYTE,
    "digits": "1" * MEGABYTE,
}
NOTHING = Touched(frozenset(), frozenset())


@pytest.mark.parametrize("name", LONG)
def test_long_commands_come_to_an_end(name: str) -> None:
    """They say nothing. As long as may be looked at, too."""
    assert touched("bash", LONG[name]) == NOTHING
    assert programs(LONG[name]) == ()
    assert touched("bash", LONG[name][:LONGEST]) == NOTHING


def test_how_long_a_command_may_be() -> None:
    """A written file's text is no part of it."""
    text = "x = 1\n" * MEGABYTE
    assert touched("bash", f"cat <<'E' > a.py\n{text}E\n").writes == {"a.py"}
    assert touched("bash", f"echo {'a' * LONGEST} > a.py") == NOTHING
    assert touched("bash", f"echo {'a' * (LONGEST - 20)} > a.py").writes == {"a.py"}
    files = [f"a{i}" for i in range(101)]
    assert touched("bash", f"rm {' '.join(files[:100])}").writes == {*files[:100]}
    assert touched("bash", f"rm {' '.join(files)}") == NOTHING


@pytest.mark.parametrize("block", ["</think>", "<think></think> ", "a</think>\n\n"])
def test_many_thoughts_come_to_an_end(block: str) -> None:
    said = block * (MEGABYTE // len(block))
    assert behind_thoughts(f"{said} Yes.") == "Yes."
    assert behind_thoughts(f"{said}<think>") == "<think>"
    many: list[dict[str, Any]] = [{"role": "user", "content": "?"}] * 1000
    messages = [many[0], {"role": "assistant", "content": said}, *many]
    assert apply_policy({"name": "clear_thinking", "keep": 0}, messages).messages == messages


def test_an_integer_beyond_all_floats_is_refused() -> None:
    spec = {"name": "heavy_hitters", "mass": [10**400], "budget": 1}
    with pytest.raises(PolicyError, match="mass"):
        apply_policy(spec, [{"role": "user", "content": "a"}])
    for wrong in (float("nan"), float("inf"), -1, True):
        with pytest.raises(PolicyError, match="mass"):
            apply_policy({**spec, "mass": [wrong]}, [{"role": "user", "content": "a"}])
