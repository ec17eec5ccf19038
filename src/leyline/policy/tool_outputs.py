"""`clear_tool_outputs`: old results of tools give way to a few words."""

from __future__ import annotations

from collections.abc import Sequence

from leyline.policy.base import policy
from leyline.policy.edits import clear_inputs, put_outputs
from leyline.policy.look import Look, content_of, content_text, is_text, output_of
from leyline.policy.options import NAMES, TEXT, YES_NO_NAMES, maybe, one_of, whole
from leyline.policy.turns import Message, Place, Use

PLACEHOLDER = "[evicted: old tool output]"
MANY = "[evicted: {n} old tool outputs]"
REST = "[evicted]"
INPUT = "[evicted]"


@policy(
    keep=(whole(0), "how many of the newest stay"),
    by=(one_of("outputs", "turns"), "what `keep` counts: results, or assistant's turns with any"),
    placeholder=(maybe(TEXT), "what stands for each; null: Leyline's words, with the number"),
    exclude=(NAMES, "tools whose results always stay, and don't count"),
    trigger_tokens=(maybe(whole(0)), "clear only when the conversation has more tokens than this"),
    trigger_uses=(maybe(whole(0)), "clear only when more results than this are not cleared yet"),
    at_least=(whole(0), "clear only if that frees so many tokens"),
    inputs=(YES_NO_NAMES, "clear the arguments of these calls too: of all, or of some tools"),
)
def clear_tool_outputs(
    messages: list[Message],
    look: Look,
    *,
    keep: int = 2,
    by: str = "outputs",
    placeholder: str | None = None,
    exclude: Sequence[str] = (),
    trigger_tokens: int | None = None,
    trigger_uses: int | None = None,
    at_least: int = 0,
    inputs: bool | Sequence[str] = False,
) -> list[Message]:
    """Replace all but the newest `keep` tool outputs; either trigger, if there are any, is enough.
    A text no longer than what would stand for it stays, unless its call's arguments are to go.

    Leyline's own words are `[evicted: 3 old tool outputs]` at the first of three that one decision
    cleared and `[evicted]` at the others. A decision is never made anew, so its number stays; a
    count of all that is gone would change with each, and with it the tokens behind.
    """
    turns = [
        [use for use in unit.uses if use.result is not None and use.name not in exclude]
        for unit in look.units(messages)
        if unit.uses
    ]
    groups = [turn for turn in turns if turn]
    if by == "outputs":
        groups = [[use] for turn in groups for use in turn]
    every = [use for group in groups for use in group]
    loses_input = {
        id(use)
        for use in every
        if use.call is not None and (inputs is True or (inputs and use.name in inputs))
    }
    live = [
        use
        for use in every
        if not _is_clear(messages, use, look)
        and (id(use) in loses_input or not _is_short(messages, use, placeholder))
    ]
    new = {id(use) for group in groups[max(0, len(groups) - keep) :] for use in group}
    old = [use for use in live if id(use) not in new]
    if not old or not _fires(messages, look, len(live), trigger_tokens, trigger_uses):
        return messages
    words = {
        use.result: _words(placeholder, i, len(old))
        for i, use in enumerate(old)
        if use.result is not None
    }
    inputs_of = [use.call for use in old if use.call is not None and id(use) in loses_input]
    return _cleared(messages, look, words, inputs_of, at_least)


def _cleared(
    messages: list[Message],
    look: Look,
    words: dict[Place, str],
    inputs_of: list[Place],
    at_least: int,
) -> list[Message]:
    """With these words for results, and no arguments for these calls; or as they were, if that
    frees too little. Such an attempt is made at each call, so it must leave nothing behind."""
    changed = sorted({place.message for place in [*words, *inputs_of]})
    before = look.tokens([messages[i] for i in changed])
    if before < at_least:
        return messages
    edited = put_outputs(messages, words, look)
    edited = clear_inputs(edited, inputs_of, INPUT, look)
    new = [edited[i] for i in changed]
    if at_least and before - look.tokens(new) < at_least:
        look.forget(new)
        return messages
    return edited


def _is_clear(messages: Sequence[Message], use: Use, look: Look) -> bool:
    assert use.result is not None
    return look.is_evicted(output_of(messages, use.result))


def _is_short(messages: Sequence[Message], use: Use, placeholder: str | None) -> bool:
    assert use.result is not None
    content = content_of(messages, use.result)
    if isinstance(content, list) and not all(map(is_text, content)):
        return False  # a picture, say
    words = MANY if placeholder is None else placeholder  # as long as with a number of 3 digits
    return len(content_text(content)) <= len(words)


def _words(placeholder: str | None, i: int, n: int) -> str:
    if placeholder is not None:
        return placeholder
    if n == 1:
        return PLACEHOLDER
    return REST if i else MANY.format(n=n)


def _fires(
    messages: Sequence[Message], look: Look, live: int, tokens: int | None, uses: int | None
) -> bool:
    if tokens is None and uses is None:
        return True
    if uses is not None and live > uses:
        return True
    return tokens is not None and look.tokens(messages) > tokens
