"""`leyline bench`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leyline.cli.common import (
    SMOLLM2,
    check_writable,
    chosen,
    err,
    for_people,
    model_path,
    out,
    stages,
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

        names = chosen(only, MEASUREMENTS)
        check_writable(json_file)
        with err.status(f"Loading {escape(model)} …"):
            path, _ = model_path(model)
        with stages(names) as say:
            results = run(Options(path, tuple(only or ()), quick, full), say)
        results.show(out, f"{results.machine['torch_threads']} torch threads")
        if json_file is not None:
            write_json(json_file, results.as_json())
