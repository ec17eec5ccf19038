"""`leyline eval debug-gym`: what it refuses, prints and writes."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("matplotlib")

from beside import ASKS, LINGERS, ended, fake, lingering, runs
from click.testing import Result
from plain_server import plain
from tiny_server import running
from typer.testing import CliRunner

from leyline import cli
from leyline.cli.evaluate import without_key
from leyline.evals import __main__ as on_a_server_of_its_own
from leyline.evals.gym import VARIABLE

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
NOWHERE = "http://127.0.0.1:9"


def debug_gym(*args: object) -> Result:
    return CliRunner(env=WIDE).invoke(cli.app, ["eval", "debug-gym", *map(str, args)])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "say --allow-shell"),
        (["--allow-shell", "--arms", "append,cut"], "no arm 'cut'; there are append, truncate"),
        (["--allow-shell", "--tasks", "chess"], "no task 'chess'; there are config"),
        (["--scripted", "--tasks", "all"], "no scripted answers for pandas_dataframe"),
        (["--scripted", "--data", "no-such-folder"], "no-such-folder is no folder"),
        (["--scripted", "--python", "no-such-python"], "make env-debug-gym"),
        (["--sandbox", "env", "--python", "no-such-python"], "make env-debug-gym"),
    ],
)
def test_refusals_come_before_anything_is_written(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    done = debug_gym("--endpoint", NOWHERE, "--out", tmp_path / "out", *args)
    assert done.exit_code == 1 and says in done.output
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    python = fake(tmp_path, ASKS)
    done = debug_gym(
        "--endpoint", NOWHERE, "--out", tmp_path / "out", "--allow-shell", "--python", python
    )
    assert done.exit_code == 1 and "no server answers" in done.output


def test_the_report_tells_the_command_but_not_the_key() -> None:
    words = ["eval", "debug-gym", "--api-key", "secret", "--api-key=secret", "--out", "/a/b/c"]
    shown = without_key(words)
    assert shown.startswith("leyline eval debug-gym --api-key") and shown.endswith("--out c")
    assert "secret" not in shown
    assert "secret" not in without_key(["--api-key", "--secret=1", "--api-key", "--secret"])


def test_the_report_tells_no_password_and_no_folder() -> None:
    words = [
        "--endpoint",
        "http://me:pass@host:1/v1",
        "--endpoint=http://me:p@ss@host",
        "--data=/a/b",
    ]
    assert without_key(words) == (
        "leyline --endpoint http://host:1/v1 --endpoint=http://host --data=b"
    )


def test_it_writes_report_numbers_and_picture(tmp_path: Path) -> None:
    python, out = fake(tmp_path, ASKS), tmp_path / "out"
    with running() as server:
        args = ("--endpoint", server.url + "/v1", "--out", out, "--allow-shell", "--python", python)
        done = debug_gym(*args, "--tasks", "purr", "-n", 2, "--max-tokens", 2, "-c", 2)
        assert done.exit_code == 0, done.output
        assert "6 episodes, 0 of them finished already" in done.output
        again = debug_gym(*args, "--tasks", "purr", "-n", 2, "--max-tokens", 2)
        assert "6 episodes, 6 of them finished already" in again.output
        late = debug_gym(*args, "--tasks", "purr", "--max-tokens", 2, "--time-limit", 60)
        other = debug_gym(*args, "--tasks", "purr", "--max-tokens", 3)
    assert other.exit_code == 1 and "has episodes with max_tokens 2, not 3" in other.output
    assert late.exit_code == 1 and "with time_limit 3600.0, not 60.0" in late.output
    value = json.loads((out / "report.json").read_text())
    assert [line["arm"] for line in value["lines"]] == ["append", "truncate", "splice"]
    assert len(value["episodes"]) == 6 and value["server"]["url"] is None
    assert "## Compared" in (out / "report.md").read_text()
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_one_is_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ("--out", out, "--allow-shell", "--tasks", "purr", "--arms", "append", "--keep", 1)
    with running() as server:
        address = server.url.replace("//", "//me:word@")
        broken = debug_gym(
            "--endpoint", address, *args, "--python", fake(tmp_path, "exit('broken')\n")
        )
        assert broken.exit_code == 1 and "1 episode is not finished" in broken.output
        done = debug_gym("--endpoint", address, *args, "--python", fake(tmp_path, ASKS))
    assert done.exit_code == 0 and "1 episode, 0 of them" in done.output
    page = (out / "report.md").read_text()
    assert "1 of 1 episode (1 task, 1 seed)" in page and "newest 1 stays" in page
    assert "me:word" not in page + (out / "report.json").read_text() + broken.output + done.output


def test_episodes_without_an_end_are_exit_code_1(tmp_path: Path) -> None:
    with running() as server:
        done = debug_gym(
            "--endpoint", server.url, "--out", tmp_path / "out", "--allow-shell",
            "--python", fake(tmp_path, "exit('broken')\n"), "--tasks", "purr",
        )  # fmt: skip
    assert done.exit_code == 1
    assert "3 episodes are not finished; run it again" in done.output and "broken" in done.output


STARTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test's may be ignored
from leyline.cli import main
main()
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(("told", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_told_to_end_it_waits_for_no_answer_and_leaves_no_process(
    tmp_path: Path, told: signal.Signals, code: int
) -> None:
    asked: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    with plain(unanswered=asked) as url:
        line = [sys.executable, "-c", STARTED, "eval", "debug-gym", "--endpoint", url]
        line += ["--allow-shell", "--python", str(fake(tmp_path, LINGERS)), "--arms", "append"]
        line += ["--tasks", "purr", "--out", str(tmp_path / "out")]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            left = lingering(asked.get(timeout=120))
            assert all(map(runs, left))
            process.send_signal(told)
            assert process.wait(60) == code  # the server still has not answered
        finally:
            process.kill()
            process.wait()
    assert ended(left)


@pytest.mark.slow
def test_results_that_lack_episodes_are_not_written(tmp_path: Path) -> None:
    """They would take the place of whole ones."""
    python, out = fake(tmp_path, "exit('broken')\n"), tmp_path / "out"
    words = ["--model", "nano", "--tasks", "purr", "--out", str(out), "--python", str(python)]
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match=r"not all episodes came to their end: .*broken"):
            on_a_server_of_its_own.main(words)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not out.exists()
