"""The embedded engine: a model, its cache, and a thread that runs them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from leyline.channel import Channel, EngineError, Report
from leyline.engine.cache import ATTENTION
from leyline.engine.linear import use_few_token_linears
from leyline.engine.planes import Planes
from leyline.engine.request import (
    Delta,
    Done,
    Event,
    Failed,
    Logprob,
    PromptTooLong,
    QueueFull,
    Request,
    Sampling,
    Started,
)
from leyline.engine.scheduler import Limits, Running, Scheduler
from leyline.engine.store import Forgotten, Store
from leyline.layout import ModelLayout, layout_of, probe
from leyline.lineage import Lineages

log = logging.getLogger("leyline.engine")
T = TypeVar("T")

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Config:
    """How an engine is set up; every bound is here.

    memory_gib: for cached rows, preallocated.
    chunk: tokens in one forward pass.
    max_tokens: of a prompt with its answer; None for what the model was made for. A number above
    that is taken as it is: answers past a model's positions are noise, but counts are right.
    max_sessions, max_session_tokens, session_ttl_s: bounds on what sessions hold.
    directives: False serves sessions as if they had none, to compare.
    """

    memory_gib: float = 1.0
    max_running: int = 16
    max_waiting: int = 64
    chunk: int = 1024
    max_tokens: int | None = None
    max_sessions: int = 1024
    max_session_tokens: int = 16_000_000
    session_ttl_s: float = 3600.0
    directives: bool = True


@dataclass(frozen=True, slots=True)
class Stats:
    """Slots and requests at one moment. free + cached + private = capacity (I7)."""

    capacity: int
    free: int
    cached: int
    private: int
    running: int
    waiting: int
    sessions: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session's lineage, for people. spans: (start, tokens, exact, rotations)."""

    session: str
    tokens: int
    exact: int
    edits: int
    max_rotations: int
    cached: int
    age_s: float
    spans: tuple[tuple[int, int, bool, int], ...]


