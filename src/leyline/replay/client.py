"""One streamed call over /v1/chat/completions, with times.

Counts are read wherever servers put them: `usage.prompt_tokens_details.cached_tokens` (Leyline,
SGLang with --enable-cache-report, vLLM with --enable-prompt-tokens-details, recent llama.cpp), else
`timings.cache_n` (llama.cpp), else the `leyline` report.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from leyline.traces import Message

ANSWER_LIMIT_S = 1800.0
"""Sixteen long prompts on a CPU wait for each other."""

_TOO_LONG = re.compile(
    r"context[ _-]?(length|size|window)|maximum allowed length|longer than .*(model|cache)",
    re.IGNORECASE,
)


class CallError(Exception):
    """A call that got no answer. too_long: the prompt is more than the server takes."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    @property
    def too_long(self) -> bool:
        # 413: more bytes than the server takes, whatever it says of them.
        return self.status == 413 or (
            self.status in (400, 422) and bool(_TOO_LONG.search(str(self)))
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What one call cost. Times are seconds since the request was sent.

    prompt, cached, completion: tokens, as the server counts them; None where it doesn't say.
    first_token: its text, "" where the answer ended at once; None where that isn't to be seen.
    report: the answer's `leyline` object.
    """

    ttft_s: float
    e2e_s: float
    prompt: int | None
    cached: int | None
    completion: int | None
    first_token: str | None
    margin: float | None
    report: dict[str, Any] | None


@dataclass(slots=True)
class _Stream:
    """What has come of an answer so far."""

    first_at: float | None = None
    first_token: str | None = None
    margin: float | None = None
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            raise _error(chunk["error"], None)
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        self.report = chunk.get("leyline") or self.report
        for choice in chunk.get("choices") or ():
            self._choice(choice, now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        self.reason = choice.get("finish_reason") or self.reason
        delta = choice.get("delta") or {}
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        tokens = (choice.get("logprobs") or {}).get("content")
        if self.first_at is None and (text or tokens or self.reason):
            self.first_at = now
            self.first_token = _token(tokens[0]) if tokens else text
            self.margin = _margin(tokens[0]) if tokens else None
            if self.first_token is None and self.reason == "stop":
                self.first_token = ""

    def answer(self, began: float, ended: float) -> Answer:
        if self.first_at is None:
            raise CallError("the answer ended before its first token")
        prompt, cached = self.usage.get("prompt_tokens"), self._cached()
        return Answer(
            ttft_s=self.first_at - began,
            e2e_s=ended - began,
            prompt=prompt,
            cached=cached,
            completion=self.usage.get("completion_tokens"),
            first_token=self.first_token,
            margin=self.margin,
            report=self.report,
        )

    def _cached(self) -> int | None:
        details = self.usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            return int(details["cached_tokens"])
        if self.timings.get("cache_n") is not None:
            return int(self.timings["cache_n"])
        if self.report is not None:
            return int(self.report["tokens"]["shared"] + self.report["tokens"]["moved"])
        return None


class Client:
    """A server under `url`, with or without /v1 at its end. Threads may share it.

    root: the address without a name and password, which pages and errors are not to show.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        address, account = _apart(url)
        self.root = address.rstrip("/").removesuffix("/v1")
        self.has_key = bool(key)
        self.model = ""
        self.extras: dict[str, Any] = {}
        """Fields that not every server takes; see server.py."""
        self.http = httpx.Client(
            headers=bearer(key) if key else None,
            auth=account,
            timeout=httpx.Timeout(ANSWER_LIMIT_S, connect=10.0),
            limits=httpx.Limits(max_connections=None),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.http.close()

    def ask(
        self, messages: list[Message], tokens: int = 1, leyline: dict[str, Any] | None = None
    ) -> Answer:
        """The likeliest `tokens` tokens behind a prompt. Raises CallError."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extras,
        }
        if leyline is not None:
            body["leyline"] = leyline
        url = f"{self.root}/v1/chat/completions"
        stream = _Stream()
        began = time.perf_counter()
        try:
            with self.http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    raise _error(_body(answer.read()), answer.status_code)
                for chunk in _chunks(answer):
                    stream.take(chunk, time.perf_counter())
            return stream.answer(began, time.perf_counter())
        except (httpx.HTTPError, UnicodeEncodeError) as trouble:  # text may be no Unicode
            raise CallError(f"{type(trouble).__name__}: {trouble}") from trouble
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as trouble:
            what = f"{url}: not an answer in the OpenAI API's shape ({trouble!r})"
            raise CallError(what) from trouble


def _apart(url: str) -> tuple[str, tuple[str, str] | None]:
    """An address, and the name and password that stood in it."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        return url, None  # the first call says so
    if not found.userinfo:
        return url, None
    return str(found.copy_with(userinfo=b"")), (found.username, found.password)


def bearer(key: str) -> dict[bytes, bytes]:
    """A key's header. As bytes: of text, httpx takes ASCII alone. Bytes that were no text stay as
    they were."""
    return {b"Authorization": b"Bearer " + key.encode("utf-8", "surrogateescape")}


def _chunks(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The server-sent events of a streamed answer. Raises CallError for what is none."""
    for line in answer.iter_lines():
        name, _, data = line.partition(":")
        if name not in ("data", "error"):
            continue
        if data.strip() == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as trouble:
            raise CallError(f"not JSON in the stream: {data[:200]}") from trouble
        yield {"error": chunk} if name == "error" else chunk


def _body(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found.get("error", found) if isinstance(found, dict) else found


def _error(found: Any, status: int | None) -> CallError:
    """From an error object in any server's manner."""
    if not isinstance(found, dict):
        where = f"HTTP {status}: " if status else ""
        return CallError(f"{where}{str(found)[:300]}", status)
    text = str(found.get("message") or found.get("detail") or found)[:300]
    if status is None:  # the stream had begun: the object itself may have the status
        code = found.get("code")
        status = code if isinstance(code, int) else None
    words = [f"HTTP {status}:"] if status else []
    named = [str(found[key]) for key in ("code", "type") if isinstance(found.get(key), str)]
    note = f"({', '.join(named)})" if named else ""
    return CallError(" ".join([*words, text, note]).rstrip(), status)


def _margin(logprob: dict[str, Any]) -> float | None:
    """By how many nats the likeliest token is ahead of the next one."""
    best = [each["logprob"] for each in logprob.get("top_logprobs") or ()]
    return best[0] - best[1] if len(best) > 1 else None


def _token(logprob: dict[str, Any]) -> str:
    """A token as text; one that is a part of a character as its bytes."""
    text = str(logprob.get("token"))
    return str(logprob["bytes"]) if "\ufffd" in text and logprob.get("bytes") else text
