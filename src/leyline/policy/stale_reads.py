"""`drop_stale_reads`: results that a later call made stale give way to a few words."""

from __future__ import annotations

from collections.abc import Sequence

from leyline.policy.base import policy
from leyline.policy.edits import put_outputs
from leyline.policy.look import Look, output_of
from leyline.policy.options import NAMES, TEXT, YES_NO
from leyline.policy.results import MARKS, outcome
from leyline.policy.shell import READERS, WRITERS, touched
from leyline.policy.turns import Message, Place, Use

PLACEHOLDER = "[evicted: stale tool output]"


@policy(
    repeats=(YES_NO, "a result also goes when exactly the same call is made again"),
    readers=(NAMES, "tools that read the file in their path"),
    writers=(NAMES, "tools that write the file in their path"),
    placeholder=(TEXT, "what stands for each"),
    marks=(NAMES, "texts that a failed call's result holds, where no return code decides"),
)
def drop_stale_reads(
    messages: list[Message],
    look: Look,
    *,
    repeats: bool = True,
    readers: Sequence[str] = READERS,
    writers: Sequence[str] = WRITERS,
    placeholder: str = PLACEHOLDER,
    marks: Sequence[str] = MARKS,
) -> list[Message]:
    """Replace what a read of a file gave, once a later call wrote the file or read all of it.

    A later read of a part (`sed -n 1,50p`, `head`) makes only the same call stale. A later call
    that failed makes nothing stale, unless it is the same one: what it says now is what holds.
    """
    words: dict[Place, str] = {}
    files = tuple(readers), tuple(writers)
    stale: set[str] = set()
    again: set[tuple[str, str]] = set()
    for unit in reversed(look.units(messages)):
        for use in reversed(unit.uses):
            if use.result is None or look.is_evicted(output_of(messages, use.result)):
                continue
            reads, writes, is_whole = look.once(touched, use.name, use.arguments, *files)
            is_stale = bool(reads) and reads <= stale
            is_stale = is_stale or (repeats and use.name != "" and _call(use) in again)
            if is_stale:
                words[use.result] = placeholder
            again.add(_call(use))
            if outcome(messages, use, look, marks):
                stale |= writes | (reads if is_whole else set())
    return put_outputs(messages, words, look) if words else messages


def _call(use: Use) -> tuple[str, str]:
    return use.name, use.arguments.strip()
