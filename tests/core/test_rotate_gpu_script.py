"""I2 and I3 by scripts/gpu_rows.py: its checks on a CPU, right and wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "scripts/gpu_rows.py"


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script's main, after `code`."""
    start = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import gpu_rows\n"
    return subprocess.run(
        [sys.executable, "-c", f"{start}{code}\nsys.exit(gpu_rows.main())", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_checks_pass(tmp_path: Path) -> None:
    """I2, I3: the kernel on layers of their own, by Triton's interpreter."""
    report = tmp_path / "rows.json"
    done = _run("", "--cpu-check", "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(report.read_text())["checks"] == "passed"
    assert done.stdout.count("right:") == 3


WRONG = {
    "turns the other way": "gpu_rows.rotate_triton.Turns.of = lambda deltas, *rest, "
    "of=gpu_rows.rotate_triton.Turns.of: of(-deltas, *rest)",
    "starts a column early": "gpu_rows.rotate_triton.launch = lambda *a, "
    "launch=gpu_rows.rotate_triton.launch, **k: launch(*a[:6], a[6] - 1, **k)",
    "writes one slot on": "gpu_rows.rotate_triton.launch = lambda *a, "
    "launch=gpu_rows.rotate_triton.launch, **k: launch(*a[:3], (a[3] + 1) % 120, *a[4:], **k)",
    "writes NaN where it turns": "T = gpu_rows.rotate_triton.Turns; "
    "T.of = lambda *a, of=T.of: (lambda t: T(t.which, t.tables * float('nan')))(of(*a))",
}


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG.keys())
def test_checks_fail(code: str) -> None:
    done = _run(f"gpu_rows.SMALL = gpu_rows.SMALL[:1]; {code}", "--cpu-check")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "wrong:" in done.stdout
