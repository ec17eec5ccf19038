"""Policies on tool outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyline.policy.errors import PolicyError, short

PLACEHOLDER = "[evicted: old tool output]"


def clear_tool_outputs(
    messages: Sequence[dict[str, Any]], *, keep: int = 2, placeholder: str = PLACEHOLDER
) -> list[dict[str, Any]]:
    """Replace all but the newest ``keep`` tool outputs by ``placeholder``.

    A tool output is the content, a string or a list of parts, of a message with role ``tool``.
    Messages keep their number, order, roles and other fields. The input is not changed; messages
    that stay as they are, are shared with it. Raises PolicyError for a bad ``keep`` or
    ``placeholder``.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
        raise PolicyError("policy.keep", f"must be a whole number from 0 on, not {short(keep)}.")
    if not isinstance(placeholder, str):
        raise PolicyError("policy.placeholder", f"must be a string, not {short(placeholder)}.")
    outputs = [i for i, message in enumerate(messages) if message.get("role") == "tool"]
    old = set(outputs[: max(0, len(outputs) - keep)])
    return [{**m, "content": placeholder} if i in old else m for i, m in enumerate(messages)]
