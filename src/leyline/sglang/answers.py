"""How SGLang's answers to requests to `/v1/…` carry a report or an error. Knows no HTTP server.

A report stands at the top level of a JSON answer; of a stream, in the last chunk that says anything
(OpenAI), or in the event with the stop reason (Anthropic). Beside it the cached tokens of the usage
are set, which SGLang gives with `--enable-cache-report` only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import orjson

from leyline.api.anthropic_answers import AppliedEdits
from leyline.sglang.carriers import KEY
from leyline.sglang.request import Refused, Report

INVALID = "invalid_request_error"
SERVER = "server_error"


class Shape(Protocol):
    """The answers of one API. managed: what `context_management` did, to be put in."""

    managed: AppliedEdits | None

    def error(self, error: Refused) -> bytes:
        """An error's body."""
        ...

    def whole(self, answer: dict[str, Any], report: Report | None) -> None:
        """Set the report in an answer that is not streamed."""
        ...

    def event(self, event: bytes, report: Report | None) -> Iterable[bytes]:
        """What to send of a streamed answer when `event` has come; the last is b""."""
        ...


class OpenAI:
    """Chat and text completions."""

    managed: AppliedEdits | None = None

    def __init__(self) -> None:
        self._held: list[bytes] = []
        """A chunk that may be the last, and events without a chunk that came after it."""

    def error(self, error: Refused) -> bytes:
        problem = {
            "message": _clean(error.message),
            "type": INVALID if error.status_code < 500 else SERVER,
            "param": None if error.param is None else _clean(error.param),
            "code": error.code,
        }
        return orjson.dumps({"error": problem})

    def whole(self, answer: dict[str, Any], report: Report | None) -> None:
        if report is None:
            return
        answer[KEY] = report
        usage = answer.get("usage")
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            usage["prompt_tokens_details"] = {**details, "cached_tokens": cached(report)}

    def event(self, event: bytes, report: Report | None) -> Iterable[bytes]:
        if not event or _data(event) == b"[DONE]":
            if self._held and report is not None:
                self._held[0] = self._with_report(self._held[0], report)
            yield from self._let_go()
        elif not event.startswith(b"data:"):  # a named event, no chunk
            if self._held:
                self._held.append(event)
                return
        else:
            yield from self._let_go()
            if _may_be_last(event):
                self._held.append(event)
                return
        if event:
            yield event

    def _let_go(self) -> Iterable[bytes]:
        held, self._held = self._held, []
        return held

    def _with_report(self, event: bytes, report: Report) -> bytes:
        chunk = _json(event)
        self.whole(chunk, report)
        return b"data: " + orjson.dumps(chunk) + b"\n\n"


class Anthropic:
    """Messages."""

    def __init__(self) -> None:
        self.managed: AppliedEdits | None = None

    def error(self, error: Refused) -> bytes:
        problem = {"type": INVALID, "message": _clean(error.message)}
        return orjson.dumps({"type": "error", "error": problem})

    def whole(self, answer: dict[str, Any], report: Report | None) -> None:
        self._set(answer, report)
        if report is not None:
            _split_input(answer.get("usage"), report)

    def event(self, event: bytes, report: Report | None) -> Iterable[bytes]:
        if event and (report is not None or self.managed is not None):
            event = self._with_report(event, report)
        if event:
            yield event

    def _set(self, answer: dict[str, Any], report: Report | None) -> None:
        if report is not None:
            answer[KEY] = report
        if self.managed is not None:
            answer["context_management"] = self.managed.model_dump(mode="json")

    def _with_report(self, event: bytes, report: Report | None) -> bytes:
        name, _, _ = event.partition(b"\n")
        if name not in (b"event: message_start", b"event: message_delta"):
            return event
        data = _json(event)
        if name == b"event: message_delta":
            self._set(data, report)
        elif report is not None:
            _split_input(data.get("message", {}).get("usage"), report)
        return name + b"\ndata: " + orjson.dumps(data) + b"\n\n"


class Events:
    """Cuts a stream of bytes into server-sent events, each with the empty line that ends it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece."""
        if not self._rest and 0 <= len(piece) - 2 == piece.find(b"\n\n"):
            return [piece]  # as SGLang sends them
        *whole, self._rest = (self._rest + piece).split(b"\n\n")
        return [event + b"\n\n" for event in whole]

    def rest(self) -> bytes:
        """What is left of a stream that has ended."""
        rest, self._rest = self._rest, b""
        return rest


def cached(report: Report) -> int:
    """Prompt tokens that were not computed."""
    return report["tokens"]["shared"] + report["tokens"]["moved"]


def _split_input(usage: Any, report: Report) -> None:
    """Input tokens of this API are those that were not cached."""
    if isinstance(usage, dict) and "input_tokens" in usage and not _has_cached(usage):
        count = min(cached(report), usage["input_tokens"])
        usage["input_tokens"] -= count
        usage["cache_read_input_tokens"] = count


def _has_cached(usage: dict[str, Any]) -> bool:
    return usage.get("cache_read_input_tokens") is not None


def _may_be_last(event: bytes) -> bool:
    """Whether a chunk can be a stream's last: everything in it has ended. The others must not wait,
    they bring text."""
    if b'"finish_reason":null' in event:  # inside a text its quotes would be escaped
        return False
    choices = _json(event).get("choices")
    return isinstance(choices, list) and all(
        isinstance(each, dict) and each.get("finish_reason") for each in choices
    )


def _data(event: bytes) -> bytes:
    for line in event.splitlines():
        if line.startswith(b"data:"):
            return line[5:].strip()
    return b""


def _json(event: bytes) -> dict[str, Any]:
    """The JSON object in an event; empty if there is none."""
    try:
        out = orjson.loads(_data(event))
    except ValueError:
        return {}
    return out if isinstance(out, dict) else {}


def _clean(text: str) -> str:
    """What came from a stranger may not be encodable."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
