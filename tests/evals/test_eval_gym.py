"""The process beside: what it is told, how it ends, and what is said where it can't begin."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from beside import LINGERS, ended, fake, lingering

from leyline.evals import gym_child
from leyline.evals.gym import VARIABLE, Gym, GymError, TimeUp, _environment, find_python

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
    own = {"PATH", "HOME", "TMPDIR", "LANG", "PIP_USER"}
    assert set(known) <= own | {"LC_CTYPE", "PWD", "SHLVL", "_"}
    assert "secret" not in str(known)
    assert known["HOME"] == known["TMPDIR"] and not Path(known["HOME"]).exists()


def test_an_end_without_a_word_says_what_was_on_stderr(tmp_path: Path) -> None:
    code = "import sys; sys.stdin.readline(); sys.exit('no such module')"
    with Gym(fake(tmp_path, code)) as gym, gym.start(JOB, 60) as episode:
        with pytest.raises(GymError, match="ended with code 1: no such module"):
            episode.get()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            'import os; os.write(1, b\'{"ask": {"mess\'); os.kill(os.getpid(), 9)',
            "ended with code -9",
        ),
        ("print('a banner', flush=True); input()", "said 'a banner.n', no message"),
        ("print('[1]', flush=True); input()", "no message"),
    ],
)
def test_what_is_no_message_is_that_episodes_trouble(tmp_path: Path, code: str, says: str) -> None:
    with Gym(fake(tmp_path, code)) as gym, gym.start({}, 60) as episode:
        with pytest.raises(GymError, match=says):
            episode.get()


def test_an_episode_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    """Also with what has a session of its own, as debug-gym's debugger does."""
    with Gym(fake(tmp_path, LINGERS)) as gym, gym.start(JOB, 3) as episode:
        kind, body = episode.get()
        assert kind == "ask"
        with pytest.raises(TimeUp, match="not done after 3 s"):
            episode.get()
    assert ended(lingering(body))


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


def shell(folder: Path) -> Any:
    """As much of debug-gym's terminal as its `run` uses."""
    return SimpleNamespace(
        prepare_command=lambda entrypoint: ["/bin/bash", "-c", entrypoint],
        env_vars={"PATH": os.environ["PATH"]},
        working_dir=str(folder),
        command_timeout=60,
        logger=logging.getLogger("test"),
    )


def group(leader: int) -> list[int]:
    """The processes of a group, where there is /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if file.read_text().rpartition(")")[2].split()[2] == str(leader):
                found.append(int(file.parent.name))
    return found


def test_commands_say_what_they_print(tmp_path: Path) -> None:
    run = gym_child.run
    assert run(shell(tmp_path), "echo; echo out; echo err >&2; pwd; false") == (
        False,
        f"out\n{tmp_path}\nerr",
    )
    assert run(shell(tmp_path), "printf 'a\r\nb\\377\n'", strip_output=False) == (
        True,
        "a\nb\ufffd\n",
    )
    assert run(shell(tmp_path), "true", raises=True) == (True, "")
    with pytest.raises(ValueError, match="Failed to run command: exit 3"):
        run(shell(tmp_path), "exit 3", raises=True)


@pytest.mark.parametrize(
    "command", ["sleep 600 | tail -1", "sleep 600 &", "exec >&- 2>&-; sleep 600"]
)
def test_a_command_that_takes_too_long_ends_with_what_has_its_output(
    tmp_path: Path, command: str
) -> None:
    """debug-gym's own ends the shell alone, and waits for the others."""
    done, said = gym_child.run(shell(tmp_path), f"echo $$; {command}", timeout=1)
    assert not done and said.startswith("Command timed out after 1 seconds\nPartial output:\n")
    assert ended(group(int(said.split()[-1])))


def test_a_command_whose_output_another_session_has_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym_child, "AFTER_KILL_S", 0.2)
    code = "import time; open('began', 'w').close(); time.sleep(600)"
    child = f"subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    (tmp_path / "start.py").write_text(f"import subprocess, sys\nprint({child}.pid)\n")
    done, said = gym_child.run(shell(tmp_path), f"{sys.executable} start.py; echo end", timeout=5)
    assert not done and "end" in said
    os.kill(int(said.split()[-2]), 9)


def test_of_long_output_beginning_and_end_are_kept(tmp_path: Path) -> None:
    code = "print('begin' + 'x' * 3_000_000 + 'end')"
    (tmp_path / "long.py").write_text(code)
    done, said = gym_child.run(shell(tmp_path), f"{sys.executable} long.py")
    assert done and said.startswith("beginxxx") and said.endswith("xxxend")
    assert "[… 2,500,009 bytes left out …]" in said and len(said) < 500_100
    whole, why = gym_child.run(shell(tmp_path), f"{sys.executable} long.py", strip_output=False)
    assert not whole and why == "It is longer than 500,000 bytes"
    # Two outputs at their longest, and what debug-gym says of them, are not cut again.
    assert gym_child.shortened(said + said) == said + said
    cut = gym_child.shortened("a" * 2_000_000 + "b" * 2_000_000)
    assert len(cut) < 1_020_000 and cut.startswith("aaa") and cut.endswith("bbb")
    assert "[… 2,990,000 characters left out …]" in cut


def test_what_decides_is_compared(tmp_path: Path) -> None:
    (tmp_path / "test.py").write_text("assert False")
    (tmp_path / "code.py").write_text("")
    before = gym_child.deciding(tmp_path)
    (tmp_path / "code.py").write_text("changed")
    (tmp_path / "conftest.py").mkdir()
    assert gym_child.deciding(tmp_path) == before
    (tmp_path / "conftest.py").rmdir()
    (tmp_path / "conftest.py").write_text("")
    assert gym_child.deciding(tmp_path) != before
    (tmp_path / "conftest.py").unlink()
    (tmp_path / "test.py").unlink()
    assert gym_child.deciding(tmp_path) != before


@pytest.mark.slow
def test_pip_changes_nothing_that_episodes_share(debug_gym_python: Path, tmp_path: Path) -> None:
    line = [str(debug_gym_python), "-m", "pip", "install", "--no-index", "--no-input", "pytest"]
    env = _environment(debug_gym_python, str(tmp_path))
    done = subprocess.run([*line, "-U"], env=env, capture_output=True, text=True)
    assert done.returncode != 0 and "Can not perform a '--user' install" in done.stderr


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
