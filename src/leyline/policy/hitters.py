"""`heavy_hitters`: what the model attends to stays."""

from __future__ import annotations

from collections.abc import Sequence

from leyline.policy.base import policy
from leyline.policy.errors import PolicyError
from leyline.policy.look import Look
from leyline.policy.options import MASSES, whole
from leyline.policy.turns import Message, Unit, closed, opening


@policy(
    looks_back=False,  # what the model attended to back then is not known
    mass=(MASSES, "attention that each message given got, as a list; null for one dropped before"),
    budget=(whole(0), "tokens that stay, apart from the beginning and the newest"),
    newest=(whole(0), "tokens at the end that stay whatever they got"),
)
def heavy_hitters(
    messages: list[Message],
    look: Look,
    *,
    mass: Sequence[float | None],
    budget: int,
    newest: int = 0,
) -> list[Message]:
    """Keep the steps with the most attention for each of their tokens, `budget` tokens of them and
    of what they can't stand without: the user's words before them, the answer behind.

    `mass[i]` belongs to message i as given: attention summed over its tokens. Messages behind the
    end of `mass` are new, and stay. With `None` for what was dropped at an earlier call, it stays
    dropped; that is the caller's part, as attention changes and this is a function of what it gets.
    """
    if len(mass) > look.given:
        raise PolicyError("mass", f"has {len(mass)} numbers for {look.given} messages.")
    units = look.units(messages)
    sizes = [look.tokens(messages[unit.start : unit.end]) for unit in units]
    scores = [_mass(messages, unit, mass, look) for unit in units]
    keep = set(range(opening(units)))
    total = 0
    for i in range(len(units) - 1, -1, -1):
        total += sizes[i]
        if scores[i] is not None and (total <= newest or i == len(units) - 1):
            keep.add(i)
    keep |= {i for i, score in enumerate(scores) if score == float("inf")}
    ranked = [
        (-score / max(1, size), -i)  # of equals the newer one
        for i, (score, size) in enumerate(zip(scores, sizes, strict=True))
        if score is not None and i not in keep
    ]
    keep = closed(units, keep)
    for _, i in sorted(ranked):
        more = closed(units, keep | {-i}) - keep
        cost = sum(sizes[j] for j in more)
        if cost <= budget:
            budget -= cost
            keep |= more
    kept = [units[i] for i in sorted(keep)]
    if len(kept) == len(units):
        return messages
    return [message for unit in kept for message in messages[unit.start : unit.end]]


def _mass(
    messages: Sequence[Message], unit: Unit, mass: Sequence[float | None], look: Look
) -> float | None:
    """All attention that a unit got; infinite with a new message in it, None if it is gone."""
    total = 0.0
    for message in messages[unit.start : unit.end]:
        i = look.origin(message)
        if i is None or i >= len(mass):
            return float("inf")
        got = mass[i]
        if got is None:
            return None
        total += got
    return total
