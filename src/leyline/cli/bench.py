"""`leyline bench`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leyline.cli.common import (
    SMOLLM2,
    check_writable,
    err,
    fail,
    for_people,
    model_path,
    out,
    progress,
    write_json,
)


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
    model: Annotated[str, typer.Option(help="A model directory, smollm2 or nano.")] = SMOLLM2,
) -> None:
    """Measure, as ratios within one run, and compare with the goals."""
    with for_people():
        from leyline.bench.run import MEASUREMENTS, Options, run

        unknown = [name for name in only or () if name not in MEASUREMENTS]
        if unknown:
            fail(f"--only: no measurement {unknown[0]!r}; there are {', '.join(MEASUREMENTS)}")
        check_writable(json_file)
        with err.status(f"Loading {escape(model)} …"):
            path, _ = model_path(model)
        chosen = [name for name in MEASUREMENTS if not only or name in only]
        with progress() as bars:
            task = bars.add_task("", total=len(chosen))

            def say(name: str, text: str) -> None:
                bars.update(task, completed=chosen.index(name), description=f"{name}: {text}")

            results = run(Options(path, tuple(only or ()), quick, full), say)
            bars.update(task, completed=len(chosen), description="done")
        results.show(out, f"{results.machine['torch_threads']} torch threads")
        if json_file is not None:
            write_json(json_file, results.as_json())
