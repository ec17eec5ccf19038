"""Directives: refusing malformed ones, applying, composing and inverting."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from edit_strategies import edits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from leyline.directive import (
    LIMIT,
    Directive,
    DirectiveError,
    Edits,
    Mode,
    parse_directive,
    strongest,
    to_tokens,
)

SOURCE_LENGTH, VOCAB = 100, 1000

sources = st.lists(st.integers(0, 3), max_size=30)
all_modes = tuple(Mode)


# --- malformed directives -----------------------------------------------------------------------

NOT_A_NUMBER: list[Callable[[random.Random], Any]] = [
    lambda r: r.random() * 50,
    lambda r: float(r.randrange(50)),
    lambda r: r.random() < 0.5,
    lambda r: None,
    lambda r: str(r.randrange(50)),
    lambda r: "x\n. y" * r.randrange(1, 50),
    lambda r: [r.randrange(50)],
    lambda r: {"n": r.randrange(50)},
    lambda r: float("nan"),
    lambda r: float("inf"),
    lambda r: -r.randrange(1, 10**6),
    lambda r: LIMIT + r.randrange(1, 100),
    lambda r: 10 ** r.randrange(10, 6000),
    lambda r: -(10 ** r.randrange(10, 6000)),
    lambda r: b"3",
]
NOT_TOKENS: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.randrange(50),
    lambda r: "tokens",
    lambda r: b"tokens",
    lambda r: {"0": 1},
    lambda r: {1, 2},
    lambda r: True,
    lambda r: 0.5,
]
NOT_A_MODE: list[Callable[[random.Random], Any]] = [
    lambda r: r.choice(["", "AMORTIZE", "Forget", "forget ", "drop", "r\u00e9pair", "\n"]),
    lambda r: "amortize" * r.randrange(2, 40),
    lambda r: r.randrange(9),
    lambda r: None,
    lambda r: True,
    lambda r: ["forget"],
    lambda r: {"forget": 1},
]


def _valid(r: random.Random) -> dict[str, Any]:
    start = r.randrange(SOURCE_LENGTH)
    directive = {
        "start": start,
        "end": r.randrange(start + 1, SOURCE_LENGTH + 1),
        "replacement": [r.randrange(VOCAB) for _ in range(r.randrange(5))],
        "mode": r.choice(["amortize", "forget"]),
    }
    if r.random() < 0.3:
        directive |= {"mode": "repair", "repair": r.randrange(20)}
    return directive


def _malformed(r: random.Random) -> tuple[Any, str]:
    """A directive with one thing wrong, and the field that is."""
    d = _valid(r)
    kind = r.randrange(12)
    if kind in (0, 1):
        field = r.choice(["start", "end"])
        d[field] = r.choice(NOT_A_NUMBER)(r)
        return d, f".{field}"
    if kind == 2:
        d |= {"mode": "repair", "repair": r.choice(NOT_A_NUMBER)(r)}
        return d, ".repair"
    if kind == 3:
        d["replacement"] = r.choice(NOT_TOKENS)(r)
        return d, ".replacement"
    if kind == 4:
        at = r.randrange(len(d["replacement"]) + 1)
        d["replacement"].insert(at, r.choice(NOT_A_NUMBER)(r))
        return d, f".replacement[{at}]"
    if kind == 5:
        d.pop("repair", None)
        d["mode"] = r.choice(NOT_A_MODE)(r)
        return d, ".mode"
    if kind == 6:
        d |= {"mode": r.choice(["amortize", "forget"]), "repair": r.randrange(1, 50)}
        return d, ".repair"
    if kind == 7:
        d[r.choice(["begin", "Start", "", "repair_tokens", "x" * 500, "a\nb"])] = 1
        return d, ""
    if kind == 8:
        field = r.choice(["start", "end"])
        del d[field]
        return d, f".{field}"
    if kind == 9:
        d["end"] = SOURCE_LENGTH + r.randrange(1, 1000)
        return d, ".end"
    if kind == 10:
        values = [d["start"], d["end"], d["replacement"], "forget"]
        wrong = r.choice([values[:3], [*values, 0], [], None, 3, "forget", 2.5, True])
        return wrong, ""
    values = [d["start"], d["end"], d["replacement"], "forget"]
    at = r.choice([0, 1, 3])
    values[at] = r.choice(NOT_A_MODE if at == 3 else NOT_A_NUMBER)(r)
    return values, {0: ".start", 1: ".end", 3: ".mode"}[at]


def _refused(run: Callable[[], object]) -> DirectiveError:
    """The error, after checking that it reads as one short sentence."""
    with pytest.raises(DirectiveError) as caught:
        run()
    error = caught.value
    assert str(error) == f"{error.field}: {error.message}"
    assert error.message.isprintable() and 10 < len(error.message) < 200, error.message
    said = re.sub(r"'.*'(\.\.\.)?", "'value'", error.message)
    assert re.fullmatch(r"([^.]|\.\d)+\.", said), error.message
    return error


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_malformed_directives_are_refused_in_a_sentence_naming_the_field(first: int) -> None:
    """I6: only a malformed directive is an error, and a clear one. 2000 of them."""
    for seed in range(first, first + 100):
        _check_malformed(seed)


def _check_malformed(seed: int) -> None:
    r = random.Random(seed)
    obj, where = _malformed(r)
    place = r.randrange(3)
    objects = [_valid(r) for _ in range(place)] + [obj]

    def run() -> Edits:
        parsed = [parse_directive(o, f"directives[{i}]") for i, o in enumerate(objects)]
        return Edits.of(parsed, SOURCE_LENGTH, VOCAB)

    assert _refused(run).field == f"directives[{place}]{where}", (seed, obj)


@pytest.mark.parametrize(
    ("directive", "field"),
    [
        (Directive(5, 4), ".end"),
        (Directive(5, 5), ""),
        (Directive(101, 101, (1,)), ".start"),
        (Directive(0, 1, (VOCAB,)), ".replacement[0]"),
        (Directive(0, 1, (1, -1)), ".replacement[1]"),
        (Directive(True, 2), ".start"),
        (Directive(0, 2.0), ".end"),  # type: ignore[arg-type]
        (Directive(0, 2, mode="drop"), ".mode"),  # type: ignore[arg-type]
        (Directive(0, 2, mode=Mode.FORGET, repair=3), ".repair"),
        (Directive(0, 2, np.array([[1]])), ".replacement"),  # type: ignore[arg-type]
        ((0, 2), ""),
    ],
)
def test_a_directive_built_in_python_is_checked_too(directive: Any, field: str) -> None:
    error = _refused(lambda: Edits.of([Directive(0, 0, (1,)), directive], SOURCE_LENGTH, VOCAB))
    assert error.field == f"directives[1]{field}"


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        (Directive(0, 5), Directive(4, 6), "directives[1].start"),
        (Directive(4, 6), Directive(0, 5), "directives[0].start"),
        (Directive(0, 5), Directive(0, 5), "directives[1].start"),
        (Directive(0, 9), Directive(3, 3, (1,)), "directives[1].start"),
        (Directive(3, 3, (1,)), Directive(3, 3, (2,)), "directives[1].start"),
    ],
)
def test_overlap_is_refused(first: Directive, second: Directive, field: str) -> None:
    assert _refused(lambda: Edits.of([first, second], SOURCE_LENGTH)).field == field


def test_valid_directives_are_taken_as_written() -> None:
    wanted = Directive(3, 7, (1, 2), Mode.FORGET)
    assert parse_directive([3, 7, [1, 2], "forget"], "d") == wanted
    as_object = {"start": 3, "end": 7, "replacement": [1, 2], "mode": "forget", "repair": 0}
    assert parse_directive(as_object, "d") == wanted
    assert parse_directive({"start": 3, "end": 7}, "d") == Directive(3, 7)
    repair = {"start": 3, "end": 7, "mode": "repair", "repair": 8}
    assert parse_directive(repair, "d") == Directive(3, 7, (), Mode.REPAIR, 8)
    given = Directive(np.int64(3), 7, [1, 2], "forget")  # type: ignore[arg-type]
    (kept,) = Edits.of([given], 10)
    assert kept == wanted and kept.mode is Mode.FORGET and type(kept.start) is int


@given(st.integers(0, 2**31))
def test_valid_random_directives_are_accepted(seed: int) -> None:
    directive = parse_directive(_valid(random.Random(seed)), "d")
    assert list(Edits.of([directive], SOURCE_LENGTH, VOCAB)) == [directive]


# --- edits --------------------------------------------------------------------------------------


def _apply_slowly(edits: Edits, source: list[int]) -> list[int]:
    target = list(source)
    for d in reversed(edits):
        target[d.start : d.end] = d.replacement
    return target


@given(st.data(), sources)
def test_apply_is_slice_assignment_from_behind(data: st.DataObject, source: list[int]) -> None:
    edits = data.draw(edits_of(len(source)))
    target = edits.apply(source)
    assert target.dtype == np.int64 and target.tolist() == _apply_slowly(edits, source)
    assert len(target) == edits.target_length == len(source) + edits.shift
    assert edits.is_empty == (len(edits) == 0)
    spans = [(d.start, d.end) for d in edits]
    assert spans == sorted(spans)


@settings(max_examples=300)
@given(st.data(), sources)
def test_compose_is_one_after_the_other(data: st.DataObject, source: list[int]) -> None:
    first = data.draw(edits_of(len(source), modes=all_modes))
    second = data.draw(edits_of(first.target_length, modes=all_modes))
    both = first.compose(second)
    assert both.apply(source).tolist() == second.apply(first.apply(source)).tolist()
    assert Edits.of(both, len(source)) == both  # valid, sorted, disjoint
    assert {d.mode for d in both} <= {d.mode for d in (*first, *second)}


@settings(max_examples=200)
@given(st.data(), sources)
def test_compose_is_associative_and_has_a_unit(data: st.DataObject, source: list[int]) -> None:
    a = data.draw(edits_of(len(source), max_edits=3))
    b = data.draw(edits_of(a.target_length, max_edits=3))
    c = data.draw(edits_of(b.target_length, max_edits=3))
    left, right = a.compose(b).compose(c), a.compose(b.compose(c))
    assert left.apply(source).tolist() == right.apply(source).tolist()
    assert a.compose(Edits.of((), a.target_length)) == a
    assert Edits.of((), len(source)).compose(a) == a


@settings(max_examples=200)
@given(st.data(), sources)
def test_invert_gives_the_source_back(data: st.DataObject, source: list[int]) -> None:
    edits = data.draw(edits_of(len(source), modes=all_modes))
    inverse = edits.invert(source)
    assert Edits.of(inverse, edits.target_length) == inverse
    assert inverse.apply(edits.apply(source)).tolist() == source
    assert edits.compose(inverse).apply(source).tolist() == source
    assert all(d.mode is Mode.AMORTIZE for d in inverse)


def test_joined_edits_have_the_strongest_mode() -> None:
    first = Edits.of(
        [Directive(2, 4, (9,), Mode.REPAIR, 3), Directive(10, 12, (8,), Mode.FORGET)], 20
    )
    second = Edits.of([Directive(2, 3, (7, 7), Mode.REPAIR, 5), Directive(9, 10)], 18)
    assert list(first.compose(second)) == [
        Directive(2, 4, (7, 7), Mode.REPAIR, 5),
        Directive(10, 12, (), Mode.FORGET),
    ]
    assert strongest((Mode.REPAIR, 2), (Mode.AMORTIZE, 0)) == (Mode.REPAIR, 2)
    assert strongest((Mode.REPAIR, 2), (Mode.FORGET, 0)) == (Mode.FORGET, 0)
    assert strongest() == (Mode.AMORTIZE, 0)


def test_what_is_inserted_and_deleted_again_is_no_edit() -> None:
    inserted = Edits.of([Directive(4, 4, (1, 2))], 10)
    assert inserted.compose(Edits.of([Directive(4, 6)], 12)).is_empty


def test_edits_for_another_source_are_refused() -> None:
    edits = Edits.of([Directive(0, 1)], 10)
    assert _refused(lambda: edits.apply([1] * 9)).field == "source"
    assert _refused(lambda: edits.invert([1] * 11)).field == "source"
    assert _refused(lambda: edits.compose(edits)).field == "later"


def test_edits_are_values() -> None:
    edits = Edits.of([Directive(4, 4, (1,)), Directive(0, 2)], 10)
    same = Edits.of([Directive(0, 2), Directive(4, 4, (1,))], 10)
    assert edits == same and hash(edits) == hash(same) and edits != Edits.of(same, 11)
    assert edits[0] == Directive(0, 2) and edits[-1].shift == 1 and len(edits[:1]) == 1
    with pytest.raises(TypeError, match=r"Edits\.of"):
        Edits()


@pytest.mark.parametrize(
    "tokens",
    [[], (), range(4), [3, 0, LIMIT], (1, np.int32(2)), np.array([1, 2], np.uint8), np.arange(3)],
)
def test_to_tokens_takes_integers(tokens: Any) -> None:
    array = to_tokens(tokens)
    assert array.dtype == np.int64 and array.tolist() == [int(t) for t in tokens]


@pytest.mark.parametrize(
    ("tokens", "field"),
    [
        ([1, True], "t[1]"),
        ([1, 2, 3.0], "t[2]"),
        ([[1]], "t[0]"),
        ([1, -1], "t[1]"),
        ([LIMIT + 1], "t[0]"),
        (np.array([1.0]), "t"),
        (np.array([True]), "t"),
        (np.array([[1]]), "t"),
        (np.array(3), "t"),
        (np.array([0, -2]), "t[1]"),
        (np.array([0, 2**63], np.uint64), "t[1]"),
        ("123", "t"),
        (None, "t"),
        (b"123", "t"),
        ({1: 2}, "t"),
        (["1"], "t[0]"),
    ],
)
def test_to_tokens_refuses_the_rest(tokens: Any, field: str) -> None:
    assert _refused(lambda: to_tokens(tokens, "t")).field == field
