"""Tables of the model on paper: sizes, assumptions turned up and down, and the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from leyline.proof.paper_gpu import (
    H100,
    H200,
    Assumed,
    Edit,
    Gpu,
    Grouped,
    Model,
    Way,
    Where,
    deepseek_v2_lite,
    deepseek_v3,
    prefill_seconds,
    splice_seconds,
)

SIZES = (8192, 16384, 32768, 65536, 131072)
AROUND: Mapping[str, tuple[float, float]] = {
    "linear": (0.3, 0.8),
    "attention": (0.25, 0.75),
    "weights": (0.4, 0.9),
    "rows": (0.2, 0.9),
    "host_s": (0.0, 5e-3),
    "launch_s": (0.0, 20e-6),
    "passes": (1, 2),
}
"""Assumptions and how far each may be off."""


@dataclass(frozen=True, slots=True)
class Line:
    """One size of one model on one machine; seconds. prefill_s: of what is not an exact prefix of
    the conversation, which is cached. ratio: of the splice by moving to that."""

    model: str
    where: str
    conversation: int
    prefill_s: float
    move_s: float
    copy_s: float
    move_rows_s: float
    copy_rows_s: float

    @property
    def ratio(self) -> float:
        return self.move_s / self.prefill_s


@dataclass(frozen=True, slots=True)
class Swing:
    """What a ratio (splice by moving / re-prefill) becomes when one assumption changes."""

    model: str
    conversation: int
    assumption: str
    low: float
    high: float
    at_low: float
    at_high: float
    usual: float


@dataclass(frozen=True, slots=True)
class Checked:
    """The formulas beside a measurement on this machine; seconds."""

    kept: int
    way: str
    splice_s: float
    splice_on_paper_s: float
    prefill_s: float
    prefill_on_paper_s: float


def places() -> list[tuple[Model, Where]]:
    """Who runs where: the large model's weights need a node."""
    return [
        (deepseek_v2_lite(), Where(H100)),
        (deepseek_v2_lite(), Where(H200)),
        (deepseek_v3(), Where(H200, 8)),
    ]


def name_of(where: Where) -> str:
    return where.gpu.name if where.count == 1 else f"{where.count} x {where.gpu.name}"


def line(model: Model, where: Where, assumed: Assumed, conversation: int) -> Line:
    edit = Edit(conversation)
    move = splice_seconds(model, where, assumed, edit, "move")
    copy = splice_seconds(model, where, assumed, edit, "copy")
    whole = prefill_seconds(model, where, assumed, edit.prompt, edit.start)
    return Line(
        model.name,
        name_of(where),
        conversation,
        whole,
        move.total,
        copy.total,
        move.rows,
        copy.rows,
    )


def swings(model: Model, where: Where, assumed: Assumed, conversation: int) -> list[Swing]:
    """One assumption at a time, the others as they are."""

    def ratio(field: str, value: float) -> float:
        changed = replace(assumed, **{field: value})  # type: ignore[arg-type]
        return line(model, where, changed, conversation).ratio

    usual = line(model, where, assumed, conversation).ratio
    return [
        Swing(
            model.name,
            conversation,
            field,
            low,
            high,
            ratio(field, low),
            ratio(field, high),
            usual,
        )
        for field, (low, high) in AROUND.items()
    ]


def smollm2(shape: Mapping[str, int]) -> Model:
    """The model of `growth.json`: a dense GQA model in fp32. shape: see `growth.shape_of`."""
    hidden, width = shape["hidden"], shape["width"]
    heads, groups = shape["heads"], shape["groups"]
    attention = hidden * width * (2 * heads + 2 * groups)
    return Model(
        name="measured",
        layers=shape["layers"],
        heads=heads,
        attention=Grouped(groups, width),
        linear=shape["layers"] * (attention + 3 * hidden * shape["intermediate"]),
        head=shape["vocab"] * hidden,
        weight_bytes=shape["bytes"],
        row_bytes=shape["bytes"],
    )


def check(growth: Mapping[str, Any]) -> list[Checked]:
    """Formulas with this machine's own speeds and no other assumption, beside what
    `growth.json`, its data given, says was measured."""
    speed, model = growth["speed"], smollm2(growth["shape"])
    machine = Gpu("this machine", speed["copy_bytes_s"], speed["linear_flops_s"], 0.0)
    assumed = Assumed(
        linear=1.0,
        attention=speed["attention_flops_s"] / speed["linear_flops_s"],
        weights=1.0,
        rows=1.0,
        host_s=0.0,
        launch_s=0.0,
        chunk=growth["shape"]["chunk"],
        passes=1,
    )
    found = []
    for row in growth["splices"]:
        edit = Edit(**row["edit"])
        way: Way = "move" if row["way"] == "moved" else "copy"
        spliced = splice_seconds(model, Where(machine), assumed, edit, way)
        whole = prefill_seconds(model, Where(machine), assumed, edit.prompt, edit.start)
        found.append(
            Checked(
                row["kept"],
                row["way"],
                row["splice_ttft_s"],
                spliced.total,
                row["prefill_ttft_s"],
                whole,
            )
        )
    return found


def run(growth: Mapping[str, Any] | None, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """All tables as plain data. growth: the data of `growth.json`, for the check."""
    assumed = Assumed()
    lines = [line(model, where, assumed, size) for model, where in places() for size in sizes]
    around = [
        swing
        for model, where in (places()[0], places()[-1])
        for swing in swings(model, where, assumed, 32768)
    ]
    return {
        "assumed": asdict(assumed),
        "edit": {k: v for k, v in asdict(Edit(0)).items() if k != "conversation"},
        "gpus": [asdict(gpu) for gpu in (H100, H200)],
        "models": [_facts(model) for model in (deepseek_v2_lite(), deepseek_v3())],
        "lines": [asdict(each) | {"ratio": each.ratio} for each in lines],
        "swings": [asdict(each) for each in around],
        "checked": [asdict(each) for each in check(growth)] if growth else [],
    }


def _facts(model: Model) -> dict[str, Any]:
    inactive = model.routed * (1 - model.chosen / model.experts)
    return {
        "name": model.name,
        "layers": model.layers,
        "heads": model.heads,
        "row_elements": model.attention.row,
        "rotary_elements": model.attention.rotary,
        "linear_parameters": model.linear,
        "parameters": model.linear + inactive + 2 * model.head,
        "weight_bytes": model.weight_bytes,
    }
