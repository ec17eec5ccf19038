"""All measurements, one after the other, on one model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from leyline.bench.bed import machine
from leyline.bench.results import Results
from leyline.bench.row import Row
from leyline.channel import EngineError
from leyline.verify import answers, drift, forget, influence, kept_rows
from leyline.verify.facts import facts
from leyline.verify.subject import Subject

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """only: names of measurements; all by default. quick: small sizes, to see that all works.
    sessions, calls: recorded sessions to weigh answers on, and at most so many calls of each."""

    only: tuple[str, ...] = ()
    quick: bool = False
    sessions: int = 3
    calls: int | None = None


@dataclass(slots=True)
class Verified:
    """Everything found out about a model. skipped: measurements that it has no use for; failed:
    those that came to nothing; each with the reason. seconds: of each measurement."""

    results: Results
    facts: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """Whether there was anything that could have failed."""
        return any(row.met is not None for row in self.results.rows)

    @property
    def passed(self) -> bool:
        held = all(row.met is not False for row in self.results.rows)
        return self.checked and held and not self.failed

    def as_json(self) -> dict[str, Any]:
        return {
            **self.results.as_json(),
            "facts": self.facts,
            "skipped": self.skipped,
            "failed": self.failed,
            "seconds": self.seconds,
            "checked": self.checked,
            "passed": self.passed,
        }


def run(
    subject: Subject, options: Options, say: Callable[[str, str], None] = lambda name, text: None
) -> Verified:
    """say: told the measurement and what it is at."""
    found = Verified(Results(subject.name, options.quick, machine()), facts(subject))
    for name in options.only or tuple(MEASUREMENTS):
        why = _pointless(name, subject)
        if why:
            found.skipped[name] = why
            continue
        began = time.monotonic()
        say(name, "")
        try:
            found.results.rows += MEASUREMENTS[name](subject, options, partial(say, name))
        except (RuntimeError, EngineError) as trouble:
            found.failed[name] = str(trouble)
        found.seconds[name] = round(time.monotonic() - began, 1)
    subject.engine.reset()
    return found


def _pointless(name: str, subject: Subject) -> str:
    if name == "drift" and subject.engine.layout.rope is None:
        return "nothing rotates in this model"
    if name == "answers" and not subject.speaks:
        return "needs a tokenizer with a chat template that takes tool outputs"
    return ""


def _rows(subject: Subject, options: Options, say: Say) -> list[Row]:
    return kept_rows.run(subject, 1 if options.quick else 4, say)


def _drift(subject: Subject, options: Options, say: Say) -> list[Row]:
    splices = drift.SPLICES[:7] if options.quick else drift.SPLICES
    return drift.run(subject, splices, say)


def _influence(subject: Subject, options: Options, say: Say) -> list[Row]:
    wanted, tries = (2, 8) if options.quick else (6, 12)
    return influence.run(subject, wanted, tries, say)


def _answers(subject: Subject, options: Options, say: Say) -> list[Row]:
    sessions, calls = (1, 6) if options.quick else (options.sessions, options.calls)
    return answers.run(subject, sessions, calls, say)


def _forget(subject: Subject, options: Options, say: Say) -> list[Row]:
    return forget.run(subject, 1 if options.quick else 5, say)


MEASUREMENTS: dict[str, Callable[[Subject, Options, Say], list[Row]]] = {
    "rows": _rows,
    "drift": _drift,
    "forget": _forget,
    "influence": _influence,
    "answers": _answers,
}
