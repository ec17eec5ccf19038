"""Influence: what a splice still knows of a span that is gone, and how a repair forgets it.

Prompts are searched on which the model clearly answers otherwise with the span than behind a fresh
prefill of the edited prompt. On each, whose side does the spliced cache take?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from leyline.bench.row import Row
from leyline.channel import Channel
from leyline.directive import Mode
from leyline.verify.look import logits, prefill, session_key
from leyline.verify.subject import Subject

SOURCE, START, SPAN, STUB = 640, 60, 120, 6
NEAR = 24
"""Tokens between a near span and the end."""

PHRASE = 8
CLEAR = 0.1
"""Nats by which both must prefer their own first token: less is within the noise of bf16."""
REPAIRS = (0, 16, 64, 256)
KINDS = ("as it was", "near", "phrase kept", "phrase new")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """source: with the span. target: edited. new: tokens at both ends that are not cached yet when
    the splice is made; the last token is computed in any case."""

    kind: str
    source: np.ndarray
    target: np.ndarray
    new: int

    @property
    def cached(self) -> np.ndarray:
        """What the session has cached when the edit comes."""
        return self.source[: len(self.source) - self.new]


@dataclass(slots=True)
class Sides:
    """Of one repair width, over the prompts of one kind: first tokens as with the full context, as
    with the edited prompt, as neither; and the divergence from both, in nats."""

    full: int = 0
    fresh: int = 0
    neither: int = 0
    from_full: list[float] = field(default_factory=list)
    from_fresh: list[float] = field(default_factory=list)

    @property
    def n(self) -> int:
        return self.full + self.fresh + self.neither


@dataclass(slots=True)
class Found:
    tried: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    apart: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """Divergence of the edited prompt from the full context on the prompts that were found."""

    sides: dict[str, dict[str, Sides]] = field(default_factory=dict)
    """By kind and repair width."""


def run(subject: Subject, wanted: int, tries: int, say: Callable[[str], None]) -> list[Row]:
    """wanted: prompts of each kind. tries: at most so many candidates of a kind."""
    found = Found()
    for kind in KINDS:
        for prompt in candidates(subject.text, kind, tries):
            n = len(found.apart[kind])
            if n == wanted:
                break
            say(f"{kind}: {n} of {wanted} prompts found in {found.tried[kind]}")
            found.tried[kind] += 1
            _try(subject, prompt, found)
    return [row for kind in KINDS for row in _rows(kind, found)]


def candidates(text: np.ndarray, kind: str, n: int) -> Iterator[Prompt]:
    """Pieces of the text in which a span is replaced. "as it was": nothing else. "near": the span
    is close to the end, where a small model still reads it. "phrase kept": the text ends with a
    phrase out of the span, so that a model that copies goes on as the span does; "phrase new":
    likewise, but the phrase comes after the edit."""
    rng = np.random.default_rng(1)
    start = SOURCE - NEAR - SPAN if kind == "near" else START
    for _ in range(n):
        at = int(rng.integers(0, len(text) - SOURCE))
        source = text[at : at + SOURCE].copy()
        if kind.startswith("phrase"):
            inside = START + int(rng.integers(20, SPAN - PHRASE - 20))
            source[-PHRASE:] = source[inside : inside + PHRASE]
        stub = rng.choice(text, STUB)
        target = np.concatenate([source[:start], stub, source[start + SPAN :]])
        yield Prompt(kind, source, target, PHRASE if kind == "phrase new" else 0)


def _try(subject: Subject, prompt: Prompt, found: Found) -> None:
    engine = subject.engine
    engine.reset()
    full = _first(subject, prompt.source)
    fresh = _first(subject, prompt.target)
    if min(preference(full, fresh), preference(fresh, full)) < CLEAR:
        return
    found.apart[prompt.kind].append(divergence(full, fresh))
    engine.reset()  # a session would take what a plain request has computed exactly
    everyone = len(prompt.target)
    for name, width in [*((str(w), w) for w in REPAIRS), ("all", everyone)]:
        spliced = _spliced(subject, prompt, width)
        sides = found.sides.setdefault(prompt.kind, {}).setdefault(name, Sides())
        first = spliced.argmax()
        sides.full += int(first == full.argmax())
        sides.fresh += int(first == fresh.argmax())
        sides.neither += int(first not in (full.argmax(), fresh.argmax()))
        sides.from_full.append(divergence(full, spliced))
        sides.from_fresh.append(divergence(fresh, spliced))


def _first(subject: Subject, prompt: np.ndarray) -> Tensor:
    """Log-probabilities of the first token, `[vocab]` fp64, behind an ordinary prefill."""
    prefill(subject.engine, prompt)
    return _log_probabilities(logits(subject.engine, prompt, len(prompt) - 1)[0])


def _spliced(subject: Subject, prompt: Prompt, repair: int) -> Tensor:
    """The same behind a splice. The source's rows stay for the next one: others use them too."""
    engine, session = subject.engine, f"repair {repair}"
    prefill(engine, prompt.cached)
    prefill(engine, prompt.cached, Channel(session))
    mode = Mode.REPAIR if repair else Mode.AMORTIZE
    prefill(engine, prompt.target, Channel(session, mode=mode, repair=repair))
    key = session_key(engine, session)
    first = _log_probabilities(logits(engine, key, len(key) - 1)[0])
    engine.drop_session("", session)
    return first


def _log_probabilities(said: Tensor) -> Tensor:
    """Of logits `[vocab]`, in fp64. Raises RuntimeError where they are no numbers: all would begin
    with the same token then."""
    if bool(said.isnan().any()):
        raise RuntimeError("the model's logits are no numbers (NaN): is this dtype right for it?")
    return said.double().log_softmax(-1)


def preference(of: Tensor, other: Tensor) -> float:
    """By how many nats one distribution prefers its first token to the other's; 0 if it is the
    same."""
    return float(of.max() - of[other.argmax()])


def divergence(of: Tensor, from_: Tensor) -> float:
    """KL(of || from_) in nats, of log-probabilities `[vocab]`."""
    return float((of.exp() * (of - from_)).sum())


def _rows(kind: str, found: Found) -> list[Row]:
    name = f"influence.{kind.replace(' ', '_')}"
    if not found.apart[kind]:
        what = f"prompts found on which the span decides ({kind}, {found.tried[kind]} searched)"
        return [Row(f"{name}.found", what, 0, unit="count")]
    sides = found.sides[kind]
    apart = found.apart[kind]
    about = f"{kind}, {len(apart)} of {found.tried[kind]} prompts searched"
    details = {
        "tried": found.tried[kind],
        "apart": apart,
        "sides": {
            width: {
                "full": s.full,
                "fresh": s.fresh,
                "neither": s.neither,
                "from_full": s.from_full,
                "from_fresh": s.from_fresh,
            }
            for width, s in sides.items()
        },
    }
    splice, all_ = sides["0"], sides["all"]
    return [
        Row(
            f"{name}.full",
            f"first token as with the span, splice ({about}; paper: always)",
            splice.full / splice.n,
            unit="share",
            details=details,
        ),
        Row(
            f"{name}.fresh",
            "first token as behind a fresh prefill, REPAIR(all): must be all",
            all_.fresh / all_.n,
            unit="share",
            at_least=1.0,
        ),
        Row(
            f"{name}.kl",
            "nats from the full context, splice / fresh prefill, medians",
            float(np.median(splice.from_full) / np.median(apart)),
        ),
    ]