@dataclass(slots=True)
class Answer:
    """A finished request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str = ""
    report: Report | None = None
    ttft_s: float | None = None
    """Seconds from submission to the first token."""
    attention: np.ndarray | None = None
    """Of each token of the prompt, see `Done`."""


class Handle:
    """A submitted request."""

    def __init__(self) -> None:
        self.run: Running | None = None  # engine's thread only
        self.submitted = time.perf_counter()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def events(self) -> Iterator[Event]:
        """Events as they come; the last one is Done or Failed."""
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Done | Failed):
                return

    def result(self) -> Answer:
        """Wait for the whole answer. Raises the error of a failed request."""
        answer = Answer()
        for event in self.events():
            match event:
                case Started(report):
                    answer.report = report
                case Delta(text, tokens, logprobs):
                    if answer.ttft_s is None and tokens:
                        answer.ttft_s = time.perf_counter() - self.submitted
                    answer.text += text
                    answer.tokens += tokens
                    answer.logprobs += logprobs
                case Done(reason, report):
                    answer.reason, answer.report = reason, report
                    answer.attention = event.attention
                case Failed(error):
                    raise error
        return answer


class Engine:
    """Serves one model. Use as a context manager, or call `close`.

    Thread-safe: everything is carried to the engine's own thread.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: Config | None = None,
        name: str = "model",
    ) -> None:
        """model: a causal LM of Transformers, in its dtype and on its device; its attention and
        linear layers are switched. Raises Unsupported, with the reason, if it can't be spliced."""
        self.config = config = config or Config()
        self.name = name
        self.tokenizer = tokenizer
        if model.config._attn_implementation == ATTENTION:  # another engine's model
            model.set_attn_implementation("sdpa")
        self.layout: ModelLayout = layout_of(model)
        probe(model, self.layout)
        weight = model.get_input_embeddings().weight
        capacity = _capacity(config, self.layout.row_elements * weight.dtype.itemsize)
        model.eval()
        model.set_attn_implementation(ATTENTION)
        use_few_token_linears(model)
        self.model = model
        positions: int = config.max_tokens or model.config.max_position_embeddings
        self.max_tokens = min(positions, capacity)
        self.vocab_size = int(weight.shape[0])
        self.store = Store(
            Planes(self.layout, capacity, weight.dtype, weight.device),
            Lineages(config.max_sessions, config.max_session_tokens, config.session_ttl_s),
        )
        self._scheduler = Scheduler(
            model,
            self.store,
            Limits(config.max_running, config.chunk, self.max_tokens),
            latent=any(layer.kind == "mla" for layer in self.layout.layers),
            eos=_eos(model),
            vocab_size=self.vocab_size,
            tokenizer=tokenizer,
            directives=config.directives,
        )
        self._wake = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._posted = 0  # requests on their way to the scheduler
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="leyline-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        config: Config | None = None,
        name: str | None = None,
    ) -> Engine:
        """Load a model directory with Transformers. Nothing is downloaded. One without a tokenizer
        takes token ids only."""
        from transformers import AutoModelForCausalLM

        path = Path(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        return cls(model.to(device), _tokenizer_of(path), config, name or path.name)

    # -- requests ------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        on_event: Callable[[Event], None] | None = None,
    ) -> Handle:
        """Queue a request. Its events go to `on_event`, on the engine's thread, or to the handle.

        Raises PromptTooLong, QueueFull or EngineError before anything has changed.
        """
        self._check(request)
        handle = Handle()
        emit = on_event or handle._events.put
        with self._wake:
            if self._closing:
                raise EngineError("closing", "the server is shutting down")
            queued = self._posted + len(self._scheduler.waiting)
            if queued >= self.config.max_waiting:
                raise QueueFull(
                    "queue_full",
                    f"{queued} requests are waiting, no more are taken; try again shortly",
                )
            self._posted += 1

            self._calls.append(lambda: self._begin(handle, request, emit))
            self._wake.notify()
        return handle

    def generate(
        self,
        prompt: np.ndarray | list[int] | str,
        sampling: Sampling | None = None,
        channel: Channel | None = None,
    ) -> Answer:
        """Submit a prompt, text or token ids, and wait for the answer."""
        tokens = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        request = Request(np.asarray(tokens, dtype=np.int64), sampling or Sampling(), channel)
        return self.submit(request).result()

    def abort(self, handle: Handle) -> None:
        """End a request; its last event says "abort". Nothing happens if it has ended."""

        def mark() -> None:
            if handle.run is not None:
                handle.run.aborted = True

        self._post(mark)

    # -- sessions and state ----------------------------------------------------------------------

    def session(self, owner: str, session: str) -> SessionView | None:
        """What is cached for a session; None if it is unknown to this owner. A look: it expires and
        gives way as if nobody had asked."""

        def view() -> SessionView | None:
            lineage = self.store.lineages.peek(owner, session)
            if lineage is None:
                return None
            return SessionView(
                session=session,
                tokens=len(lineage.tokens),
                exact=lineage.exact,
                edits=lineage.edits,
                max_rotations=lineage.max_rotations,
                cached=self.store.tree.match(lineage.key).n,
                age_s=time.monotonic() - lineage.created,
                spans=tuple((s.start, s.n, s.exact, s.rotations) for s in lineage.spans),
            )

        return self.call(view)

    def drop_session(self, owner: str, session: str, scrub: bool = False) -> Forgotten | None:
        """End a session's requests and free its rows; None if it is unknown to this owner.
        scrub: also zero every row that nobody uses."""

        def drop() -> Forgotten | None:
            user = (owner, session)
            known = self.store.lineages.drop(owner, session) is not None
            known = self._scheduler.drop_session(user) or known
            if not known:
                return None
            forgotten = self.store.forget(user)
            self.store.dropped(owner, session)
            if scrub:
                self.store.scrub()
            return forgotten

        return self.call(drop)

    def on_drop(self, tell: Callable[[str, str], None]) -> None:
        """Have `tell(owner, session)` called, on the engine's thread, for each session that is held
        no more: dropped, expired, or made to give way."""
        before = self.store.dropped

        def dropped(owner: str, session: str) -> None:
            before(owner, session)
            tell(owner, session)

        self.store.dropped = dropped

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> Stats:
        """Slots and requests right now."""
        return self.call(self._stats)

    def reset(self) -> None:
        """Empty the cache. Raises EngineError while requests run."""

        def reset() -> None:
            if self._scheduler.running or self._scheduler.waiting:
                raise EngineError("busy", "the cache can't be emptied while requests run")
            self.store.reset()

        self.call(reset)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the engine's thread, between two passes, and return what it returns."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._post(run)
        return done.result()

    def close(self) -> None:
        """Stop. Requests still there end with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------

    def _post(self, call: Callable[[], None]) -> None:
        with self._wake:
            if self._closing:
                raise EngineError("closing", "the server is shutting down")
            self._calls.append(call)
            self._wake.notify()

    @torch.inference_mode()
    def _loop(self) -> None:
        idle = False
        while True:
            with self._wake:
                while idle and not self._calls and not self._closing:
                    self._wake.wait()
                calls, self._calls = self._calls, []
                closing = self._closing
            for call in calls:
                call()
            if closing:
                self._scheduler.shut_down()
                return
            try:
                self.store.expire()
                idle = not self._scheduler.step()
            except Exception:  # a bug: what is cached can't be trusted, but the engine lives on
                log.exception("the scheduler failed; its requests end and the cache is emptied")
                self._scheduler.give_up()

    def _begin(self, handle: Handle, request: Request, emit: Callable[[Event], None]) -> None:
        with self._wake:
            self._posted -= 1
        handle.run = self._scheduler.add(request, emit)

    def _check(self, request: Request) -> None:
        """Refuse what can never run, before it is queued."""
        prompt, sampling = request.prompt, request.sampling
        sampling.check(self.vocab_size)
        if prompt is None:
            if request.channel is None or request.channel.directives is None:
                raise EngineError("empty_prompt", "prompt: missing, and no directives instead")
            return
        if prompt.size == 0:
            raise EngineError("bad_prompt", "prompt: it is empty; it must have at least one token")
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise EngineError("bad_prompt", "prompt: it must be one list of token ids")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise EngineError(
                "unknown_token",
                f"prompt: {bad} is no token of this model (0 to {self.vocab_size - 1})",
            )
        most = self.max_tokens - (1 if sampling.length is None else sampling.length)
        if len(prompt) > most:
            raise PromptTooLong(
                "context_length_exceeded",
                f"prompt: {len(prompt)} tokens and up to {self.max_tokens - most} for the answer, "
                f"but this server takes {self.max_tokens} together",
            )

    def _stats(self) -> Stats:
        private = sum(run.n_slots - run.locked for run in self._scheduler.running)
        return Stats(
            capacity=self.store.pool.capacity,
            free=self.store.pool.free_count,
            cached=self.store.tree.total,
            private=private,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            sessions=len(self.store.lineages),
        )


def _tokenizer_of(path: Path) -> Any:
    """The tokenizer in a model directory; None if there is none."""
    from transformers import AutoTokenizer

    if not any(path.glob("*token*")) and not any(path.glob("vocab*")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


def _capacity(config: Config, row_bytes: int) -> int:
    """Slots that the memory holds."""
    if not 0 < config.memory_gib < float("inf"):
        raise ValueError(f"memory_gib: {config.memory_gib}; it must be a number of GiB above 0")
    capacity = int(config.memory_gib * GIB / row_bytes)
    if capacity < 1:
        raise ValueError(f"memory_gib: {config.memory_gib} GiB does not hold a single row")
    return capacity


def _eos(model: Any) -> frozenset[int]:
    """Tokens that end an answer, as the model's generation config has them."""
    found = model.generation_config.eos_token_id if model.generation_config else None
    found = model.config.eos_token_id if found is None else found
    return frozenset([found] if isinstance(found, int) else found or [])
