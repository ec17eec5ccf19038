"""Policies on a conversation, so that what they do to a beginning of it never changes later.

An agent sends its whole history with every call, and it is edited anew. So the calls that it made
before are gone through again: the view grows message by message, and at each point where the model
was asked, each policy edits what the ones before it left then. What a policy took away is gone from
the view, so later points can't bring it back, and decisions by token counts are those of back then.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leyline.policy.errors import PolicyError, short
from leyline.policy.look import Count, Look, common, estimate, has_thoughts, output_of
from leyline.policy.options import Kind, Option, check
from leyline.policy.turns import Message, Place, facts_of, is_prompt, tool_calls

MOST_PIECES = 4000
"""Messages, or their parts and calls where they have more than one. They are gone through at each
past call, so twice as many take four times as long."""

Rule = Callable[..., list[Message]]
"""`rule(messages, look, **options)`: the messages that remain, edited through `look`. It is asked
again at every call with what it left then, so it must leave its own edits alone."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What one policy did. tool_uses: calls whose result was cleared or dropped. thinking_turns:
    messages that lost their reasoning. messages: dropped. tokens: freed, by the counter given."""

    policy: str
    tool_uses: int = 0
    thinking_turns: int = 0
    messages: int = 0
    tokens: int = 0

    def __add__(self, other: Applied) -> Applied:
        return Applied(
            self.policy,
            self.tool_uses + other.tool_uses,
            self.thinking_turns + other.thinking_turns,
            self.messages + other.messages,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True, slots=True)
class Edited:
    """A conversation as it is sent. applied: one for each policy, in the order they were given.
    origins: of each message its place among those given, None for one that a policy added."""

    messages: list[Message]
    applied: tuple[Applied, ...]
    origins: tuple[int | None, ...]

    @classmethod
    def nothing(cls, messages: list[Message]) -> Edited:
        """All messages as they were given."""
        return cls(messages, (), tuple(range(len(messages))))

    @property
    def tokens(self) -> int:
        """Tokens freed by all of them."""
        return sum(each.tokens for each in self.applied)


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule by its name. looks_back: asked at each past call too, so that its decisions are kept;
    else once, at the end."""

    name: str
    rule: Rule
    options: tuple[Option, ...] = ()
    looks_back: bool = True

    def check(self, options: Mapping[str, Any], where: str = "policy") -> None:
        """Raises PolicyError for options that can't be; `where` begins its field."""
        check(options, self.options, self.name, where)

    def __call__(
        self, messages: Sequence[Message], *, count: Count = estimate, **options: Any
    ) -> list[Message]:
        """The messages as this policy alone leaves them. Raises PolicyError."""
        self.check(options)
        return fold([Step(self, options, "policy")], messages, count).messages


class Step(NamedTuple):
    """A policy and its checked options. where: what the field of an error begins with."""

    policy: Policy
    options: Mapping[str, Any]
    where: str


def fold(steps: Sequence[Step], messages: Sequence[Message], count: Count) -> Edited:
    """Go through the conversation and let the policies edit it, in order, whenever the model was
    asked. Raises PolicyError; the messages are not changed."""
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise PolicyError(f"messages[{i}]", f"must be an object, not {short(message)}.")
    if steps:
        _check_size(messages)
    placeholders = [step.options.get("placeholder") for step in steps]
    look = Look(count, [each for each in placeholders if isinstance(each, str)])
    applied = [Applied(step.policy.name) for step in steps]
    view: list[Message] = []
    points = is_prompt([facts_of(message) for message in messages])
    for message, point in zip(messages, points, strict=True):
        view.append(look.take(message))
        if point:
            view = _edit(view, look, steps, applied, looks_back=True)
    view = _edit(view, look, steps, applied, looks_back=False)
    return Edited(view, tuple(applied), tuple(map(look.origin, view)))


def policy(
    looks_back: bool = True, **kinds: tuple[Kind, str]
) -> Callable[[Callable[..., list[Message]]], Policy]:
    """Makes a Policy of a rule: it has the rule's name, and the options that are given with their
    kinds and uses; defaults are the rule's."""

    def made(rule: Callable[..., list[Message]]) -> Policy:
        parameters = inspect.signature(rule).parameters
        options = []
        for name, (kind, what) in kinds.items():
            default = parameters[name].default
            missing = default is inspect.Parameter.empty
            options.append(Option(name, kind, what, None if missing else default, missing))
        return Policy(rule.__name__, rule, tuple(options), looks_back)

    return made


def own(name: str, function: Callable[..., list[Message]]) -> Policy:
    """A policy of one's own: `function(messages, **options)`; what its options may be, it checks
    itself. Where it gives as many messages as it got, those are the same ones, edited."""
    anything = Kind("anything", lambda value: True)
    options = tuple(
        Option(
            each.name,
            anything,
            "the policy can't do without",
            None if each.default is each.empty else each.default,
            each.default is each.empty,
        )
        for each in list(inspect.signature(function).parameters.values())[1:]
        if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)
    )

    def rule(messages: list[Message], look: Look, **given: Any) -> list[Message]:
        edited = function(messages, **given)
        if len(edited) == len(messages):
            left = set(map(id, edited))
            for old, new in zip(messages, edited, strict=True):
                if id(old) not in left and look.origin(new) is None:
                    look.follow(new, old)
        return edited

    return Policy(name, rule, options)


def _check_size(messages: Sequence[Message]) -> None:
    """Raises PolicyError for more than can be gone through again and again."""
    n = sum(map(_pieces, messages))
    if n > MOST_PIECES:
        most = f"may be up to {MOST_PIECES:,} for a policy, parts and tool calls counted"
        raise PolicyError("messages", f"{most}, not {n:,}.")


def _pieces(message: Message) -> int:
    """How many calls and parts it has, those in results too; 1 for plain text."""
    lists = [tool_calls(message), message.get("content")]
    if isinstance(lists[1], list):
        lists += [part.get("content") for part in lists[1] if isinstance(part, dict)]
    return max(1, sum(len(each) for each in lists if isinstance(each, list)))


def _edit(
    view: list[Message],
    look: Look,
    steps: Sequence[Step],
    applied: list[Applied],
    looks_back: bool,
) -> list[Message]:
    for i, (each, options, where) in enumerate(steps):
        if each.looks_back != looks_back:
            continue
        try:
            new = each.rule(view, look, **options)
        except PolicyError as error:
            raise PolicyError(f"{where}.{error.field}", error.message) from error
        same = common(view, new)
        if same < max(len(view), len(new)):
            applied[i] += _difference(each.name, view[same:], new[same:], look)
            view = new
    return view


def _difference(name: str, old: list[Message], new: list[Message], look: Look) -> Applied:
    before, after = {id(each) for each in old}, {id(each) for each in new}
    gone = [each for each in old if id(each) not in after]
    come = [each for each in new if id(each) not in before]
    return Applied(
        name,
        tool_uses=(_outputs(gone, look) - _outputs(come, look)).total(),
        thinking_turns=_thoughtful(gone, look) - _thoughtful(come, look),
        messages=len(old) - len(new),
        tokens=look.tokens(gone) - look.tokens(come),
    )


def _thoughtful(messages: Sequence[Message], look: Look) -> int:
    return sum(has_thoughts(message, look) for message in messages)


def _outputs(messages: Sequence[Message], look: Look) -> Counter[str]:
    return Counter(
        output_of([message], Place(0, result.part))
        for message in messages
        for result in look.facts(message).results
    )
