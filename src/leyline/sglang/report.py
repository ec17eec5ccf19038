"""What became of a request, for its client and for `/metrics`."""

from __future__ import annotations

from typing import Any

from leyline.api.leyline_object import LeylineReport
from leyline.channel import Report
from leyline.sglang.carriers import KEY
from leyline.sglang.turn import Turn


def publish(req: Any, turn: Turn) -> None:
    """Put the report where SGLang's output finds it; as long as none went out, it can change."""
    turn.report = turn.count(turn.report.prompt or len(req.origin_input_ids))
    wire = LeylineReport.of(turn.report)
    assert wire is not None, "a turn is a session's"
    turn.payload.clear()
    turn.payload.update(wire.model_dump(mode="json"))
    req.customized_info = {**(req.customized_info or {}), KEY: [turn.payload]}


def is_request_level(result: bool, streamer: Any, key: str) -> bool:
    """After `SchedulerOutputStreamer.is_request_level_customized_info_key`: once, not a token."""
    return result or key == KEY


class Metrics:
    """Counters beside SGLang's own; with `enabled=False` nothing is counted."""

    def __init__(self, enabled: bool, labels: dict[str, str]) -> None:
        self._enabled = enabled
        if not enabled:
            return
        # Imported here, after SGLang has said where several processes put their numbers.
        from prometheus_client import Counter, Histogram

        names = list(labels)
        self._labels = labels
        self._splices = Counter(
            "leyline_splices", "Requests of sessions by what became of them", [*names, "outcome"]
        )
        self._tokens = Counter(
            "leyline_tokens", "Prompt tokens of sessions by where rows came from", [*names, "kind"]
        )
        self._fallbacks = Counter(
            "leyline_fallbacks", "Requests that kept less than was asked for", [*names, "reason"]
        )
        self._seconds = Histogram(
            "leyline_splice_seconds",
            "Host time of a splice: tree, slots and launching the copy",
            names,
            buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
        )

    def count(self, report: Report) -> None:
        """A request of a session was served."""
        if not self._enabled:
            return
        if report.fallback is not None:
            outcome = "fallback"
        elif report.moved:
            outcome = "copied" if report.copied else "moved"
        else:
            outcome = "forgotten" if report.forgotten else "unedited"
        self._splices.labels(**self._labels, outcome=outcome).inc()
        for kind in ("shared", "moved", "computed"):
            moved_by_copy = kind == "moved" and report.copied
            self._tokens.labels(**self._labels, kind="copied" if moved_by_copy else kind).inc(
                getattr(report, kind)
            )
        if report.fallback is not None:
            self._fallbacks.labels(**self._labels, reason=report.fallback).inc()
        if report.moved:
            self._seconds.labels(**self._labels).observe(report.splice_ms / 1e3)
