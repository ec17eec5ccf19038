"""Leyline: edit the context of a running conversation without a re-prefill.

Importing this package loads neither numpy nor torch; names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diff import derive_edits
    from .directive import Directive, DirectiveError, Edits, Mode
    from .plan import Compute, Keep, Plan, make_plan

__version__ = "0.1.0"

__all__ = [
    "Compute",
    "Directive",
    "DirectiveError",
    "Edits",
    "Keep",
    "Mode",
    "Plan",
    "__version__",
    "derive_edits",
    "make_plan",
]

_HOME = {
    "Compute": "plan",
    "Directive": "directive",
    "DirectiveError": "directive",
    "Edits": "directive",
    "Keep": "plan",
    "Mode": "directive",
    "Plan": "plan",
    "derive_edits": "diff",
    "make_plan": "plan",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'leyline' has no attribute {name!r}")
    value = getattr(import_module(f"leyline.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
