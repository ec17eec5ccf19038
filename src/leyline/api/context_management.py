"""Anthropic's `context_management`: which edits there are, and what they make of a conversation.

The client sends its whole history every time, so every call decides anew. To keep a session's
cached rows, what is cleared must stay cleared, with the same text. So the conversation is gone
through as it came about: wherever a request may have ended, behind each message but the
assistant's, the rules look at what was left of the conversation then. What they clear of it depends
on nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from leyline.api.clearable import Clearable, Message, ToolUse, Turn, emptied
from leyline.api.errors import FieldError, parse
from leyline.api.openai_answers import Wire
from leyline.policy.errors import short

FIELD = "context_management"
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Trigger(_Strict):
    """Clearing begins above it."""

    type: Literal["input_tokens", "tool_uses"]
    value: Positive


class Kept(_Strict):
    """How many tool uses stay."""

    type: Literal["tool_uses"]
    value: Whole


class AtLeast(_Strict):
    """Tokens that clearing must be worth."""

    type: Literal["input_tokens"]
    value: Whole


class KeptThinking(_Strict):
    """How many turns keep their thinking; no value for all."""

    type: Literal["thinking_turns", "all"]
    value: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> KeptThinking:
        if self.type == "thinking_turns" and self.value is None:
            raise FieldError("value", "is missing.", "missing_required_parameter")
        return self


class ClearToolUses(_Strict):
    """Results of old tool uses become a placeholder, and their inputs empty if asked for.

    trigger: begins once the prompt has more tokens, or more results are left, than this.
    keep: so many of the newest uses. clear_at_least: tokens; less is not worth it, then nothing is
    cleared yet. clear_tool_inputs: true for all tools, or their names.
    """

    type: Literal["clear_tool_uses_20250919"]
    trigger: Trigger = Trigger(type="input_tokens", value=100_000)
    keep: Kept = Kept(type="tool_uses", value=3)
    clear_at_least: AtLeast | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: Any = None
    _excluded: frozenset[str] = PrivateAttr(frozenset())
    _with_inputs: frozenset[str] = PrivateAttr(frozenset())

    @model_validator(mode="after")
    def _check(self) -> ClearToolUses:
        which = self.clear_tool_inputs
        names = isinstance(which, list) and all(isinstance(name, str) for name in which)
        if not (which is None or isinstance(which, bool) or names):
            what = f"must be true, false or a list of tools' names, not {short(which)}."
            raise FieldError("clear_tool_inputs", what)
        self._excluded = frozenset(self.exclude_tools or ())
        self._with_inputs = frozenset(which if isinstance(which, list) else ())
        return self

    def excludes(self, tool: str) -> bool:
        return tool in self._excluded

    def clears_input(self, tool: str) -> bool:
        return self.clear_tool_inputs is True or tool in self._with_inputs

    def frees(self, use: ToolUse) -> int:
        """Tokens that are saved by clearing it."""
        inputs = use.input_tokens if self.clears_input(use.name) else 0
        return use.result_tokens + inputs


class ClearThinking(_Strict):
    """Thinking goes, but for the newest turns that have some.

    A turn is all that the assistant says and does up to the next message of the user that is more
    than tool results.
    """

    type: Literal["clear_thinking_20251015"]
    keep: KeptThinking = KeptThinking(type="thinking_turns", value=1)

    @field_validator("keep", mode="before")
    @classmethod
    def _all(cls, keep: object) -> object:
        return {"type": "all"} if keep == "all" else keep

    @property
    def turns(self) -> int | None:
        """How many turns keep their thinking; None for all."""
        return self.keep.value if self.keep.type == "thinking_turns" else None


class _Config(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    edits: list[Any] = []


@dataclass(frozen=True, slots=True)
class Rules:
    """What a request asks for; None for a rule that it doesn't."""

    thinking: ClearThinking | None = None
    tool_uses: ClearToolUses | None = None


class AppliedEdit(Wire):
    """What one rule came to. Of the two counts there is the rule's own."""

    optional = ("cleared_tool_uses", "cleared_thinking_turns")

    type: str
    cleared_tool_uses: int | None = None
    cleared_thinking_turns: int | None = None
    cleared_input_tokens: int


@dataclass(frozen=True, slots=True)
class Edited:
    """The conversation to prompt with, and an entry for each rule that cleared something."""

    messages: list[Message]
    applied: tuple[AppliedEdit, ...] = ()


