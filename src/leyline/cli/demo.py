"""`leyline demo`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from leyline.cli.common import (
    SMOLLM2,
    check_writable,
    err,
    for_people,
    loading,
    model_path,
    out,
    progress,
    write_json,
)

if TYPE_CHECKING:
    from leyline.demo import Demo
    from leyline.replay import Arm, Turn, TurnResult


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.")
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes.")] = Path(
        "leyline-demo.png"
    ),
    no_plot: Annotated[bool, typer.Option("--no-plot", help="Draw nothing.")] = False,
    keep: Annotated[int, typer.Option(min=0, help="Tool outputs kept, newest first.")] = 2,
    model: Annotated[str, typer.Option(help="A model directory, smollm2 or nano.")] = SMOLLM2,
    session: Annotated[str | None, typer.Option(help="Id of the recorded session.")] = None,
    traces: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Recorded sessions, instead of the shipped ones."),
    ] = None,
    turns: Annotated[int | None, typer.Option(min=1, help="Replay only so many calls.")] = None,
) -> None:
    """Replay a recorded agent session twice: with a plain prefix cache, and with Leyline."""
    with for_people():
        from leyline import demo as demos

        recorded = demos.find_session(session or demos.SESSION, traces)
        check_writable(json_file, None if no_plot else plot)
        if not no_plot:
            from leyline.plot import draw, require

            require()
        with err.status(f"Loading {escape(model)} …"):
            path, known_as = model_path(model)
            with loading(model):
                engine = demos.load(path, known_as)
        out.print(
            f"Session {recorded.id}, {escape(engine.name)}: every call with its recorded answer; "
            f"of the tool outputs the newest {keep} stay, older ones are cleared.",
            highlight=False,
        )
        with engine, progress() as bars:
            result = demos.run(engine, recorded, keep=keep, turns=turns, **_demo_bars(bars))
        _print_demo(result)
        if json_file is not None:
            write_json(json_file, result.as_json())
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
