"""`clear_thinking`: old reasoning goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leyline.policy.base import policy
from leyline.policy.look import THOUGHTS, Look, behind_thoughts, has_thoughts, is_thought
from leyline.policy.options import whole
from leyline.policy.turns import Message, tool_calls


@policy(keep=(whole(0), "how many of the newest messages with reasoning keep it"))
def clear_thinking(messages: list[Message], look: Look, *, keep: int = 1) -> list[Message]:
    """Drop the reasoning of all assistant messages but the newest `keep` that have any.

    Reasoning is what stands in `reasoning_content` or `reasoning`, in front of `</think>` in a
    content, or in Anthropic's `thinking` and `redacted_thinking` parts. A message that would have
    nothing left stays as it is.
    """
    thoughtful = [i for i, message in enumerate(messages) if has_thoughts(message, look)]
    old = thoughtful[: max(0, len(thoughtful) - keep)]
    edited = list(messages)
    for i in old:
        new = _without(messages[i], look)
        if new is not None:
            edited[i] = look.edit(messages[i], **new)
            for field in THOUGHTS:
                edited[i].pop(field, None)
    return edited


def _without(message: Message, look: Look) -> dict[str, Any] | None:
    """What changes besides THOUGHTS; None if nothing would remain."""
    content: Any = message.get("content")
    if isinstance(content, str):
        rest = look.once(behind_thoughts, content)
        content = content if rest is None else rest
    elif isinstance(content, Sequence):
        content = [part for part in content if not is_thought(part)]
    if not content and not tool_calls(message):
        return None
    return {"content": content}
