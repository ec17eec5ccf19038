"""The results page: made from result files alone, and honest about those that are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leyline.proof.index import text, write
from leyline.verify.report import write as write_report
from leyline.verify.run import Options, run
from leyline.verify.subject import load

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_nothing_run(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert page == tmp_path / "README.md"
    claims = [line for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(claims) == 6
    assert all("not run" in line or "not measured" in line for line in claims)


def test_a_model_that_was_verified(tmp_path: Path) -> None:
    subject = load("moonlight", "moonlight", 0.05)
    with subject.engine:
        found = run(subject, Options(only=("rows", "drift"), quick=True)).as_json()
    write_report(found, tmp_path / "verify", "leyline verify moonlight")
    assert "holds on 1 of 1" in text(tmp_path)
    file = tmp_path / "verify" / "moonlight.json"
    file.write_text(json.dumps({**found, "passed": False}))
    assert "holds on 0 of 1" in text(tmp_path)
    assert "moonlight: does not hold" in text(tmp_path)


def test_replay_numbers(tmp_path: Path) -> None:
    """Signs, pooling over concurrencies, and what is saved a call."""

    def compared(c: int, arm: str, beside: str, same: int, points: float) -> dict[str, object]:
        return {
            "concurrency": c,
            "arm": arm,
            "beside": beside,
            "points": points,
            "computed": 0.75,
            "edited": 20,
            "e2e_edited": 0.5,
            "e2e_alike": 1.125,
            "saved_edited_s": 2.0,
            "different": 3,
            "same_first": same,
            "known": 20,
            "same_clear": 12,
            "clear": 15,
        }

    found = {
        "comparisons": [
            compared(c, *pair)
            for c in (1, 4)
            for pair in (
                ("truncate", "append", 15, -3.0),
                ("splice", "append", 19 if c == 1 else 17, 1.0),
                ("splice", "truncate", 16, 11.0 + c),
            )
        ],
        "lines": [{"concurrency": c, "compared": 20} for c in (1, 4)],
    }
    folder = tmp_path / "mechanism-nano"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(found))
    page = text(tmp_path)
    assert "C = 1, 4 | +11.2 points, C = 1, 4, 8, 16 | +12.0, +15.0 points" in page
    assert "100, 100 ms a call saved" in page
    assert "tokens computed 0.750, 0.750 of the prefix cache's" in page
    assert "0.500, 0.500 of the prefix cache's" in page and "machine was: 1.125, 1.125)" in page
    assert "splice 90.0% of 40 edited calls (80.0% where neither is near a tie)" in page
    assert "3 different first tokens among them" in page
    assert "fresh prefill of the edited prompt 75.0%" in page


def test_debug_gym_numbers(tmp_path: Path) -> None:
    found = {
        "by_task": {"purr": {}, "config": {}},
        "settings": {"model": "smollm2"},
        "lines": [
            {"arm": arm, "computed": computed}
            for arm, computed in (("append", 1000), ("truncate", 34_567), ("splice", 1234))
        ],
        "comparisons": [
            {"arm": "splice", "beside": beside, "computed": computed, "model_s": 0.25}
            for beside, computed in (("append", 1.25), ("truncate", 0.0357))
        ]
        + [{"arm": "truncate", "beside": "append"}],
    }
    (tmp_path / "debug-gym.json").write_text(json.dumps(found))
    page = text(tmp_path)
    assert "2 of debug-gym's tasks with scripted answers on smollm2" in page
    assert "with it and splices: 1,000, 34,567, 1,234." in page
    assert "compute 0.0357 of what truncation alone does, in 0.250 of its time" in page


@pytest.mark.skipif(not RESULTS.is_dir(), reason="make proof has not been run")
def test_the_page_is_that_of_the_results() -> None:
    assert (RESULTS / "README.md").read_text() == text(RESULTS)
