"""`leyline models`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline.cli.common import SMOLLM2, check_writable, for_people, model_path, out, write_json
from leyline.models import MissingExtra


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
    with for_people():
        from leyline.describe import describe, tiny_names

        check_writable(json_file)
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
                source: Any = name if name in tiny_names() else model_path(name)[0]
                rows.append(describe(name, source, probe))
            except (MissingExtra, OSError, ValueError) as trouble:
                rows.append(
                    {"name": name, "supported": False, "reason": "unreadable", "why": str(trouble)}
                )
        _print_models(rows)
        if json_file is not None:
            write_json(json_file, {"models": rows})
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
