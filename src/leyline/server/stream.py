"""The engine's events on the event loop, and as an answer: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from leyline.channel import EngineError, Report, StrictFallback
from leyline.engine.engine import Engine, Handle
from leyline.engine.request import Delta, Done, Event, Failed, Logprob, Request, Started
from leyline.server.errors import ApiError, named
from leyline.server.inspect.records import Recording
from leyline.server.metrics import Metrics

log = logging.getLogger("leyline.server")
T = TypeVar("T")


class Surface(Protocol):
    """How an answer looks on the wire."""

    def chunks(self, event: Delta | Done) -> Iterable[BaseModel]:
        """What to send of a streamed answer now."""
        ...

    def whole(self, text: str, logprobs: list[Logprob], done: Done) -> BaseModel:
        """The whole answer."""
        ...


class Framing(Protocol):
    """What a stream of server-sent events is, beside the surface's own chunks."""

    def opening(self, report: Report) -> bytes:
        """The events in front."""
        ...

    def event(self, chunk: BaseModel) -> bytes:
        """A chunk as an event."""
        ...

    def closing(self) -> bytes:
        """The events behind."""
        ...

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        ...


class OpenAIFraming:
    """Events without a name, the last one is [DONE]."""

    def opening(self, report: Report) -> bytes:
        return b""

    def event(self, chunk: BaseModel) -> bytes:
        return b"data: " + chunk.model_dump_json().encode() + b"\n\n"

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


class ClientGone(Exception):
    """Nobody is there to answer to."""


class Events:
    """One request's events. As a context manager: submits it, and aborts it if it has not ended."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        metrics: Metrics,
        recording: Recording | None = None,
    ) -> None:
        """recording: where to note them, for people who look."""
        self._recording = recording
        self._engine = engine
        self._request = request
        self._metrics = metrics
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._handle: Handle | None = None
        self._began = time.perf_counter()
        self._first = True
        self.ended = False

    async def __aenter__(self) -> Events:
        loop, recording = asyncio.get_running_loop(), self._recording

        def on_event(event: Event) -> None:  # on the engine's thread
            if recording is not None:
                recording.observe(event)
            try:
                loop.call_soon_threadsafe(self._queue.put_nowait, event)
            except RuntimeError:  # the loop was closed under us: nobody is listening
                pass

        if recording is not None:
            recording.begin()
        try:
            self._handle = self._engine.submit(self._request, on_event)
        except Exception as error:
            if recording is not None:
                recording.observe(Failed(error))
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._handle is None or self.ended:
            return
        try:
            self._engine.abort(self._handle)
        except EngineError:  # closing, which ends all requests
            pass

    async def next(self) -> Started | Delta | Done:
        """The next event. Raises the error of a failed request."""
        event = await self._queue.get()
        self._observe(event)
        if isinstance(event, Failed):
            raise event.error
        return event

    def _observe(self, event: Event) -> None:
        seconds = time.perf_counter() - self._began
        match event:
            case Started(report):
                self._metrics.started(report)
            case Delta(_, tokens):
                self._metrics.generated_tokens.inc(len(tokens))
                if self._first and tokens:
                    self._first = False
                    self._metrics.ttft.observe(seconds)
            case Done():
                self.ended = True
                self._metrics.e2e.observe(seconds)
            case Failed(error):
                self.ended = True
                if isinstance(error, StrictFallback):
                    self._metrics.fallbacks.labels(str(error.reason)).inc()


class EngineResponse(Response):
    """Runs a request on the engine and answers with what comes, as long as the client is there.

    Headers wait for the engine's first event, so that a request refused on admission gets its own
    status, streamed or not.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        request: Request,
        surface: Surface,
        *,
        stream: bool = False,
        framing: Framing | None = None,
        prefix: str = "leyline",
        prompt: str = "prompt",
        recording: Recording | None = None,
    ) -> None:
        """framing: of a streamed answer, by default OpenAI's. recording: None without a session.
        prefix, prompt: what edits and the prompt are called in the request, for errors."""
        super().__init__()
        self._engine = engine
        self._metrics = metrics
        self._request = request
        self._surface = surface
        self._stream = stream
        self._framing = framing or OpenAIFraming()
        self._prefix = prefix
        self._prompt = prompt
        self._recording = recording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._streamed(send) if self._stream else self._whole(scope, receive, send)
        try:
            await while_connected(receive, work)
        except ClientGone:
            log.debug("a client hung up, its request is aborted")
        except Exception as error:
            raise named(error, self._prefix, self._prompt) from error

    def _events(self) -> Events:
        return Events(self._engine, self._request, self._metrics, self._recording)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        text: list[str] = []
        logprobs: list[Logprob] = []
        async with self._events() as events:
            while not isinstance(event := await events.next(), Done):
                if isinstance(event, Delta):
                    text.append(event.text)
                    logprobs += event.logprobs
        answer = self._surface.whole("".join(text), logprobs, event)
        body = answer.model_dump_json()
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _streamed(self, send: Send) -> None:
        async with self._events() as events:
            event = await events.next()
            await send(STREAM_START)
            framing = self._framing
            try:
                if isinstance(event, Started) and (opening := framing.opening(event.report)):
                    await send(data(opening))
                while not isinstance(event, Done):
                    event = await events.next()
                    if not isinstance(event, Started):
                        for chunk in self._surface.chunks(event):
                            await send(data(framing.event(chunk)))
                if closing := framing.closing():
                    await send(data(closing))
            except Exception as error:  # too late for a status
                log.warning("a streamed answer failed: %s", error)
                await send(data(framing.error(named(error, self._prefix, self._prompt))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` while the client is there; else cancel it and raise ClientGone.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


def data(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}
