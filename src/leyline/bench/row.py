"""One measured number, its goal, and whether it was met."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Unit = Literal["ratio", "share", "tokens", "count", "nats", "plain", "s"]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the benchmark's table.

    name: dotted, begins with the measurement's name. what: one line for people.
    at_least, at_most: the goal; None for no bound.
    details: what the number was made of, for the JSON file.
    """

    name: str
    what: str
    value: float
    unit: Unit = "ratio"
    at_least: float | None = None
    at_most: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def goal(self) -> str:
        """The goal as text; empty without one."""
        low, high = self.at_least, self.at_most
        if low is not None and high is not None:
            same = low == high
            return self.show(low) if same else f"{self.show(low)} … {self.show(high)}"
        if low is not None:
            return f"≥ {self.show(low)}"
        return f"≤ {self.show(high)}" if high is not None else ""

    def show(self, value: float) -> str:
        """A number of this row's unit as text."""
        match self.unit:
            case "tokens":
                return f"{value:.0f} tokens"
            case "count":
                return f"{value:.0f}"
            case "nats" | "plain":
                return f"{value:.3g}"
            case "share":
                return f"{value:.1%}"
            case "s":
                return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.2f} s"
            case _:
                return f"{value:.3f}" if value < 0.995 else f"{value:.2f}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "value": self.value,
            "shown": self.show(self.value),
            "unit": self.unit,
            "goal": self.goal or None,
            "met": self.met,
            "details": self.details,
        }
