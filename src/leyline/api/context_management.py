"""Anthropic's `context_management`: which edits there are, and what they make of a conversation.

The client sends its whole history every time, so every call decides anew. To keep a session's
cached rows, what is cleared must stay cleared, with the same text. So the conversation is gone
through as it came about: wherever a request may have ended, behind each user message, the rules
look at what was left of the conversation then. What they clear of it depends on nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from leyline.api.clearable import Clearable, Message, ToolUse, emptied
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

    @model_validator(mode="after")
    def _check(self) -> ClearToolUses:
        which = self.clear_tool_inputs
        names = isinstance(which, list) and all(isinstance(name, str) for name in which)
        if not (which is None or isinstance(which, bool) or names):
            what = f"must be true, false or a list of tools' names, not {short(which)}."
            raise FieldError("clear_tool_inputs", what)
        return self

    def clears_input(self, tool: str) -> bool:
        which = self.clear_tool_inputs
        return tool in which if isinstance(which, list) else bool(which)


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
    clearable = Clearable(messages, count_tokens, head)
    turns, uses = _decide(rules, clearable)
    applied = []
    if turns and rules.thinking:
        freed = sum(clearable.turns[i].tokens for i in turns)
        applied.append(
            AppliedEdit(
                type=rules.thinking.type,
                cleared_thinking_turns=len(turns),
                cleared_input_tokens=freed,
            )
        )
    cleared = [clearable.uses[i] for i in sorted(uses)]
    if cleared and rules.tool_uses:
        freed = sum(_freed(rules.tool_uses, use) for use in cleared)
        applied.append(
            AppliedEdit(
                type=rules.tool_uses.type,
                cleared_tool_uses=len(cleared),
                cleared_input_tokens=max(0, freed),
            )
        )
    thoughtless = {m for i in turns for m in clearable.turns[i].messages}
    inputs = {
        use.call for use in cleared if rules.tool_uses and rules.tool_uses.clears_input(use.name)
    }
    results = {use.result for use in cleared}
    return Edited(emptied(messages, thoughtless, results, inputs), tuple(applied))


def _decide(rules: Rules, clearable: Clearable) -> tuple[set[int], set[int]]:
    """Which turns lose their thinking and which tool uses are cleared, by their numbers."""
    turns: set[int] = set()
    uses: set[int] = set()
    freed = 0
    for end in clearable.ends:
        if rules.thinking is not None and rules.thinking.turns is not None:
            had = [i for i, turn in enumerate(clearable.turns) if turn.start < end]
            turns.update(had[: -rules.thinking.turns])
        if rules.tool_uses is None:
            continue
        done = [i for i, use in enumerate(clearable.uses) if use.result[0] < end]
        left = sum(i not in uses for i in done)
        if rules.tool_uses.trigger.type == "tool_uses":
            size = left
        else:
            size = clearable.tokens(end) - freed - sum(clearable.turns[i].tokens for i in turns)
        if size > rules.tool_uses.trigger.value:
            more = _clear_now(rules.tool_uses, clearable.uses, done, uses)
            uses |= more
            freed += sum(_freed(rules.tool_uses, clearable.uses[i]) for i in more)
    return turns, uses


def _clear_now(
    rule: ClearToolUses, uses: Sequence[ToolUse], done: list[int], cleared: set[int]
) -> set[int]:
    """The numbers of the uses to clear besides `cleared`, once the trigger is reached."""
    old = done[: max(0, len(done) - rule.keep.value)]
    excluded = rule.exclude_tools or ()
    more = {i for i in old if i not in cleared and uses[i].name not in excluded}
    least = rule.clear_at_least.value if rule.clear_at_least else 0
    return more if sum(_freed(rule, uses[i]) for i in more) >= least else set()


def _freed(rule: ClearToolUses, use: ToolUse) -> int:
    return use.result_tokens + (use.input_tokens if rule.clears_input(use.name) else 0)
