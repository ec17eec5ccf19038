"""The plots of a report."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from leyline.plot import INK, LEYLINE, MUTED, PREFIX, require, tidy

GREEN, GREY = "#4c8f5a", "#9aa3b2"


def draw(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write the PNGs that there are numbers for. Raises MissingExtra without Matplotlib."""
    require()
    rows = {row["name"]: row for row in found["rows"]}
    drawn = []
    for kind, has, function in (
        ("drift", "drift.once" in rows, _drift),
        ("influence", any(name.startswith("influence.") for name in rows), _influence),
        ("answers", "answers.splice" in rows, _answers),
    ):
        if has:
            path = folder / f"{found['model']}-{kind}.png"
            function(rows, found["model"], path)
            drawn.append(path)
    return drawn


def _figure(title: str, width: float = 7.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), dpi=130, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", size=11, color=INK, weight="bold")
    tidy(axes, left=True, grid="both")
    return figure, axes


def _drift(rows: dict[str, Any], model: str, path: Path) -> None:
    data = rows["drift.once"]["details"]
    figure, axes = _figure(f"{model}: error of rotary columns after splices in a row")
    marks = {"fp32, stored in bf16": (LEYLINE, "o"), "all in bf16": (PREFIX, "s")}
    for name, errors in data["curves"].items():
        color, mark = marks.get(name, (GREEN, "^"))
        axes.loglog(data["splices"], errors, color=color, marker=mark, markersize=4, label=name)
    axes.axhline(data["paper"], color=GREY, linestyle="--", linewidth=1.2)
    axes.annotate(
        "paper's bound, bf16",
        (1, data["paper"]),
        xytext=(0, 4),
        textcoords="offset points",
        color=MUTED,
        size=8.5,
    )
    axes.set_xlabel("splices, each by a random shift", color=MUTED)
    axes.set_ylabel("relative L2 error", color=MUTED)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    figure.savefig(path)


def _influence(rows: dict[str, Any], model: str, path: Path) -> None:
    figure, axes = _figure(f"{model}: what is still known of a span that is gone")
    kinds = [row for row in rows.values() if row["details"].get("sides")]
    for row, color, mark in zip(kinds, (LEYLINE, GREY, PREFIX, GREEN), "oDs^", strict=False):
        sides = row["details"]["sides"]
        kind = row["name"].split(".")[1].replace("_", " ")
        for which, line in (("from_full", "-"), ("from_fresh", ":")):
            values = [median(each[which]) for each in sides.values()]
            other = "with the span" if which == "from_full" else "without it"
            axes.plot(
                list(sides), values, line, color=color, marker=mark, markersize=5,
                label=f"{kind}: from the answer {other}",
            )  # fmt: skip
    axes.set_xlabel("tokens recomputed behind the edit: REPAIR(w)", color=MUTED)
    axes.set_ylabel("divergence in nats, median", color=MUTED)
    if kinds:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    else:
        axes.text(
            0.5, 0.5, "no prompt found on which the span decides",
            ha="center", color=MUTED, transform=axes.transAxes,
        )  # fmt: skip
    figure.savefig(path)


def _answers(rows: dict[str, Any], model: str, path: Path) -> None:
    nll = rows["answers.splice"]["details"]["nll"]
    figure, axes = _figure(f"{model}: recorded answers as edits pile up")
    names = list(nll)[::-1]
    colors = {"full context": GREY, "fresh prefill": GREY, "splice": LEYLINE}
    bars = axes.barh(
        names, [nll[n] for n in names], color=[colors.get(n, "#8fbbd6") for n in names], height=0.62
    )
    if "splice, unturned" in names:
        bars[names.index("splice, unturned")].set_color(PREFIX)
    axes.bar_label(bars, [f"{nll[n]:.3f}" for n in names], padding=4, color=INK, size=9)
    axes.set_xlabel("mean negative log-likelihood, nats a token (less is better)", color=MUTED)
    axes.grid(axis="y", visible=False)
    figure.savefig(path)