def parse_context_management(obj: object, field: str = FIELD) -> Rules:
    """The object from untrusted data. Raises FieldError."""
    thinking: ClearThinking | None = None
    tool_uses: ClearToolUses | None = None
    for i, edit in enumerate(parse(_Config, obj, field).edits):
        where = f"{field}.edits[{i}]"
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind == "clear_thinking_20251015":
            if tool_uses is not None:
                raise FieldError(where, f"{kind} must stand before clear_tool_uses_20250919.")
            thinking = _only(thinking, parse(ClearThinking, edit, where), where)
        elif kind == "clear_tool_uses_20250919" or not isinstance(edit, dict):
            tool_uses = _only(tool_uses, parse(ClearToolUses, edit, where), where)
        else:
            there_are = "clear_thinking_20251015 and clear_tool_uses_20250919"
            raise FieldError(f"{where}.type", f"there are {there_are}, not {short(kind)}.")
    return Rules(thinking, tool_uses)


R = TypeVar("R")


def _only(before: R | None, rule: R, where: str) -> R:
    if before is not None:
        raise FieldError(where, "is there twice.")
    return rule


def apply(
    rules: Rules,
    messages: Sequence[Message],
    count_tokens: Callable[[str], int],
    head: int = 0,
) -> Edited:
    """The conversation as `rules` leave it. The input isn't changed, and shared where it stays.

    messages: Anthropic's, checked. count_tokens: of a text. head: tokens of what the prompt has in
    front, the system prompt and the tools. A prompt's tokens are counted as head, the texts' and a
    few for each message, which is close to what a chat template makes of it.
    """
    fold = _Fold(rules, Clearable(messages, count_tokens, head))
    for end in fold.clearable.ends:
        fold.forget_thinking(end)
        fold.clear_tool_uses(end)
    uses, rule = fold.cleared, rules.tool_uses
    thoughtless = {m for turn in fold.thoughtless for m in turn.messages}
    inputs = {use.call for use in uses if rule and rule.clears_input(use.name)}
    edited = emptied(messages, thoughtless, {use.result for use in uses}, inputs)
    return Edited(edited, fold.applied())


class _Fold:
    """Goes through a conversation as it came about, and remembers what is cleared.

    Linear in the conversation, whatever the rules: strangers send both.
    """

    def __init__(self, rules: Rules, clearable: Clearable) -> None:
        self.rules = rules
        self.clearable = clearable
        self.cleared: list[ToolUse] = []
        self._freed_thinking = 0
        self._freed = 0
        self._turns = 0  # so many have begun
        self._old_turns = 0
        self._done = 0  # so many tool uses have their results
        self._old = 0
        self._waiting: list[ToolUse] = []  # old, but not cleared yet
        self._to_free = 0  # what clearing them would free

    @property
    def thoughtless(self) -> list[Turn]:
        """The turns without their thinking."""
        return self.clearable.turns[: self._old_turns]

    def forget_thinking(self, end: int) -> None:
        """As a request does that has the first `end` messages."""
        rule, turns = self.rules.thinking, self.clearable.turns
        if rule is None or rule.turns is None:
            return
        while self._turns < len(turns) and turns[self._turns].start < end:
            self._turns += 1
        while self._old_turns < self._turns - rule.turns:
            self._freed_thinking += turns[self._old_turns].tokens
            self._old_turns += 1

    def clear_tool_uses(self, end: int) -> None:
        """As a request does that has the first `end` messages."""
        rule, uses = self.rules.tool_uses, self.clearable.uses
        if rule is None:
            return
        while self._done < len(uses) and uses[self._done].result[0] < end:
            self._done += 1
        while self._old < self._done - rule.keep.value:
            if not rule.excludes(uses[self._old].name):
                self._waiting.append(uses[self._old])
                self._to_free += rule.frees(uses[self._old])
            self._old += 1
        if not self._waiting or self._size(rule, end) <= rule.trigger.value:
            return
        if rule.clear_at_least is None or self._to_free >= rule.clear_at_least.value:
            self.cleared += self._waiting
            self._freed += self._to_free
            self._waiting, self._to_free = [], 0

    def applied(self) -> tuple[AppliedEdit, ...]:
        """What the rules came to."""
        applied = []
        if self._old_turns and self.rules.thinking:
            applied.append(
                AppliedEdit(
                    type=self.rules.thinking.type,
                    cleared_thinking_turns=self._old_turns,
                    cleared_input_tokens=self._freed_thinking,
                )
            )
        if self.cleared and self.rules.tool_uses:
            applied.append(
                AppliedEdit(
                    type=self.rules.tool_uses.type,
                    cleared_tool_uses=len(self.cleared),
                    cleared_input_tokens=max(0, self._freed),
                )
            )
        return tuple(applied)

    def _size(self, rule: ClearToolUses, end: int) -> int:
        """What the trigger looks at."""
        if rule.trigger.type == "tool_uses":
            return self._done - len(self.cleared)
        return self.clearable.tokens(end) - self._freed_thinking - self._freed
