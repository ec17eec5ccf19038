"""`leyline verify`: what it finds on models that are right, and that it finds what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.cli import app
from leyline.verify import answers, drift, forget, influence, kept_rows
from leyline.verify.cases import KINDS, make
from leyline.verify.report import markdown
from leyline.verify.run import Options, run
from leyline.verify.subject import Subject, load

PAPERS = ("deepseek_v2", "joyai_flash", "glm4_moe_lite", "moonlight")


@pytest.fixture(params=["moonlight", "glm4"])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """MLA in halves, and GQA with half of each head in interleaved pairs."""
    loaded = load(request.param, request.param, 0.05)
    with loaded.engine:
        yield loaded


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.name: row for row in rows}


def quiet(text: str) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_quick_run_holds(name: str) -> None:
    """The paper's four models' rows and frequencies."""
    subject = load(name, name, 0.05)
    with subject.engine:
        found = run(subject, Options(quick=True))
    assert found.passed, [row.name for row in found.results.rows if row.met is False]
    assert found.skipped.keys() == {"answers"}
    assert found.facts["rotary_width"] == len(found.facts["inv_freq"]) * 2 == 64
    measured = by_name(found.results.rows)
    assert measured["rows.bitwise"].value == 0
    assert measured["forget.rows"].value == 0


def test_kept_rows_that_are_not_turned_are_found(subject: Subject) -> None:
    with answers.unturned(subject.engine):
        rows = by_name(kept_rows.run(subject, 1, quiet))
    assert rows["rows.rotation"].met is False
    assert rows["rows.truth"].met is False
    assert rows["rows.bitwise"].met


def test_a_rotation_by_one_position_too_many_is_found(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = subject.engine.store.planes
    rotate = planes.rotate
    monkeypatch.setattr(planes, "rotate", lambda slots, shifts: rotate(slots, shifts + 1))
    rows = by_name(kept_rows.run(subject, 1, quiet))
    assert rows["rows.rotation"].met is False
    assert rows["rows.truth"].met is False


def test_a_touched_latent_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    planes = subject.engine.store.planes
    rotate = planes.rotate

    def careless(slots: np.ndarray, shifts: np.ndarray) -> None:
        rotate(slots, shifts)
        still = planes.keys[1] if subject.name == "moonlight" else planes.values[1]
        still[int(slots[0]), 0, 0] += 1

    monkeypatch.setattr(planes, "rotate", careless)
    rows = by_name(kept_rows.run(subject, 1, quiet))
    assert rows["rows.bitwise"].met is False


def test_forget_that_amortizes_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "forgets", property(lambda channel: False))
    monkeypatch.setattr(forget, "Mode", type("Kept", (), {"FORGET": "amortize"}))
    rows = by_name(forget.run(subject, 1, quiet))
    assert rows["forget.rows"].met is False


@pytest.mark.parametrize("kind", KINDS)
def test_cases_keep_what_they_say(kind: str) -> None:
    """The target is the source's kept tokens and the replacements, in order."""
    rng = np.random.default_rng()
    source = rng.permutation(1000)
    case = make(rng, kind, source, np.arange(2000, 2010))
    kept = case.kept >= 0
    assert np.array_equal(case.target[kept], source[case.kept[kept]])
    written = sum(len(edit.replacement) for edit in case.edits)
    assert (~kept).sum() == written + 10
    assert np.all(np.diff(case.kept[kept]) > 0)
    gone = sum(edit.end - edit.start for edit in case.edits)
    assert len(case.target) == 1000 - gone + written + 10


def test_drift_grows_as_roundings_do(subject: Subject) -> None:
    """One rounding to bf16: 2^-9 at most, and errors add up as a random walk."""
    rows = by_name(drift.run(subject, (1, 4, 16, 64), quiet))
    assert 2**-11 < rows["drift.once"].value < 2**-9
    assert 0.3 < rows["drift.growth"].value < 0.7
    assert rows["drift.narrow"].value > 1.2
    assert rows["drift.fp32"].value < 1e-5


def test_growth_is_the_exponent() -> None:
    assert drift.growth([1, 10, 100], [3.0, 30.0, 300.0]) == pytest.approx(1)
    assert drift.growth([1, 4, 16], [5.0, 10.0, 20.0]) == pytest.approx(0.5)


