"""The `leyline` object: in a request, and as a report in its answer (design §5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from leyline.api.errors import FieldError, parse
from leyline.channel import Channel, Report
from leyline.directive import Directive, Mode, check_mode, parse_directive
from leyline.policy.base import Applied
from leyline.policy.errors import short

MAX_NAME = 256
MAX_DIRECTIVES = 10_000


class EditOptions(BaseModel):
    """What to edit, and how."""

    model_config = ConfigDict(strict=True, extra="forbid")

    mode: Any = Mode.AMORTIZE
    repair: Any = 0
    directives: Any = None
    policy: Any = None
    strict: bool = False
    scrub: bool = False
    _directives: tuple[Directive, ...] | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check(self) -> EditOptions:
        if self.mode == Mode.REPAIR and "repair" not in self.model_fields_set:
            raise FieldError(
                "repair", "is missing; mode repair needs the number of tokens to recompute."
            )
        self.mode, self.repair = check_mode(self.mode, self.repair)
        self._directives = _directives(self.directives)
        modes = [self.mode, *(d.mode for d in self._directives or ())]
        if self.scrub and Mode.FORGET not in modes:
            raise FieldError("scrub", "true goes with mode forget only, here or on a directive.")
        return self

    @property
    def edits(self) -> tuple[Directive, ...] | None:
        """Explicit directives, with plain types; None derives all edits."""
        return self._directives

    def channel(self, session: str, owner: str) -> Channel:
        """What is asked for, as an engine takes it."""
        return Channel(
            session=session,
            owner=owner,
            mode=self.mode,
            repair=self.repair,
            directives=self.edits,
            strict=self.strict,
            scrub=self.scrub,
        )


class LeylineObject(EditOptions):
    """The `leyline` object of a request. attention: say what each message got of the model's."""

    session: str
    attention: bool = False

    @model_validator(mode="after")
    def _check_session(self) -> LeylineObject:
        check_session(self.session)
        return self

    def channel(self, session: str, owner: str) -> Channel:
        return replace(super().channel(session, owner), attention=self.attention)


def parse_leyline(obj: object) -> LeylineObject:
    """The object from untrusted data. Raises FieldError whose field begins with `leyline`."""
    return parse(LeylineObject, obj, "leyline")


def check_session(name: str, field: str = "session") -> str:
    """A session's name: data, never a path. Raises FieldError."""
    if not name:
        raise FieldError(field, f"must have 1 to {MAX_NAME} characters, not none.")
    if len(name) > MAX_NAME:
        raise FieldError(field, f"must have 1 to {MAX_NAME} characters, not {len(name)}.")
    if not name.isprintable():
        raise FieldError(field, f"must have printable characters only, unlike {short(name)}.")
    return name


def _directives(given: object) -> tuple[Directive, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list):
        raise FieldError("directives", f"must be a list, not {short(given)}.")
    if len(given) > MAX_DIRECTIVES:
        raise FieldError("directives", f"may be up to {MAX_DIRECTIVES}, not {len(given)}.")
    return tuple(parse_directive(each, f"directives[{i}]") for i, each in enumerate(given))


class EditReport(BaseModel):
    """One edit, in the source's positions."""

    start: int
    end: int
    replacement_tokens: int
    shift: int
    mode: Mode


class TokenReport(BaseModel):
    """Where the prompt's rows came from: `prompt = shared + moved + computed`."""

    prompt: int
    shared: int
    moved: int
    computed: int


class PolicyReport(BaseModel):
    """What one policy did to the messages. tokens: freed. tool_uses: calls whose result was cleared
    or dropped. thinking_turns: messages that lost their reasoning. messages: dropped."""

    name: str
    tokens: int
    tool_uses: int
    thinking_turns: int
    messages: int

    @classmethod
    def of(cls, applied: Applied) -> PolicyReport:
        return cls(
            name=applied.policy,
            tokens=applied.tokens,
            tool_uses=applied.tool_uses,
            thinking_turns=applied.thinking_turns,
            messages=applied.messages,
        )


class LeylineReport(BaseModel):
    """The `leyline` object of an answer. policy: what each did, in the order asked for.

    copied: kept rows were copied, as others use the source too; else they were moved.
    forgotten, kept_by_others: with mode forget, rows dropped, and rows that others go on using.
    attention: if asked for, of each message as given the part of an average query's attention that
    went to it, null for one that a policy dropped; of each token where the prompt is no chat.
    """

    session: str
    edits: list[EditReport]
    tokens: TokenReport
    fallback: str | None
    splice_ms: float
    copied: bool
    forgotten: int = 0
    kept_by_others: int = 0
    policy: list[PolicyReport] = []
    attention: list[float | None] | None = None

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without `attention` where nobody asked."""
        written = write(self)
        if self.attention is None:
            del written["attention"]
        return written

    @classmethod
    def of(
        cls,
        report: Report,
        applied: Sequence[Applied] = (),
        attention: list[float | None] | None = None,
    ) -> LeylineReport | None:
        """An engine's report, and what policies did before; None without a session."""
        if report.session is None:
            return None
        return cls(
            session=report.session,
            edits=[EditReport(**asdict(edit)) for edit in report.edits],
            tokens=TokenReport(
                prompt=report.prompt,
                shared=report.shared,
                moved=report.moved,
                computed=report.computed,
            ),
            fallback=None if report.fallback is None else str(report.fallback),
            splice_ms=round(report.splice_ms, 3),
            copied=report.copied,
            forgotten=report.forgotten,
            kept_by_others=report.kept_by_others,
            policy=[PolicyReport.of(each) for each in applied],
            attention=attention,
        )
