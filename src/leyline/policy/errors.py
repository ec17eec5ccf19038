"""What a malformed policy gets."""

from __future__ import annotations


class PolicyError(ValueError):
    """A policy that can't be applied: ``field`` names the culprit, ``message`` is a sentence."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


def short(value: object, limit: int = 60) -> str:
    """``repr(value)``, cut to ``limit`` characters, for an error message."""
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"
