"""What /metrics shows, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyline.channel import Report
from leyline.directive import Mode
from leyline.engine.engine import Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SPLICE = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1)

CLIENT_GONE = 499
"""Counted for a request whose client hung up before the answer began."""


class Metrics:
    """The metrics of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "leyline_requests", "HTTP requests", ["endpoint", "status"], registry=r
        )
        self.prompt_tokens = Counter(
            "leyline_prompt_tokens",
            "Prompt tokens: shared with the cache, moved there by an edit, or computed",
            ["source"],
            registry=r,
        )
        self.generated_tokens = Counter("leyline_generated_tokens", "Tokens of answers", registry=r)
        self.hits = Counter(
            "leyline_hits", "Requests that found some of their prompt cached", registry=r
        )
        self.splices = Counter(
            "leyline_splices", "Requests with a session, by outcome", ["outcome"], registry=r
        )
        self.fallbacks = Counter(
            "leyline_fallbacks",
            "Requests whose edits were prefilled instead, or refused if strict",
            ["reason"],
            registry=r,
        )
        self.ttft = Histogram(
            "leyline_ttft_seconds", "Time to first token", buckets=_SECONDS, registry=r
        )
        self.e2e = Histogram(
            "leyline_e2e_seconds", "Time to the whole answer", buckets=_SECONDS, registry=r
        )
        self.splice = Histogram(
            "leyline_splice_seconds", "Time to splice the cache", buckets=_SPLICE, registry=r
        )
        self.slots = Gauge("leyline_slots", "Rows of the cache", ["state"], registry=r)
        self.capacity = Gauge("leyline_slots_capacity", "All rows of the cache", registry=r)
        self.running = Gauge("leyline_requests_running", "Requests that compute", registry=r)
        self.waiting = Gauge("leyline_requests_waiting", "Requests in the queue", registry=r)
        self.sessions = Gauge("leyline_sessions", "Sessions held", registry=r)
        for source in ("shared", "moved", "computed"):
            self.prompt_tokens.labels(source)
        for outcome in ("moved", "copied", "forget", "none"):
            self.splices.labels(outcome)

    def started(self, report: Report) -> None:
        """A request was admitted."""
        self.prompt_tokens.labels("shared").inc(report.shared)
        self.prompt_tokens.labels("moved").inc(report.moved)
        self.prompt_tokens.labels("computed").inc(report.computed)
        if report.cached:
            self.hits.inc()
        if report.session is None:
            return
        self.splices.labels(_outcome(report)).inc()
        if report.moved:
            self.splice.observe(report.splice_ms / 1e3)
        if report.fallback is not None:
            self.fallbacks.labels(str(report.fallback)).inc()

    def set_stats(self, stats: Stats) -> None:
        """What the engine holds now."""
        for state in ("free", "cached", "private"):
            self.slots.labels(state).set(getattr(stats, state))
        self.capacity.set(stats.capacity)
        self.running.set(stats.running)
        self.waiting.set(stats.waiting)
        self.sessions.set(stats.sessions)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class MetricsMiddleware:
    """Counts requests by endpoint (the route, not the path) and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, count)
        except Exception:
            status = 500 if status == CLIENT_GONE else status
            raise
        finally:
            endpoint = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(endpoint, str(status)).inc()


def _outcome(report: Report) -> str:
    if any(edit.mode == Mode.FORGET for edit in report.edits) or report.forgotten:
        return "forget"
    if report.moved:
        return "copied" if report.copied else "moved"
    return "none"
