"""What a tool's result says about its call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from leyline.policy.look import Look, is_error, output_of
from leyline.policy.turns import Message, Use

MARKS = ("Traceback (most recent call last)",)
"""What a result of a failed call holds, where no return code decides."""

_CODE = re.compile(
    r"<returncode>\s*(-?\d+)\s*</returncode>"
    r"|\b(?:return|exit)[ _]?(?:code|status)\b\W{0,4}(-?\d+)",
    re.IGNORECASE,
)
_ENDS = 200  # characters at either end in which a return code is looked for


def outcome(
    messages: Sequence[Message], use: Use, look: Look, marks: Sequence[str] = MARKS
) -> bool | None:
    """True for a call that went well, False for one that failed, None if there is nothing to tell
    by: no result yet, or an evicted one.

    `is_error` decides; else a return code at either end of the text (`<returncode>1</returncode>`,
    `exit code: 1`, `"exit_code": 1`); else whether one of the marks is in it.
    """
    if use.result is None:
        return None
    text = output_of(messages, use.result)
    if look.is_evicted(text):
        return None
    return not is_error(messages, use.result) and look.once(_is_fine, text, tuple(marks))


def _is_fine(text: str, marks: Sequence[str]) -> bool:
    code = return_code(text if len(text) < 2 * _ENDS else text[:_ENDS] + "\0" + text[-_ENDS:])
    if code is not None:
        return code == 0
    return not any(mark in text for mark in marks)


def return_code(text: str) -> int | None:
    """The first return code at the beginning of a text, or the last at its end; None without."""
    first = _CODE.search(text[:_ENDS])
    found = first or next(iter(list(_CODE.finditer(text[-_ENDS:]))[-1:]), None)
    if found is None:
        return None
    digits = found.group(1) or found.group(2)
    return int(digits[:20])
