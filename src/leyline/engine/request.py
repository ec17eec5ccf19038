"""What comes into the engine and what goes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from leyline.directive import Directive, Mode


class Fallback(StrEnum):
    """Why a directive was not spliced and its rows were prefilled instead (I6)."""

    SOURCE_MISSING = "source_missing"
    """Nothing is cached for that session: unknown name, expired, evicted, or another tenant's."""
    SOURCE_PARTLY_EVICTED = "source_partly_evicted"
    """Some rows that the plan keeps were evicted; the rest was spliced."""
    NO_ROOM = "no_room"
    """The source is in use elsewhere and there are not enough free slots for a copy."""
    SWITCHED_OFF = "switched_off"
    """The engine runs without directives."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the answer is drawn.

    max_tokens: at most so many; None for as many as fit, 0 to prefill only.
    temperature 0 is greedy. top_k 0 and top_p 1 keep the whole vocabulary.
    logprobs: None for none, else how many alternatives beside the chosen token.
    forced: a recorded answer, taken instead of drawing one. Its rows are computed in one go, all
    but the last token's, so that the cache is as if the model had answered so.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    forced: tuple[int, ...] | None = None

    @property
    def length(self) -> int | None:
        """Tokens that the answer may take; None for as many as fit."""
        return self.max_tokens if self.forced is None else len(self.forced)

    def check(self, vocab_size: int) -> None:
        """Raises EngineError, naming the field, for what can't be drawn."""
        ok = {
            "max_tokens": self.max_tokens is None or self.max_tokens >= 0,
            "temperature": 0 <= self.temperature < float("inf"),
            "top_p": 0 <= self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "seed": self.seed is None or -(2**63) <= self.seed < 2**63,
            "stop": all(self.stop),
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= vocab_size,
            "forced": self.forced is None
            or (len(self.forced) > 0 and all(0 <= token < vocab_size for token in self.forced)),
        }
        for name, fine in ok.items():
            if not fine:
                value = getattr(self, name)
                raise EngineError("bad_sampling", f"{name}: {value!r} is out of range")


@dataclass(frozen=True, slots=True)
class Channel:
    """The `leyline` object of a request, checked.

    owner: the tenant; sessions of one owner are `source_missing` to all others.
    directives: explicit edits of the session's source; edits that lead on from there to the prompt
    are derived. None derives them all.
    scrub: with FORGET, zero every row that nobody uses afterwards.
    """

    session: str
    owner: str = ""
    mode: Mode = Mode.AMORTIZE
    repair: int = 0
    directives: tuple[Directive, ...] | None = None
    strict: bool = False
    scrub: bool = False

    @property
    def user(self) -> tuple[str, str]:
        """The session's name inside the engine."""
        return (self.owner, self.session)

    @property
    def forgets(self) -> bool:
        """Whether anything in it asks for FORGET."""
        return Mode.FORGET in (self.mode, *(d.mode for d in self.directives or ()))


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    prompt: token ids, int64 `[n]`, n >= 1; None only with explicit directives: then the prompt is
    what they make of the session's source.
    """

    prompt: np.ndarray | None
    sampling: Sampling = field(default_factory=Sampling)
    channel: Channel | None = None


@dataclass(frozen=True, slots=True)
class EditReport:
    """An edit with kept rows behind it; where the request forgets, any. mode: as executed."""

    start: int
    end: int
    replacement_tokens: int
    shift: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a prompt: its tokens add up, `prompt = shared + moved + computed`.

    copied: the kept rows were copied, as somebody else uses the source; else they were moved.
    forgotten, kept_by_others: with FORGET, rows dropped, and rows that stay for others.
    """

    prompt: int
    shared: int
    moved: int
    computed: int
    session: str | None = None
    edits: tuple[EditReport, ...] = ()
    copied: bool = False
    fallback: Fallback | None = None
    splice_ms: float = 0.0
    forgotten: int = 0
    kept_by_others: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.shared + self.moved


@dataclass(frozen=True, slots=True)
class Logprob:
    """A chosen token's log-probability and the most likely alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted: rows are spliced, prefill begins."""

    report: Report


@dataclass(frozen=True, slots=True)
class Delta:
    """Some more of the answer. `text` can be empty while a character or a stop string is open."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """The end of an answer. reason: "stop", "length" or "abort"."""

    reason: str
    report: Report
    completion_tokens: int
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer; `error` is an EngineError or a DirectiveError."""

    error: Exception


Event = Started | Delta | Done | Failed


class EngineError(Exception):
    """A request that the engine refuses. `reason` is one word, the message a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class PromptTooLong(EngineError):
    """More tokens than the model or the slots can hold."""


class QueueFull(EngineError):
    """Too many requests are waiting."""


class StrictFallback(EngineError):
    """`strict` was set and a directive could not be spliced."""
