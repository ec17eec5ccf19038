"""The script that trains `nano`: a few steps of it, and that what it writes is what is shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from leyline.models.nano import nano_path

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_nano.py"


@pytest.mark.slow
def test_a_few_steps(tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), str(tmp_path), "--scale", "0.004"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    shipped, written = ({p.name for p in d.iterdir()} for d in (nano_path(), tmp_path))
    assert written == shipped - {"README.md"}
    ours, theirs = (
        json.loads((folder / "config.json").read_text()) for folder in (nano_path(), tmp_path)
    )
    assert ours == theirs
    log = json.loads((tmp_path / "training.json").read_text())
    assert (
        log["parameters"] == json.loads((nano_path() / "training.json").read_text())["parameters"]
    )
    assert log["curve"][-1]["loss"] < log["curve"][0]["loss"]
    assert log["losses"]["files"] < 7.6
