"""The real debug-gym against a real server: scripted episodes that solve their task, in all arms,
and a model that can't."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from tiny_server import Running, running

from leyline.engine.engine import Config, Engine
from leyline.evals.arms import Key
from leyline.evals.episode import SYSTEM_PROMPT, Settings, forced
from leyline.evals.gym import Gym
from leyline.evals.run import Options, evaluate
from leyline.evals.scripted import SCRIPTS, Turn
from leyline.evals.store import Store
from leyline.models.nano import nano_path

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(debug_gym_python: Path) -> Iterator[Running]:
    """After debug_gym_python, so that none is started for tests that are skipped."""
    engine = Engine.load(nano_path(), config=Config(memory_gib=0.3), name="nano")
    with running(engine) as it:
        yield it


def test_scripted_agents_solve_their_task_in_all_arms(
    server: Running, debug_gym_python: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    with Gym(debug_gym_python) as gym:
        found = evaluate(
            server.url, Options(("shopping_cart",)), Settings(model="", scripted=True), store, gym
        )
    assert not found.errors
    append, truncate, splice = found.lines
    turns = len(SCRIPTS["shopping_cart"])
    for line in found.lines:
        assert (line.solved, line.turns, line.completion) == (1, turns, turns)
    # Folder names and times differ between arms, by a few tokens a call.
    assert abs(truncate.prompt - splice.prompt) < 0.05 * truncate.prompt
    assert append.prompt > 1.2 * truncate.prompt
    assert splice.computed is not None and truncate.computed is not None
    assert splice.computed < truncate.computed
    # All but two outputs are cleared, and one that is shorter than what would stand for it.
    assert splice.edits >= turns - 5 and not splice.fallbacks
    text = store.path(Key("splice", "shopping_cart", 0)).read_text()
    messages = [x["is"] for x in map(json.loads, text.split("\n")[:-1]) if "message" in x]
    assert sum(message["role"] == "system" for message in messages) == 1
    assert any("Pdb command output" in str(message["content"]) for message in messages)


@pytest.mark.parametrize("task", sorted(set(SCRIPTS) - {"shopping_cart"}))
def test_every_script_solves_its_task(
    task: str, server: Running, debug_gym_python: Path, tmp_path: Path
) -> None:
    options = Options((task,), arms=("splice",))
    settings = Settings(model="", scripted=True)
    with Gym(debug_gym_python) as gym:
        found = evaluate(server.url, options, settings, Store(tmp_path), gym)
    (episode,) = found.episodes
    assert not found.errors and episode.solved and episode.turns == len(SCRIPTS[task])


def test_a_model_that_calls_no_tool_uses_up_its_steps(
    server: Running, debug_gym_python: Path, tmp_path: Path
) -> None:
    settings = Settings(model="", steps=4, max_tokens=4)
    with Gym(debug_gym_python) as gym:
        found = evaluate(
            server.url, Options(("purr",), arms=("splice",)), settings, Store(tmp_path), gym
        )
    (episode,) = found.episodes
    assert (episode.solved, episode.reason, episode.turns) == (False, "steps", 3)
    assert episode.versions["debug_gym"] == "1.3.0"


def talk(python: Path, task: str, turns: Sequence[Turn]) -> tuple[list[str], dict[str, Any]]:
    """What debug-gym's tools say to these calls, and how it ended."""
    job = {
        "task": task,
        "data": None,
        "steps": 50,
        "system_prompt": SYSTEM_PROMPT,
        "run_timeout_s": 600,
    }
    said: list[str] = []
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "i", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
    with Gym(python) as gym, gym.start(job, 600) as episode:
        while True:
            kind, value = episode.get()
            if kind == "ask":
                said = [m["content"] for m in value["messages"] if m["role"] == "tool"]
                at = len(said)
                over = at == len(turns)
                put = {"stop": "over"} if over else {"answer": forced(answer, turns[at], at)}
                episode.put(put)
            elif kind != "ready":
                assert kind == "done", value
                return said, value


@pytest.mark.parametrize(
    "trick",
    [
        "echo 'def test_cat_status(): pass' > test.py",
        "printf 'def pytest_collection_modifyitems(items):\\n"
        "    for item in items: item.obj = lambda: None\\n' > conftest.py",
    ],
)
def test_tests_that_were_changed_are_not_solved(debug_gym_python: Path, trick: str) -> None:
    turns = [Turn("", "bash", {"command": trick}), Turn("", "eval", {})]
    _, done = talk(debug_gym_python, "purr", turns)
    assert (done["score"], done["max_score"]) == (1, 1)
    assert (done["resolved"], done["reason"]) == (False, "tests changed")


def test_commands_are_those_of_ours(debug_gym_python: Path) -> None:
    """debug-gym's own way of running them is replaced, for its tools and for its files."""
    long = "python -c \"print('begin' + 'x' * 3_000_000 + 'end')\""
    turns = [
        Turn("", "bash", {"command": long}),
        Turn("", "bash", {"command": f"{long} > long.txt"}),
        Turn("", "view", {"path": "long.txt"}),
        Turn("", "pdb", {"command": "p 'y' * 1_500_000"}),
    ]
    (bash, _, view, pdb), done = talk(debug_gym_python, "purr", turns)
    assert bash.startswith("beginxxx") and bash.endswith("xxxend") and len(bash) < 500_100
    assert "It is longer than 500,000 bytes" in view
    assert 1_000_000 < len(pdb) < 1_020_000 and "characters left out" in pdb
    assert done["reason"] == "over"
