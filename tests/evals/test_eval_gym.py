"""The process beside: what it is told, how it ends, and what is said where it can't begin."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import pytest
from beside import fake

from leyline.evals import gym_child
from leyline.evals.gym import VARIABLE, Gym, GymError, TimeUp, find_python

JOB = {"task": "purr"}


def test_a_missing_environment_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="make env-debug-gym"):
        find_python()
    with pytest.raises(ValueError, match="nowhere; that is no file"):
        find_python(Path("nowhere"))
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert find_python() == Path(sys.executable).absolute()


def test_messages_go_both_ways(tmp_path: Path) -> None:
    code = "import sys; print(sys.stdin.readline().replace('task', 'echo'), flush=True)"
    with Gym(fake(tmp_path, code)) as gym, gym.start(JOB, 60) as episode:
        assert episode.get() == ("echo", "purr")


def test_the_process_gets_no_secrets_and_a_home_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYLINE_API_KEY", "secret")
    code = "import json, os; print(json.dumps({'env': dict(os.environ)}), flush=True)"
    with Gym(fake(tmp_path, code)) as gym, gym.start(JOB, 60) as episode:
        _, known = episode.get()
    assert set(known) <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "PWD", "SHLVL", "_"}
    assert "secret" not in str(known)
    assert known["HOME"] == known["TMPDIR"] and not Path(known["HOME"]).exists()


def test_an_end_without_a_word_says_what_was_on_stderr(tmp_path: Path) -> None:
    code = "import sys; sys.stdin.readline(); sys.exit('no such module')"
    with Gym(fake(tmp_path, code)) as gym, gym.start(JOB, 60) as episode:
        with pytest.raises(GymError, match="ended with code 1: no such module"):
            episode.get()


def runs(pid: int) -> bool:
    """Whether a process is there, and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_episode_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    code = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'pid': child.pid}), flush=True)\n"
        "time.sleep(600)\n"
    )
    with Gym(fake(tmp_path, code)) as gym, gym.start(JOB, 3) as episode:
        _, pid = episode.get()
        with pytest.raises(TimeUp, match="not done after 3 s"):
            episode.get()
    if os.path.exists("/proc/self/stat"):
        deadline = time.monotonic() + 60
        while runs(pid):  # killed, but perhaps not dead yet
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_sandbox_runs_the_process(tmp_path: Path) -> None:
    code = "import os; print('{\"word\": \"' + os.environ['INSIDE'] + '\"}', flush=True)"
    with Gym(fake(tmp_path, code), ["env", "INSIDE=yes"]) as gym, gym.start(JOB, 60) as episode:
        assert episode.get() == ("word", "yes")
    with Gym(fake(tmp_path, code), ["no-such-sandbox"]) as gym:
        with pytest.raises(ValueError, match="no-such-sandbox: can't be started"):
            gym.start(JOB, 60)


def test_a_gym_that_was_closed_starts_no_more(tmp_path: Path) -> None:
    with Gym(fake(tmp_path, "input()")) as gym:
        pass
    with pytest.raises(GymError, match="ending"):
        gym.start(JOB, 60)


def test_tasks_are_completed_as_debug_gym_has_them(tmp_path: Path) -> None:
    """The package's copy lacks files; those that are made up are not put over real ones."""
    source = tmp_path / "source"
    for task in ("patcher", "purr"):
        (source / task).mkdir(parents=True)
        (source / task / "test.py").write_text(
            'def test_1():\n    expected_output = "a\\nb\\nc\\nX"\n'
            'def test_2():\n    expected_output = "Y\\nb\\nc\\nd\\ne"\n'
            'def test_3():\n    expected_output = "SyntaxError: x.\\nRewrite failed."\n'
        )
    (source / "purr" / ".debugreadonly").write_text("mine")
    made = gym_child.prepared(source, "purr", tmp_path)
    assert (made / ".debugreadonly").read_text() == "mine" and (made / ".debugignore").exists()
    assert not (made / "source_code.txt").exists()
    patcher = gym_child.prepared(source, "patcher", tmp_path)
    assert (patcher / "source_code.txt").read_text() == "a\nb\nc\nd\ne"
    assert gym_child.digest(patcher) != gym_child.digest(made)
    with pytest.raises(FileNotFoundError, match="no task 'grader'"):
        gym_child.prepared(source, "grader", tmp_path)


@pytest.mark.slow
def test_the_patchers_text_is_that_of_debug_gym(debug_gym_python: Path) -> None:
    """Rebuilt from what the tests expect; the digest is that of the file in debug-gym's own
    repository."""
    (tests,) = debug_gym_python.parents[1].glob(
        "lib/python*/site-packages/data/mini_nightmare/patcher/test.py"
    )
    text = gym_child.patcher_text(tests.read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "447c444bf657877bd1a035a38385f271820bb95be8cbc5b8678667d219c19e36"
