"""The request channel, engine-free: what a request asks for, and what became of it (design §5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from leyline.directive import Directive, Mode
from leyline.outline import Outline


class Fallback(StrEnum):
    """Why a directive was not spliced and its rows were prefilled instead (I6)."""

    SOURCE_MISSING = "source_missing"
    """Nothing is cached for that session: unknown name, expired, evicted, or another tenant's."""
    SOURCE_PARTLY_EVICTED = "source_partly_evicted"
    """Some rows that the plan keeps were evicted; the rest was spliced."""
    NO_ROOM = "no_room"
    """The source is in use elsewhere and there are not enough free slots for a copy."""
    UNSUPPORTED_FEATURE = "unsupported_feature"
    """The request uses something of the engine that a splice doesn't go with."""
    SWITCHED_OFF = "switched_off"
    """The engine runs without directives."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The `leyline` object of a request, checked.

    owner: the tenant; sessions of one owner are `source_missing` to all others.
    directives: explicit edits of the session's source; edits that lead on from there to the prompt
    are derived. None derives them all.
    scrub: with FORGET, zero every row that nobody uses afterwards.
    attention: say what each token of the prompt got of the model's attention.
    """

    session: str
    owner: str = ""
    mode: Mode = Mode.AMORTIZE
    repair: int = 0
    directives: tuple[Directive, ...] | None = None
    strict: bool = False
    scrub: bool = False
    attention: bool = False

    @property
    def user(self) -> tuple[str, str]:
        """The session's name inside the engine."""
        return (self.owner, self.session)

    @property
    def forgets(self) -> bool:
        """Whether anything in it asks for FORGET."""
        return Mode.FORGET in (self.mode, *(d.mode for d in self.directives or ()))


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
    outline: token by token, for those who look; of a session's request on the embedded engine.
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
    outline: Outline | None = field(default=None, compare=False, repr=False)

    @property
    def cached(self) -> int:
        """Prompt tokens that were not computed."""
        return self.shared + self.moved


class EngineError(Exception):
    """A request that the engine refuses. `reason` is one word, the message a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class StrictFallback(EngineError):
    """`strict` was set and a directive could not be spliced."""


def check_strict(channel: Channel, fallback: Fallback | None) -> None:
    """Raises StrictFallback for a fallback that the request doesn't put up with."""
    if channel.strict and fallback is not None:
        raise StrictFallback(
            fallback,
            f"strict: the request could not be spliced ({fallback}) and was not run; "
            "leave strict out to have it prefilled",
        )
