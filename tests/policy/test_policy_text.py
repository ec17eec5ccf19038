"""Commands in texts of strangers: found as plain expressions find them, but in one pass."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.policy import PolicyError, apply_policy
from leyline.policy.shell import _without_heredocs
from leyline.policy.turns import _fences, clear_fences

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
    assert _without_heredocs(command) == expected


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


@pytest.mark.parametrize(
    "command", ["cat <<a\n" * (MEGABYTE // 8), "<<a " * (MEGABYTE // 4)], ids=["lines", "line"]
)
def test_long_commands_come_to_an_end(command: str) -> None:
    assert _without_heredocs(command) == command  # none is closed


def test_an_integer_beyond_all_floats_is_refused() -> None:
    spec = {"name": "heavy_hitters", "mass": [10**400], "budget": 1}
    with pytest.raises(PolicyError, match="mass"):
        apply_policy(spec, [{"role": "user", "content": "a"}])
    for wrong in (float("nan"), float("inf"), -1, True):
        with pytest.raises(PolicyError, match="mass"):
            apply_policy({**spec, "mass": [wrong]}, [{"role": "user", "content": "a"}])
