"""A chat completion with tools, and what it cost. Not streamed: an agent waits for all of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from leyline.client import report_of
from leyline.evals.arms import Body
from leyline.replay.client import CallError, Client

AGAIN_S = (1.0, 3.0, 9.0)
"""Pauses before further tries, where a server is busy or away for a moment."""

_BUSY = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as JSON. seconds: of the try that worked. Tokens as the server counts them;
    cached is None where it doesn't say. moved, edits, fallback: of the answer's report."""

    answer: dict[str, Any]
    seconds: float
    prompt: int
    cached: int | None
    completion: int
    moved: int = 0
    edits: int = 0
    fallback: str | None = None


def complete(client: Client, body: Body) -> Reply:
    """Ask until there is an answer. Raises CallError, at once for a request that is refused."""
    for pause in (*AGAIN_S, None):
        try:
            return _once(client, body)
        except CallError as trouble:
            refused = trouble.status is not None and trouble.status not in _BUSY
            if refused or pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("not reached")


def _once(client: Client, body: Body) -> Reply:
    url = f"{client.root}/v1/chat/completions"
    began = time.perf_counter()
    try:
        response = client.http.post(url, json=body)
    except (httpx.HTTPError, UnicodeEncodeError) as trouble:
        raise CallError(f"{url}: {type(trouble).__name__}: {trouble}") from trouble
    seconds = time.perf_counter() - began
    if response.status_code != 200:
        what = f"{url}: HTTP {response.status_code}: {response.text[:500]}"
        raise CallError(what, response.status_code)
    try:
        answer = response.json()
        return reply_of(answer, seconds)
    except (AttributeError, KeyError, TypeError, ValueError) as trouble:
        what = f"{url}: not an answer in the OpenAI API's shape ({trouble!r})"
        raise CallError(what, 200) from trouble


def reply_of(answer: dict[str, Any], seconds: float) -> Reply:
    """Counts from an answer. Raises KeyError, TypeError and the like for what is none."""
    if not isinstance(answer["choices"][0]["message"], dict):
        raise TypeError("its message is no object")
    usage, report = answer["usage"], report_of(answer)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None and report is not None:
        cached = report.shared + report.moved
    return Reply(
        answer=answer,
        seconds=seconds,
        prompt=usage["prompt_tokens"],
        cached=cached,
        completion=usage.get("completion_tokens") or 0,
        moved=report.moved if report else 0,
        edits=len(report.edits) if report else 0,
        fallback=str(report.fallback) if report and report.fallback else None,
    )
