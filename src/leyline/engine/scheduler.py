"""Which tokens go into the next forward pass, and what becomes of its logits.

One pass carries a token of every decoding request and chunks of those that prefill, packed. Nothing
here blocks or starts threads: `step` is called again and again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leyline.channel import EngineError, Fallback, check_strict
from leyline.engine import splice
from leyline.engine.attention_mass import AttentionMass
from leyline.engine.cache import Chunk, forward
from leyline.engine.request import (
    Delta,
    Done,
    Event,
    Failed,
    Logprob,
    PromptTooLong,
    Request,
    Started,
)
from leyline.engine.running import Running, spans_up_to
from leyline.engine.sampler import logprob_of, make_generator, sample
from leyline.engine.slots import NO_SLOTS, Slots
from leyline.engine.splice import Rows
from leyline.engine.store import Store
from leyline.engine.text import TextStream
from leyline.engine.tree import PUBLIC, User
from leyline.lineage import Lineage

log = logging.getLogger("leyline.engine")


@dataclass(frozen=True, slots=True)
class Limits:
    """max_running: requests in one pass. chunk: tokens in one pass. max_tokens: of a prompt and its
    answer together."""

    max_running: int
    chunk: int
    max_tokens: int


class Scheduler:
    """Waiting and running requests over one store and one model."""

    def __init__(
        self,
        model: torch.nn.Module,
        store: Store,
        limits: Limits,
        *,
        latent: bool,
        eos: frozenset[int],
        vocab_size: int,
        tokenizer: Any = None,
        directives: bool = True,
    ) -> None:
        self.model = model
        self.store = store
        self.limits = limits
        self.latent = latent
        self.eos = eos
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.directives = directives
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        store.uncomputed = self._uncomputed

    # -- arrivals and departures ---------------------------------------------------------------

    def add(self, request: Request, emit: Callable[[Event], None]) -> Running:
        """Queue a request; its events go to `emit`, the last one is Done or Failed."""
        run = Running(
            request,
            _guarded(emit),
            TextStream(self.tokenizer, request.sampling.stop),
            make_generator(request.sampling, self.store.planes.keys[0].device),
        )
        self.waiting.append(run)
        return run

    def drop_session(self, user: User) -> bool:
        """End what runs for a session, so that its rows can be dropped. False if nothing did."""
        mine = [run for run in [*self.running, *self.waiting] if run.user == user]
        for run in mine:
            run.aborted = run.detached = True
        self._sweep()
        return bool(mine)

    def shut_down(self) -> None:
        """End everything."""
        self._end_all(EngineError("closing", "the server is shutting down"))

    def give_up(self) -> None:
        """End everything after a failure that nobody foresaw, and start with an empty cache."""
        self._end_all(EngineError("internal", "the engine failed and has been reset"))
        self.store.reset()

    def _end_all(self, error: EngineError) -> None:
        runs = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for run in runs:
            run.emit(Failed(error))

    def step(self) -> bool:
        """Admit what fits and run one forward pass. False when there was nothing to do."""
        self._sweep()
        self._admit()
        batch = self._compose()
        if not batch:
            return False
        tokens = np.concatenate([run.tokens[chunk.positions] for run, chunk in batch])
        ends = np.cumsum([len(chunk.positions) for _, chunk in batch])
        wanted = [i for i, (run, c) in enumerate(batch) if len(c.positions) >= len(run.todo)]
        try:
            logits = forward(
                self.model,
                tokens,
                [chunk for _, chunk in batch],
                self.store.planes,
                self.latent,
                [int(ends[i]) - 1 for i in wanted],
            )
        except Exception as error:  # one bad pass must not take the engine down
            log.exception("forward pass failed")
            for run, _ in batch:
                self._fail(run, EngineError("internal", f"the model failed: {error}"))
            return True
        at = {i: row for row, i in enumerate(wanted)}
        for i, (run, chunk) in enumerate(batch):
            try:
                self._advance(run, len(chunk.positions), logits[at[i]] if i in at else None)
            except Exception as error:
                log.exception("a request failed behind the forward pass")
                self._fail(run, EngineError("internal", f"drawing a token failed: {error}"))
        return True

    # -- before the pass -----------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while there is room. Those of one session keep
        their order."""
        behind: set[User] = set()
        for run in list(self.waiting):
            if len(self.running) >= self.limits.max_running:
                return
            if run.user in behind or self._must_wait(run):
                behind.add(run.user)
                continue
            if not self._start(run):
                return
            self.waiting.remove(run)

    def _must_wait(self, run: Running) -> bool:
        """One session prefills one request at a time, so that each finds what the last one left.
        FORGET waits until nothing of the session runs."""
        if run.user is PUBLIC:
            return False
        channel = run.request.channel
        assert channel is not None
        return any(
            other.user == run.user and (channel.forgets or other.prefilling)
            for other in self.running
        )

    def _start(self, run: Running) -> bool:
        """Plan and splice. False when there is no room yet."""
        channel = run.request.channel
        try:
            if run.report is not None:  # it had to give way before
                intent = splice.resume(self.store, run.tokens[: run.n], run.key[: run.n], run.spans)
            else:
                intent = splice.intend(self.store, run.request, self.vocab_size, self.directives)
                self._set_length(run, intent.target)
            rows = splice.execute(self.store, intent, channel)
            if rows is None and channel and intent.reuse.moved and not self.running:
                check_strict(channel, Fallback.NO_ROOM)
                intent = splice.without_splice(self.store, intent, Fallback.NO_ROOM)
                rows = splice.execute(self.store, intent, channel)
        except Exception as error:  # told to the client; nothing of the request is left here
            run.emit(Failed(error))
            return True
        if rows is None:
            if not self.running:
                run.emit(Failed(EngineError("no_room", "the prompt does not fit into the cache")))
                return True
            return False
        self._take(run, intent.target, rows)
        return True

    def _set_length(self, run: Running, target: np.ndarray) -> None:
        asked = run.request.sampling.length
        left = self.limits.max_tokens - len(target)
        if left < 0 or (asked is not None and asked > left):
            raise PromptTooLong(
                "context_length_exceeded",
                f"the prompt has {len(target)} tokens and {asked or 0} more are asked for; "
                f"together they may be {self.limits.max_tokens}",
            )
        run.max_new = left if asked is None else asked

    def _take(self, run: Running, target: np.ndarray, rows: Rows) -> None:
        first = run.report is None
        run.n = run.n_slots = len(target)
        room = np.full(run.max_new - run.produced + 1, -1, dtype=np.int64)
        run.tokens = np.concatenate([target, room])
        run.key = np.concatenate([rows.key, room])
        run.slots = np.concatenate([rows.slots, room])
        run.todo, run.node, run.locked = rows.todo, rows.node, rows.locked
        run.spans, run.source_gone = rows.spans, rows.source_gone
        self.running.append(run)
        if first:
            if run.request.channel is not None and run.request.channel.attention:
                run.mass = AttentionMass(len(target))
            run.report = rows.report
            run.emit(Started(rows.report))

    def _compose(self) -> list[tuple[Running, Chunk]]:
        """Decoding requests first, a token each, then prefill chunks while there is budget."""
        batch: list[tuple[Running, Chunk]] = []
        for run in list(self.running):
            if not run.prefilling and run in self.running and self._grow(run):
                batch.append((run, run.chunk(1)))
        batch = [(run, chunk) for run, chunk in batch if run in self.running]
        budget = self.limits.chunk - len(batch)
        for run in self.running:
            if run.prefilling and budget > 0:
                chunk = run.chunk(budget)
                budget -= len(chunk.positions)
                batch.append((run, chunk))
        return batch

    def _grow(self, run: Running) -> bool:
        """A slot for the token that is computed next. The newest request gives way if need be."""
        while (got := self.store.alloc(1, after=int(run.slots[run.n_slots - 1]))) is None:
            victim = next((r for r in reversed(self.running) if not r.prefilling), run)
            self._retract(victim)
            if victim is run:
                return False
        run.slots[run.n_slots] = got[0]
        run.n_slots += 1
        return True

    def _retract(self, run: Running) -> None:
        """Leave what is computed to the tree, where it may be evicted, and wait for room."""
        # The slot of a token that was to be computed in this pass has no row yet.
        self.store.pool.free(run.slots[run.n - 1 : run.n_slots])
        run.n_slots = min(run.n_slots, run.n - 1)
        self._commit(run)
        self._release(run)
        self.waiting.appendleft(run)

    # -- after the pass ------------------------------------------------------------------------

    def _advance(self, run: Running, computed: int, logits: torch.Tensor | None) -> None:
        """Take over `computed` new rows; `logits` `[vocab]` if they reach the last token."""
        was_prefilling = run.prefilling
        run.todo = run.todo[computed:]
        if logits is None:
            return
        if was_prefilling:
            self._commit(run)
            self._remember(run)
        if run.aborted:
            self._finish(run, "abort")
        elif run.max_new == 0:
            self._finish(run, "length")
        elif run.request.sampling.forced is not None:
            self._force(run, run.request.sampling.forced)
        else:
            self._append(run, logits)

    def _force(self, run: Running, answer: tuple[int, ...]) -> None:
        """Take the recorded answer's tokens; called again when their rows are computed."""
        if run.produced < len(answer):
            run.emit(Delta("", answer))
            run.produced = len(answer)
            more = len(answer) - 1
            slots = self.store.alloc(more, after=int(run.slots[run.n - 1]))
            if slots is None:  # then the cache goes no further than the prompt
                self._finish(run, "stop")
                return
            run.tokens[run.n : run.n + len(answer)] = answer
            run.key[run.n : run.n + len(answer)] = answer
            run.slots[run.n : run.n + more] = slots
            run.todo = np.arange(run.n, run.n + more)
            run.n, run.n_slots = run.n + len(answer), run.n_slots + more
        if not run.prefilling:
            self._finish(run, "stop")

    def _append(self, run: Running, logits: torch.Tensor) -> None:
        sampling = run.request.sampling
        token = sample(logits, sampling, run.generator)
        run.tokens[run.n] = run.key[run.n] = token
        run.n += 1
        run.produced += 1
        logprobs: tuple[Logprob, ...] = ()
        if sampling.logprobs is not None:
            logprobs = (logprob_of(logits, token, sampling.logprobs),)
        if token in self.eos and not sampling.ignore_eos:
            run.emit(Delta("", (token,), logprobs))
            self._finish(run, "stop")
            return
        run.emit(Delta(run.text.push(token), (token,), logprobs))
        if run.text.stopped_by is not None:
            self._finish(run, "stop")
        elif run.produced >= run.max_new:
            self._finish(run, "length")

    def _commit(self, run: Running) -> None:
        """Put the rows computed so far into the tree. Rows that are there already win."""
        n = run.n_rows
        if run.detached or n <= run.locked:
            return
        assert run.node is not None
        mine = run.slots[:n].copy()
        match = self.store.tree.insert(run.key[:n], mine, run.user)
        self.store.tree.lock(match.node)
        self.store.tree.unlock(run.node)
        self.store.pool.free(mine[mine != match.slots])
        run.slots[:n] = match.slots
        run.node, run.locked = match.node, n

    def _remember(self, run: Running) -> None:
        """Make what is cached the session's source."""
        channel, n = run.request.channel, run.n_rows
        if channel is None or run.detached or not self.directives or n == 0:
            return
        assert run.report is not None
        last = self.store.lineages.get(channel.owner, channel.session)
        self.store.remember(
            Lineage(
                owner=channel.owner,
                session=channel.session,
                tokens=run.tokens[:n].copy(),
                key=run.key[:n].copy(),
                spans=spans_up_to(run.spans, n),
                edits=(last.edits if last else 0)
                + (0 if run.remembered else len(run.report.edits)),
                created=last.created if last else 0,
            )
        )
        run.remembered = True

    def _finish(self, run: Running, reason: str) -> None:
        text = run.text.flush()
        if text:
            run.emit(Delta(text, ()))
        self._commit(run)
        if run.produced:
            self._remember(run)
        self._release(run)
        assert run.report is not None
        done = Done(reason, run.report, run.produced, run.text.stopped_by, run.attention)
        run.emit(done)

    def _fail(self, run: Running, error: Exception) -> None:
        if run.node is not None:
            self._release(run)
        run.emit(Failed(error))

    def _release(self, run: Running) -> None:
        """Give up a running request's lock and its private slots."""
        assert run.node is not None
        self.store.pool.free(run.slots[run.locked : run.n_slots])
        self.store.tree.unlock(run.node)
        run.node, run.n_slots, run.locked = None, 0, 0
        self.running.remove(run)

    def _uncomputed(self) -> Slots:
        return np.concatenate([NO_SLOTS, *(run.slots[run.todo] for run in self.running)])

    def _sweep(self) -> None:
        """End requests whose client has gone."""
        for run in [run for run in self.waiting if run.aborted]:
            self.waiting.remove(run)
            if run.report is not None:  # it had to give way, its answer has begun
                run.emit(Done("abort", run.report, run.produced, attention=run.attention))
            else:
                run.emit(Failed(EngineError("aborted", "the request was aborted before it began")))
        for run in [run for run in self.running if run.aborted]:
            if run.detached or not run.prefilling or not self._must_complete(run):
                self._finish(run, "abort")

    def _must_complete(self, run: Running) -> bool:
        """Whether an aborted prefill goes on for a little: rows were moved for it, and they can be
        reached again only once those between them are computed. What is behind them is dropped."""
        if not run.source_gone:
            return False
        kept = np.setdiff1d(np.arange(run.n), run.todo)
        last_kept = int(kept[-1]) + 1 if len(kept) else 0
        behind = run.todo[run.todo >= last_kept]
        if len(behind):
            self.store.pool.free(run.slots[behind])
            run.todo = run.todo[run.todo < last_kept]
            run.n = run.n_slots = last_kept
        if run.prefilling:
            return True
        self._commit(run)
        self._remember(run)
        return False


def _guarded(emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """A receiver that fails must not take the engine down."""

    def guarded(event: Event) -> None:
        try:
            emit(event)
        except Exception:
            log.exception("the receiver of a request's events failed")

    return guarded
