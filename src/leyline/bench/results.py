"""What a benchmark found: rows, on which machine, and how both are shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leyline.bench.row import Row


@dataclass(slots=True)
class Results:
    """Rows of one run. quick: with sizes that the goals are not for."""

    model: str
    quick: bool
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "model": self.model,
            "quick": self.quick,
            "rows": [row.as_json() for row in self.rows],
        }

    def show(self, out: Console, *about: str) -> None:
        """Print the machine, more about the run, and each number beside its goal."""
        where = self.machine
        versions = (f"{name} {v}" for name, v in where["versions"].items() if v)
        line = ", ".join([f"Python {where['python']}", *versions])
        cores = f"{where['cpu'] or where['platform']}, {where['cores']} cores"
        out.print("; ".join([cores, *about, line]), highlight=False)
        out.print(self._table())
        if self.quick:
            out.print("A quick run: the goals are for the full sizes.")

    def _table(self) -> Table:
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 1))
        table.add_column("what")
        for column in ("measured", "goal", ""):
            table.add_column(column, justify="right", no_wrap=True)
        marks = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}
        for row in self.rows:
            table.add_row(escape(row.what), row.show(row.value), row.goal, marks[row.met])
        return table
