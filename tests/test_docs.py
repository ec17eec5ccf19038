"""README and docs work as they stand: every Python block runs, every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_server import running, tiny_engine

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_readme_client_runs_against_the_server(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from leyline.engine.engine import Config, Engine

    (code,) = blocks("README.md", "python")
    engine = Engine.load(smollm2, config=Config(memory_gib=0.2), name="smollm2")
    with running(engine) as server:
        address = "http://127.0.0.1:8000"
        assert address in code
        names: dict[str, object] = {}
        exec(code.replace(address, server.url), names)
    answer = names["answer"]
    report = answer.leyline  # type: ignore[attr-defined]
    assert report["fallback"] is None and report["session"] == "run-42"
    (edit,) = report["edits"]
    assert edit["mode"] == "amortize" and edit["shift"] < -200
    assert report["tokens"]["moved"] >= 16
    assert "of" in capsys.readouterr().out


def test_client_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = "".join(blocks("docs/client.md", "python"))
    with running(tiny_engine()) as server:
        address = "http://127.0.0.1:8000"
        assert address in code
        names: dict[str, Any] = {}
        exec(code.replace(address, server.url).replace('"smollm2"', '"tiny"'), names)
    assert names["report"].moved and len(names["report"].edits) == 1
    assert names["stream"].report.shared and names["done"].moved
    assert "rows moved ahead" in capsys.readouterr().out


def test_policies_page_runs_heavy_hitters(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [each for each in blocks("docs/policies.md", "python") if "attention_of" in each]
    with running(tiny_engine()) as server:
        address = "http://127.0.0.1:8000"
        assert address in code
        names: dict[str, Any] = {}
        exec(code.replace(address, server.url).replace('"smollm2"', '"tiny"'), names)
    assert None in names["mass"] and "None" in capsys.readouterr().out


@pytest.mark.slow
def test_engine_page_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks("docs/engine.md", "python"):
        exec(code, {})
    assert "moved=" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^[\w ]*\b{target}\b[\w ]*:", makefile, re.MULTILINE), target
