"""`keep_window`: the beginning and the newest messages stay."""

from __future__ import annotations

from leyline.policy.base import policy
from leyline.policy.look import Look
from leyline.policy.options import whole
from leyline.policy.turns import Message, closed, opening


@policy(
    newest=(whole(0), "tokens at the end that stay"),
    first=(whole(0), "tokens at the beginning that stay"),
)
def keep_window(
    messages: list[Message], look: Look, *, newest: int, first: int = 0
) -> list[Message]:
    """Drop what lies between the first `first` and the newest `newest` tokens, in whole messages.

    A call stays with its results. What stands before the assistant's first message always stays,
    and so does the newest step; of an exchange that stays in part, the user's words and the answer.
    """
    units = look.units(messages)
    sizes = [look.tokens(messages[unit.start : unit.end]) for unit in units]
    head, total = opening(units), 0
    for i, size in enumerate(sizes):
        total += size
        if total > first:
            break
        head = max(head, i + 1)
    tail, total = len(units), 0
    while tail > 0 and (tail == len(units) or total + sizes[tail - 1] <= newest):
        tail -= 1
        total += sizes[tail]
    keep = closed(units, {*range(head), *range(tail, len(units))})
    if len(keep) == len(units):
        return messages
    kept = [units[i] for i in sorted(keep)]
    return [message for unit in kept for message in messages[unit.start : unit.end]]
