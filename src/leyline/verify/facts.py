"""What the model is: how it caches and rotates; checked against its weights when it was loaded."""

from __future__ import annotations

from typing import Any

from leyline.describe import facts_of
from leyline.verify.subject import Subject


def facts(subject: Subject) -> dict[str, Any]:
    """As in `leyline models`, and the inverse frequencies in radians a token."""
    layout = subject.engine.layout
    rope = layout.rope
    return {
        **facts_of(subject.engine.model.config, layout),
        "inv_freq": rope.inv_freq.tolist() if rope else [],
        "parameters": sum(p.numel() for p in subject.engine.model.parameters()),
    }
