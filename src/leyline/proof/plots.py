"""What was measured, as pictures: made from the JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline.plot import INK, LEYLINE, MUTED, PREFIX, require, tidy

Data = Mapping[str, Any]
OTHERS = (LEYLINE, PREFIX, "#6a994e", "#7b5ea7", "#c99a2e")


def draw(found: Data, path: Path) -> None:
    """Write a PNG. Raises MissingExtra where there is nothing to draw with."""
    require()
    DRAWN[found["kind"]](found["data"], path)


def _figure(columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * columns, 4.4), dpi=140, facecolor="white", layout="constrained")
    return figure, [figure.add_subplot(1, columns, i + 1) for i in range(columns)]


def _tidy(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", size=11, color=INK, weight="bold")
    tidy(axes, left=True)


def _log(axes: Any) -> None:
    """A logarithmic axis of values."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")


def _sizes(axes: Any, sizes: Sequence[int], label: str) -> None:
    """A logarithmic axis of token counts."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_short(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label, color=MUTED)


def _short(tokens: int) -> str:
    return f"{tokens / 1024:g} k" if tokens % 1024 == 0 else f"{tokens:,}"


def _legend(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=MUTED)


def _peers(data: Data, path: Path) -> None:
    """Bars: time to first token and tokens computed, as shares of the same without a cache."""
    cases = data["cases"]
    kinds = list(dict.fromkeys((c["edit"]["kind"], c["edit"]["conversation"]) for c in cases))
    names = [peer["name"] for peer in data["peers"]]
    figure, panels = _figure(2)
    titles = ("Time to first token / without a cache", "Tokens computed / prompt")
    width = 0.8 / len(names)
    for axes, title in zip(panels, titles, strict=True):
        for i, name in enumerate(names):
            heights = []
            for kind in kinds:
                (case,) = [
                    c
                    for c in cases
                    if c["peer"] == name and (c["edit"]["kind"], c["edit"]["conversation"]) == kind
                ]
                timed = axes is panels[0]
                heights.append(case["ratio"] if timed else case["computed"] / case["prompt"])
            at = [n + (i - (len(names) - 1) / 2) * width for n in range(len(kinds))]
            axes.bar(at, heights, width * 0.92, color=OTHERS[::-1][i], label=name)
        axes.set_xticks(range(len(kinds)), [f"{kind}\n{n:,} tokens" for kind, n in kinds])
        _tidy(axes, title)
    bars = panels[0].get_legend_handles_labels()
    figure.legend(
        *bars, loc="outside lower center", ncols=len(names), frameon=False, labelcolor=MUTED
    )
    figure.savefig(path, format="png")


def _growth(data: Data, path: Path) -> None:
    """Times on the model, and rows alone."""
    figure, (model, rows) = _figure(2)
    moved = [c for c in data["splices"] if c["way"] == "moved"]
    kept = [c["kept"] for c in moved]
    for field, label, color in (
        ("prefill_ttft_s", "re-prefill", PREFIX),
        ("splice_ttft_s", "splice, to the first token", LEYLINE),
        ("splice_s", "its rows", OTHERS[2]),
    ):
        model.plot(kept, [c[field] for c in moved], marker="o", color=color, label=label)
    _log(model)
    _sizes(model, kept, "rows kept")
    _tidy(model, f"{data['model']}: seconds")
    _legend(model)
    last = data["rows"][-1]["shape"]
    shown = [c for c in data["rows"] if c["shape"] == last]
    counts = [c["rows"] for c in shown]
    for field, label, color in (
        ("copy_s", "copy", PREFIX),
        ("move_s", "move, turned", OTHERS[2]),
        ("turn_s", "turned in place", LEYLINE),
    ):
        rows.plot(counts, [c[field] for c in shown], marker="o", color=color, label=label)
    _log(rows)
    _sizes(rows, counts, "rows")
    _tidy(rows, f"Rows alone, {last} ({shown[0]['layers']} layers): seconds")
    _legend(rows)
    figure.savefig(path, format="png")


def _model(data: Data, path: Path) -> None:
    """Seconds of each model on its largest machine, and all ratios."""
    lines = list(data["lines"])
    where = {c["model"]: c["where"] for c in lines}  # the last of each
    figure, panels = _figure(len(where) + 1)
    for axes, (model, gpu) in zip(panels, where.items(), strict=False):
        shown = [c for c in lines if (c["model"], c["where"]) == (model, gpu)]
        sizes = [c["conversation"] for c in shown]
        for field, label, color in (
            ("prefill_s", "re-prefill", PREFIX),
            ("copy_s", "splice, rows copied", OTHERS[2]),
            ("move_s", "splice, rows moved", LEYLINE),
        ):
            axes.plot(sizes, [c[field] for c in shown], marker="o", color=color, label=label)
        _log(axes)
        _sizes(axes, sizes, "tokens")
        _tidy(axes, f"{model}, {gpu}: seconds, on paper")
        _legend(axes)
    pairs = dict.fromkeys((c["model"], c["where"]) for c in lines)
    for (model, gpu), color in zip(pairs, OTHERS, strict=False):
        shown = [c for c in lines if (c["model"], c["where"]) == (model, gpu)]
        sizes = [c["conversation"] for c in shown]
        ratios = [c["ratio"] for c in shown]
        panels[-1].plot(sizes, ratios, marker="o", color=color, label=f"{model}, {gpu}")
    _log(panels[-1])
    _sizes(panels[-1], sizes, "tokens")
    _tidy(panels[-1], "Splice / re-prefill, on paper")
    _legend(panels[-1])
    figure.savefig(path, format="png")


DRAWN: dict[str, Callable[[Data, Path], None]] = {
    "peers": _peers,
    "growth": _growth,
    "model": _model,
}
