"""What an option of a policy may be: checked before anything is done, shown in docs and errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leyline.policy.errors import PolicyError, short


@dataclass(frozen=True, slots=True)
class Kind:
    """says: what is allowed, as it reads after "must be"."""

    says: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Option:
    """One option. what: what it is for, half a line for the docs. default: None where required."""

    name: str
    kind: Kind
    what: str
    default: Any = None
    required: bool = False


def whole(least: int) -> Kind:
    """An int, and no bool."""
    return Kind(f"a whole number from {least} on", lambda value: _is_whole(value, least))


def maybe(kind: Kind) -> Kind:
    """That or None."""
    return Kind(f"{kind.says}, or null", lambda value: value is None or kind.fits(value))


def one_of(*words: str) -> Kind:
    """One of some words."""
    says = "one of " + ", ".join(words)
    return Kind(says, lambda value: isinstance(value, str) and value in words)


MOST_NAMES = 1000
"""They are looked through for each tool call."""

TEXT = Kind("a string", lambda value: isinstance(value, str))
YES_NO = Kind("true or false", lambda value: isinstance(value, bool))
NAMES = Kind(
    f"a list of up to {MOST_NAMES:,} strings",
    lambda value: _all(value, lambda each: isinstance(each, str)) and len(value) <= MOST_NAMES,
)
YES_NO_NAMES = Kind(
    f"true, false or {NAMES.says}", lambda value: YES_NO.fits(value) or NAMES.fits(value)
)
MASSES = Kind(
    "a list of numbers from 0 on, or null where there is none",
    lambda value: _all(value, lambda each: each is None or _is_mass(each)),
)


def check(options: Mapping[str, Any], known: tuple[Option, ...], name: str, where: str) -> None:
    """Raises PolicyError for the first option that doesn't exist, is missing or doesn't fit.

    name: the policy's. where: what the field of an error begins with (`policy[1]`).
    """
    kinds = {option.name: option.kind for option in known}
    for key, value in options.items():
        field = f"{where}.{str(key)[:60]}"
        if key not in kinds:
            listed = ", ".join(kinds) or "none"
            raise PolicyError(field, f"is not an option of {name}, which has {listed}.")
        if not kinds[key].fits(value):
            raise PolicyError(field, f"must be {kinds[key].says}, not {short(value)}.")
    for option in known:
        if option.required and option.name not in options:
            raise PolicyError(f"{where}.{option.name}", f"is missing; {option.what}.")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_mass(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max  # an int can be more than any float; nan is neither
    )


def _all(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(fits, value))
