"""The tables of a report, on a page and in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table


def share(value: float | None) -> str:
    """In percent; empty where it is not known."""
    return "" if value is None else f"{value:.1%}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """For a page."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """For a terminal. Numbers stand to the right, names of arms to the left."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1))
    for column in columns:
        words = column in ("arm", "beside")
        table.add_column(column, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