def test_divergence_and_preference() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.5, 0.25]).double()
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert influence.divergence(p.log(), q.log()) == pytest.approx(expected)
    assert influence.preference(p.log(), q.log()) == pytest.approx(math.log(2))
    assert influence.preference(p.log(), p.log()) == 0


def test_influence_asks_each_width_on_each_prompt(subject: Subject) -> None:
    rows = by_name(influence.run(subject, 2, 12, quiet))
    for kind in ("as_it_was", "near", "phrase_kept", "phrase_new"):
        details = rows[f"influence.{kind}.full"].details
        assert list(details["sides"]) == ["0", "16", "64", "256", "all"]
        for sides in details["sides"].values():
            assert sides["full"] + sides["fresh"] + sides["neither"] == len(details["apart"])
        assert max(details["sides"]["all"]["from_fresh"]) < 0.05  # rounding in bf16
        assert rows[f"influence.{kind}.fresh"].met


def test_command_writes_a_report(tmp_path: Path) -> None:
    line = ["verify", "llama", "--memory", "0.05", "--quick", "--out", str(tmp_path / "r")]
    only = ["--only", "rows", "--only", "drift", "--json", str(tmp_path / "all.json")]
    result = CliRunner().invoke(app, [*line, *only])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads((tmp_path / "r" / "llama.json").read_text())
    assert found == json.loads((tmp_path / "all.json").read_text())
    assert {row["name"].split(".")[0] for row in found["rows"]} == {"rows", "drift"}
    page = (tmp_path / "r" / "llama.md").read_text()
    assert all(row["shown"] in page for row in found["rows"])
    assert page.count("holds") >= 7
    assert (tmp_path / "r" / "llama-drift.png").stat().st_size > 5000
    found["passed"] = False
    assert "Not all of it holds" in markdown(found, "leyline verify", [])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["verify", "llama", "--only", "speed"], "no measurement 'speed'"),
        (["verify", "no-such-model"], "is no directory"),
        (["verify", "llama", "--memory", "0"], "must be a number of GiB above 0"),
        (["verify", "llama", "--memory", "0.0001"], "memory"),
    ],
)
def test_command_refuses_with_a_line(line: list[str], says: str) -> None:
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output


def test_rotations_that_are_not_a_number_fail(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A goal that anything meets is none."""
    compare, truth = kept_rows._compare, kept_rows._from_truth
    monkeypatch.setattr(kept_rows, "_compare", lambda *a: (compare(*a)[0], math.nan))
    monkeypatch.setattr(kept_rows, "_from_truth", lambda *a: math.nan if a else truth(*a))
    rows = by_name(kept_rows.run(subject, 1, quiet))
    assert rows["rows.rotation"].met is False and rows["rows.truth"].met is False
    monkeypatch.setattr(forget, "_apart", lambda *a: math.nan)
    assert by_name(forget.run(subject, 2, quiet))["forget.empty"].met is False


def test_answers_that_are_not_a_number_fail(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would begin with the same token, and so agree."""
    monkeypatch.setattr(
        influence, "logits", lambda engine, key, start: torch.full((1, engine.vocab_size), math.nan)
    )
    found = run(subject, Options(quick=True, only=("influence",)))
    assert "no numbers" in found.failed["influence"] and not found.passed


def test_nothing_checked_is_not_passed(subject: Subject) -> None:
    found = run(subject, Options(only=("answers",)))
    assert not found.checked and not found.passed and found.skipped


def test_standard_errors_of_a_difference_by_turns() -> None:
    def said(*nll: float, tokens: tuple[int, ...]) -> list[answers.Said]:
        return [
            answers.Said("s", i, n, value, 0, 0, True)
            for i, (value, n) in enumerate(zip(nll, tokens, strict=True))
        ]

    tokens = (2, 2, 2, 2)
    ours, theirs = said(3, 5, 3, 5, tokens=tokens), said(1, 1, 1, 1, tokens=tokens)
    # Differences a token 1, 2, 1, 2: mean 1.5, standard deviation 0.577, over the root of 4.
    assert answers.standard_errors(ours, theirs) == pytest.approx(1.5 / (math.sqrt(1 / 3) / 2))
    assert answers.standard_errors(theirs, ours) == -answers.standard_errors(ours, theirs)
    assert math.isnan(answers.standard_errors(ours[:1], theirs[:1]))
    assert math.isnan(answers.standard_errors(theirs, theirs))
