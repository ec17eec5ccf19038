"""The `leyline` object: what is taken, and the sentence that everything else gets (I6)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline.api.errors import FieldError
from leyline.api.leyline_object import MAX_NAME, LeylineReport, check_session, parse_leyline
from leyline.directive import Directive, Mode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
OBJECTS = st.dictionaries(
    st.sampled_from(
        ["session", "mode", "repair", "directives", "policy", "strict", "scrub", "other"]
    ),
    JSON
    | st.sampled_from(["run", "forget", "repair", True, 3])
    | st.lists(
        st.dictionaries(
            st.sampled_from(["start", "end", "replacement", "mode", "repair", "x"]),
            JSON | st.integers(0, 9) | st.just("forget"),
        ),
        max_size=3,
    ),
)


def test_defaults() -> None:
    given = parse_leyline({"session": "run"})
    assert (given.session, given.mode, given.repair, given.edits) == ("run", "amortize", 0, None)
    assert (given.policy, given.strict, given.scrub) == (None, False, False)


def test_everything() -> None:
    given = parse_leyline(
        {
            "session": "run 42 / ü",
            "mode": "repair",
            "repair": 7,
            "directives": [{"start": 1, "end": 2}, [5, 9, [4], "forget"]],
            "policy": {"name": "x"},
            "strict": True,
            "scrub": True,
        }
    )
    assert given.mode is Mode.REPAIR and given.repair == 7
    assert given.edits == (Directive(1, 2), Directive(5, 9, (4,), Mode.FORGET))
    assert given.policy == {"name": "x"} and given.strict and given.scrub


def test_no_directives_is_not_the_same_as_none() -> None:
    assert parse_leyline({"session": "a", "directives": []}).edits == ()
    assert parse_leyline({"session": "a", "directives": None}).edits is None


@given(OBJECTS)
def test_whatever_comes_is_taken_or_named(obj: dict[str, Any]) -> None:
    try:
        given = parse_leyline(obj)
    except FieldError as error:
        assert error.field == "leyline" or error.field.startswith("leyline.")
        assert str(error) == f"{error.field}: {error.message}"
        assert error.message.endswith(".") and "\n" not in error.message
        assert len(error.message) < 400
    else:
        assert set(obj) <= set(type(given).model_fields)
        assert given.session == obj["session"]


@pytest.mark.parametrize("name", ["a", "a b", "../x", "日本", "🚀", "x" * MAX_NAME, "%00", "'"])
def test_session_names(name: str) -> None:
    assert check_session(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * (MAX_NAME + 1), "a\n", "\x00", "\x1b[2J", "\u202e", "\ud800"]
)
def test_bad_session_names(name: str) -> None:
    with pytest.raises(FieldError) as caught:
        check_session(name)
    assert caught.value.field == "session"
    assert caught.value.message.isprintable()


def test_report_on_the_wire() -> None:
    """As the design shows it."""
    report = LeylineReport.model_validate(
        {
            "session": "run-42",
            "edits": [
                {
                    "start": 812,
                    "end": 1490,
                    "replacement_tokens": 3,
                    "shift": -675,
                    "mode": "amortize",
                }
            ],
            "tokens": {"prompt": 5210, "shared": 812, "moved": 4300, "computed": 98},
            "fallback": None,
            "splice_ms": 0.8,
            "copied": False,
        }
    )
    assert report.model_dump(mode="json")["edits"][0]["mode"] == "amortize"
    assert report.model_dump(mode="json")["fallback"] is None
