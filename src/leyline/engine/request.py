"""What comes into the engine and what goes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from leyline.channel import Channel, EngineError, Report


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
class Request:
    """A prompt to continue.

    prompt: token ids, int64 `[n]`, n >= 1; None only with explicit directives: then the prompt is
    what they make of the session's source.
    """

    prompt: np.ndarray | None
    sampling: Sampling = field(default_factory=Sampling)
    channel: Channel | None = None


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
    """The end of an answer. reason: "stop", "length" or "abort". attention: if the channel asks for
    it, the part that each token of the prompt got of an average query's, fp64 `[prompt]`."""

    reason: str
    report: Report
    completion_tokens: int
    stopped_by: str | None = None
    attention: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without an answer; `error` is an EngineError or a DirectiveError."""

    error: Exception


Event = Started | Delta | Done | Failed


class PromptTooLong(EngineError):
    """More tokens than the model or the slots can hold."""


class QueueFull(EngineError):
    """Too many requests are waiting."""
