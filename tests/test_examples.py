"""Examples run against a real server, and what of them is Leyline's is little."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from tiny_server import Running, running, words

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MARK = "# Leyline"


def load(script: Path) -> Any:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server() -> Any:
    with running() as it:
        yield it


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_text(words(i, 80))
    return [str(path) for path in paths]


@pytest.mark.parametrize("name", ["openai_loop", "anthropic_loop"])
def test_loops_splice(
    name: str, server: Running, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    load(EXAMPLES / f"{name}.py").main(files, server.url, "tiny")
    reports = [line for line in capsys.readouterr().out.splitlines() if "Report(" in line]
    assert len(reports) == len(files)
    assert all("fallback=None" in report for report in reports)
    assert ["edits=()" in report for report in reports] == [True, True, False, False]
    assert not any("moved=0," in report for report in reports[2:])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_little_of_it_is_leylines(script: Path) -> None:
    lines = [line for line in script.read_text().splitlines() if line.endswith(MARK)]
    assert 1 <= len(lines) <= 5
