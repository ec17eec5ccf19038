"""`leyline replay`: what it prints, writes and returns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from made_up import session
from tiny_server import Running, tiny_tokenizer
from typer.testing import CliRunner

from leyline import cli
from leyline.replay.arms import jobs_of
from leyline.tiny import tiny_model
from leyline.traces import load_traces, save_traces

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def leyline(*args: object) -> Result:
    return CliRunner(env=WIDE).invoke(cli.app, ["replay", *map(str, args)])


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    file = tmp_path / "traces.jsonl"
    save_traces(file, [session(31, turns=3), session(32, turns=3)])
    return file


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's tokenizer on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_report_pictures_and_json(
    server: Running, traces: Path, model_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    done = leyline(
        server.url, "--traces", traces, "--arms", "splice,truncate", "-c", 1, "-c", 3,
        "--keep", 1, "--tokenizer", model_dir, "--out", out, "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    value = json.loads((out / "results.json").read_text())
    assert value == json.loads((tmp_path / "r.json").read_text())
    assert [(x["concurrency"], x["arm"]) for x in value["lines"]] == [
        (1, "truncate"),
        (1, "splice"),
        (3, "truncate"),
        (3, "splice"),
    ]
    assert value["settings"]["calls"] == 6 and value["client_machine"]["versions"]["leyline"]
    page = (out / "report.md").read_text()
    for x in value["lines"]:
        assert f"{x['computed']:,}" in done.stdout and f"{x['computed']:,}" in page
        assert f"{x['ceiling']:.1%}" in page
    assert "no more than these ran at once" in page
    for name in ("hit_rate.png", "first_token.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"


def test_a_trace_that_begins_with_a_greeting(
    server: Running, model_dir: Path, tmp_path: Path
) -> None:
    """It is no call, and the others are answered."""
    plain = session(33, turns=3)
    greeted = [{"role": "assistant", "content": "How can I help?"}, *plain.messages]
    row = {"session": "s", "messages": greeted, "gaps_ms": [10**7, 1, 1]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    (job,) = jobs_of(load_traces(tmp_path / "t.jsonl"))
    assert len(job.calls) == 3 and job.gaps_s == (0.001, 0.001)
    done = leyline(
        server.url, "--traces", tmp_path / "t.jsonl", "--arms", "append,splice",
        "--tokenizer", model_dir, "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    value = json.loads((tmp_path / "r.json").read_text())
    assert value["settings"]["calls"] == 3
    assert [(x["arm"], x["errors"]) for x in value["lines"]] == [("append", 0), ("splice", 0)]


def test_nothing_answered_is_a_failure(server: Running, tmp_path: Path) -> None:
    row = {"session": "s", "messages": [{"role": "stranger", "content": "x"}, *answer()]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(row))
    done = leyline(server.url, "--traces", tmp_path / "bad.jsonl", "--arms", "append")
    assert done.exit_code == 1 and "not one call was answered" in done.stderr
    assert "Role stranger is not one of mine" in done.stdout


def answer() -> list[dict[str, str]]:
    return [{"role": "assistant", "content": "y"}]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--arms", "splice,nope"], "--arms: no arm 'nope'; there are append, truncate, splice"),
        (["--answer", "0"], "--answer: '0' is no number from 1 on"),
        (["--answer", "recorded"], "without a tokenizer"),
        (["--traces", "/nope/x.jsonl"], "No such file"),
        (["--tokenizer", "/nope"], "/nope: is no directory"),
        (["--json", "/nope/x.json"], "its folder does not exist"),
        ([], "127.0.0.1:9/v1/models: no server answers"),
    ],
)
def test_trouble_in_one_line(args: list[str], says: str) -> None:
    done = leyline("http://127.0.0.1:9", *args)
    assert done.exit_code == 1 and "Traceback" not in done.output
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("leyline: ")]
    assert says in line


def test_traces_without_a_call(server: Running, tmp_path: Path) -> None:
    row = {"session": "s", "messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    done = leyline(server.url, "--traces", tmp_path / "t.jsonl")
    assert done.exit_code == 1 and "the traces hold no model call" in done.stderr
