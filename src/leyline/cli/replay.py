"""`leyline replay`"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.progress import Progress

from leyline.cli.common import (
    ApiKey,
    ServedModel,
    check_writable,
    err,
    fail,
    for_people,
    model_path,
    out,
    progress,
    write_json,
)

if TYPE_CHECKING:
    from leyline.replay.arms import Arm
    from leyline.replay.report import Results

RECORDED = "recorded"


def replay(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1.")],
    model: ServedModel = None,
    api_key: ApiKey = None,
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="append, truncate, splice, forget; else all that it can."
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", "-c", min=1, help="Sessions at once; repeatable. Else 1."),
    ] = None,
    keep: Annotated[int, typer.Option(min=0, help="Tool outputs kept, newest first.")] = 2,
    gaps: Annotated[
        bool, typer.Option("--gaps/--no-gaps", help="Wait between calls as the agent did.")
    ] = False,
    answer: Annotated[
        str, typer.Option(metavar="N", help="Tokens to generate for each call, or: recorded.")
    ] = "1",
    traces: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Sessions, instead of the shipped ones.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="So many; where there are fewer, copies follow.")
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="Of each session so many.")] = None,
    skip: Annotated[
        int, typer.Option(min=0, help="Of each session so many are left out first.")
    ] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model's directory, or smollm2: for ceilings."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write report.md, results.json and pictures."),
    ] = None,
) -> None:
    """Replay recorded agent sessions against a server of the OpenAI API, and compare."""
    with for_people():
        from leyline.replay.run import Options, replay_on
        from leyline.traces import load_traces, take

        options = Options(
            arms=_arms(arms),
            concurrency=tuple(dict.fromkeys(concurrency or [1])),
            keep=keep,
            gaps=gaps,
            answer=_tokens(answer),
            calls=calls,
            skip=skip,
        )
        recorded = take(load_traces(traces), sessions)
        check_writable(json_file)
        if folder is not None:
            from leyline.plot import require

            require()
            folder.mkdir(parents=True, exist_ok=True)
        loaded = None if tokenizer is None else _tokenizer(tokenizer)
        with progress() as bars:
            results = replay_on(
                url,
                recorded,
                options,
                model=model,
                key=api_key,
                tokenizer=loaded,
                on_run=_bars(bars),
            )
        _finish(results, json_file, folder)


def _arms(text: str | None) -> tuple[Arm, ...]:
    from leyline.replay.arms import ARMS
    from leyline.replay.arms import Arm as Names

    names = [] if text is None else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in get_args(Names):
            fail(f"--arms: no arm {name!r}; there are {', '.join(ARMS)}")
    return tuple(arm for arm in ARMS if arm in names)


def _tokens(text: str) -> int | None:
    if text == RECORDED:
        return None
    if not text.isdecimal() or int(text) < 1:
        fail(f"--answer: {text!r} is no number from 1 on, nor {RECORDED!r}")
    return int(text)


def _tokenizer(name: str) -> Any:
    path, _ = model_path(name)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _bars(bars: Progress) -> Callable[[Arm, int, int], Callable[[], None]]:
    """A progress bar for each run."""

    def on_run(arm: Arm, concurrency: int, calls: int) -> Callable[[], None]:
        task = bars.add_task(f"{arm}, {concurrency} at once", total=calls)
        if not bars.console.is_terminal:
            bars.console.print(f"{arm}, {concurrency} at once")
        return lambda: bars.advance(task)

    return on_run


def _finish(results: Results, json_file: Path | None, folder: Path | None) -> None:
    """Show and write. Exit code 1 where not one call was answered."""
    from leyline.bench.bed import machine

    results = replace(results, machine=machine())
    server = results.server
    out.print(f"[bold]{escape(server.model)}[/bold] on {escape(server.kind)}", highlight=False)
    results.show(out)
    if json_file is not None:
        write_json(json_file, results.as_json())
    if folder is not None:
        from leyline.replay.plots import draw

        (folder / "report.md").write_text(results.markdown(), encoding="utf-8")
        write_json(folder / "results.json", results.as_json())
        draw(results.lines, f"{server.model} on {server.kind}", folder)
        out.print(f"Report: {folder / 'report.md'}", highlight=False)
    if not results.answered:
        err.print("leyline: not one call was answered", markup=False, highlight=False)
        raise typer.Exit(1)
