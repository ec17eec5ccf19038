"""One task, from the agent's first call to the end."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from leyline import __version__
from leyline.evals.arms import Body, Key, edited, new_mark
from leyline.evals.endpoint import Reply, complete
from leyline.evals.gym import Episode as Process
from leyline.evals.gym import Gym, GymError, TimeUp
from leyline.evals.scripted import SCRIPTS, Turn
from leyline.evals.store import Episode, Store, Writer
from leyline.replay.client import CallError, Client

SYSTEM_PROMPT = (
    "You find and fix bugs in small Python programs. Hidden tests decide whether a program is "
    "right. Look at the files and run the code before you change anything; then change only what "
    "is wrong, and run the eval tool: the task ends when all tests pass. Call exactly one tool in "
    "each answer, after a sentence or two of thought. Don't repeat a call that told you nothing."
)
"""The same at every step: what changes at the top of a prompt is computed anew, with all behind."""

RUN_TIMEOUT_S = 30
"""Of the tests, as in debug-gym's own configuration."""

SCRIPTED_TIMEOUT_S = 600
"""Scripted code ends by itself: a busy machine is to change nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all episodes share. steps: debug-gym's `max_steps`, which allows one call fewer.
    temperature, top_p, max_tokens: left to the server where None. scripted: answers are not the
    model's. data: a folder of tasks, None for those of debug-gym's package. time_limit: seconds for
    an episode. server: its kind, "" until it was asked."""

    model: str
    steps: int = 50
    keep: int = 2
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    scripted: bool = False
    data: str | None = None
    time_limit: float = 3600.0
    server: str = ""
    system_prompt: str = SYSTEM_PROMPT

    def sampling(self, seed: int) -> Body:
        if self.scripted:
            return {"max_tokens": 1, "temperature": 0}
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }
        return {"seed": seed, **{name: x for name, x in given.items() if x is not None}}


def run_episode(
    gym: Gym,
    client: Client,
    store: Store,
    key: Key,
    settings: Settings,
    *,
    session: str,
    counts: bool,
    concurrency: int = 1,
) -> Episode:
    """Run it and write it down. session: a name that no other episode has. counts: the server says
    how many tokens it had cached. concurrency: of the evaluation. Raises CallError and GymError for
    what is no fault of the agent's; the episode is then not finished."""
    job = {
        "task": key.task,
        "data": settings.data,
        "steps": settings.steps,
        "system_prompt": new_mark() + settings.system_prompt,
        "run_timeout_s": SCRIPTED_TIMEOUT_S if settings.scripted else RUN_TIMEOUT_S,
    }
    began = time.perf_counter()
    with store.writer(key) as writer, gym.start(job, settings.time_limit) as process:
        run = _Run(key, settings, client, writer, session, counts)
        try:
            solved, reason = run.talk(process)
        except TimeUp:
            solved, reason = False, "time"
        done = run.episode(solved, reason, time.perf_counter() - began, concurrency)
        writer.end(done)
    return done


@dataclass
class _Run:
    """An episode as it goes on. ready: what the other process said of itself."""

    key: Key
    settings: Settings
    client: Client
    writer: Writer
    session: str
    counts: bool
    replies: list[Reply] = field(default_factory=list)
    ready: dict[str, str] = field(default_factory=dict)

    def talk(self, process: Process) -> tuple[bool, str]:
        """Until the episode's end: whether it was solved, and why it ended."""
        while True:
            kind, value = process.get()
            if kind == "ready":
                self.ready.update(value)
            elif kind == "ask":
                process.put(self._answer(value))
            elif kind == "done":
                return bool(value["resolved"]), str(value["reason"])
            else:
                raise GymError(f"debug-gym failed: {value}")

    def episode(self, solved: bool, reason: str, wall_s: float, concurrency: int) -> Episode:
        replies = self.replies
        told = {k: v for k, v in self.ready.items() if k in ("debug_gym", "python")}
        counted = self.counts or not replies or any(r.cached is not None for r in replies)
        return Episode(
            arm=self.key.arm,
            task=self.key.task,
            seed=self.key.seed,
            solved=solved,
            reason=reason,
            turns=len(replies),
            prompt=sum(reply.prompt for reply in replies),
            # Servers leave the count out where it is 0.
            cached=sum(reply.cached or 0 for reply in replies) if counted else None,
            completion=sum(reply.completion for reply in replies),
            moved=sum(reply.moved for reply in replies),
            edits=sum(reply.edits for reply in replies),
            fallbacks=dict(Counter(r.fallback for r in replies if r.fallback is not None)),
            model_s=sum(reply.seconds for reply in replies),
            wall_s=wall_s,
            digest=self.ready.get("digest", ""),
            versions={**told, "leyline": __version__},
            concurrency=concurrency,
        )

    def _answer(self, asked: Body) -> dict[str, Any]:
        """Send what the agent asks, as the arm has it; what to tell debug-gym."""
        turn, settings = len(self.replies), self.settings
        script = SCRIPTS[self.key.task] if settings.scripted else ()
        if settings.scripted and turn == len(script):
            return {"stop": "script"}
        body = {**asked, "model": settings.model, **settings.sampling(self.key.seed)}
        sent = edited(self.key.arm, body, settings.keep, self.session)
        try:
            reply = complete(self.client, sent)
        except CallError as trouble:
            if not trouble.too_long:
                raise
            self.writer.call(sent["messages"], {"error": str(trouble)})
            return {"stop": "context"}
        self.replies.append(reply)
        answer = forced(reply.answer, script[turn], turn) if settings.scripted else reply.answer
        facts = {
            "usage": reply.answer["usage"],
            "leyline": reply.answer.get("leyline"),
            "seconds": reply.seconds,
            "answer": answer["choices"][0]["message"],
        }
        self.writer.call(sent["messages"], facts)
        return {"answer": answer}


def forced(answer: dict[str, Any], turn: Turn, number: int) -> dict[str, Any]:
    """The answer with what is scripted in place of what the model said."""
    function = {"name": turn.tool, "arguments": json.dumps(turn.arguments)}
    message = {
        "role": "assistant",
        "content": turn.thought,
        "tool_calls": [{"id": f"call-{number}", "type": "function", "function": function}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {**answer, "choices": [choice]}
