"""`drop_failed_calls`: calls that failed and later went well go, with their results."""

from __future__ import annotations

from collections.abc import Sequence

from leyline.policy.base import policy
from leyline.policy.edits import without
from leyline.policy.look import Look
from leyline.policy.options import NAMES, one_of
from leyline.policy.results import MARKS, outcome
from leyline.policy.shell import command_of, programs
from leyline.policy.turns import Message, Use


@policy(
    same=(one_of("call", "program"), "what makes a later call a retry"),
    marks=(NAMES, "texts that a failed call's result holds, where no return code decides"),
)
def drop_failed_calls(
    messages: list[Message], look: Look, *, same: str = "call", marks: Sequence[str] = MARKS
) -> list[Message]:
    """Drop each call that failed, if one in a later turn was the same and went well.

    The same: the tool and its arguments (`call`), or, looser, the tool and the programs that its
    command runs (`program`; for tools without commands the tool alone, and where it can't be told
    what a command runs, the arguments). Only until the user speaks again. What the assistant said
    with the call goes too, unless other calls of that turn stay.
    """
    units = look.units(messages)
    done: set[tuple[str, ...]] = set()
    gone: dict[int, list[Use]] = {}
    for i in range(len(units) - 1, -1, -1):
        unit = units[i]
        if unit.kind != "step" or unit.fixed:
            done = done if unit.kind == "system" else set()
            continue
        good: set[tuple[str, ...]] = set()
        for use in unit.uses:
            went_well, key = outcome(messages, use, look, marks), _key(use, look, same)
            if went_well:
                good.add(key)
            elif went_well is False and use.name and key in done:
                gone.setdefault(i, []).append(use)
        done |= good
    if not gone:
        return messages
    edited: list[Message] = []
    for i, unit in enumerate(units):
        kept = without(messages, unit, gone[i], look) if i in gone else None
        edited += messages[unit.start : unit.end] if kept is None else kept
    return edited


def _key(use: Use, look: Look, same: str) -> tuple[str, ...]:
    if same == "program":
        found = look.once(programs, use.arguments)
        if found or not look.once(command_of, use.arguments):
            return use.name, *found
    return use.name, "", use.arguments.strip()  # no program is called ""
