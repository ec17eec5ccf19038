"""Directives: which tokens of a cached sequence to replace, and lists of them.

A directive replaces source tokens `[start, end)` by `replacement`. `Edits` is a list of them
against one source: sorted, disjoint and valid once built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, overload

import numpy as np

TokenArray = np.ndarray | Sequence[int]

LIMIT = 2**31 - 1
"""Largest position, count or token id."""

FIELDS = ("start", "end", "replacement", "mode", "repair")


class Mode(StrEnum):
    """How the rows behind an edit are treated.

    AMORTIZE keeps them as they are, FORGET drops everything from the edit on,
    REPAIR recomputes the first `repair` tokens after the replacement.
    """

    AMORTIZE = "amortize"
    FORGET = "forget"
    REPAIR = "repair"


class DirectiveError(ValueError):
    """A malformed directive.

    `field` is where (`directives[1].end`), `message` one sentence: the value and what is allowed.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


@dataclass(frozen=True, slots=True)
class Directive:
    """Replace source tokens `[start, end)` by `replacement`. Checked by `Edits.of`."""

    start: int
    end: int
    replacement: tuple[int, ...] = ()
    mode: Mode = Mode.AMORTIZE
    repair: int = 0

    @property
    def shift(self) -> int:
        """Positions by which tokens behind the edit move (negative: forward in the prompt)."""
        return len(self.replacement) - (self.end - self.start)


class Edits(Sequence[Directive]):
    """Directives against one source of `source_length` tokens: sorted, disjoint, immutable.

    Spans may touch. Two insertions at one point have no order and are refused.
    """

    __slots__ = ("_directives", "_source_length")
    _directives: tuple[Directive, ...]
    _source_length: int

    def __init__(self) -> None:
        raise TypeError("Edits are built by Edits.of(directives, source_length)")

    @classmethod
    def of(
        cls,
        directives: Iterable[Directive],
        source_length: int,
        vocab_size: int | None = None,
        field: str = "directives",
    ) -> Edits:
        """Check and sort `directives`. Raises DirectiveError, naming one by its place as given."""
        length = check_number(source_length, "source_length")
        checked = [
            (_checked(directive, length, vocab_size, f"{field}[{i}]"), i)
            for i, directive in enumerate(directives)
        ]
        checked.sort(key=lambda item: (item[0].start, item[0].end))
        for (a, i), (b, j) in pairwise(checked):
            if b.start < a.end:
                what = f"overlaps [{a.start}, {a.end}) of {field}[{i}]; edits must be disjoint."
                raise DirectiveError(f"{field}[{j}].start", f"[{b.start}, {b.end}) {what}")
            if a.start == a.end == b.start == b.end:
                what = f"is where {field}[{i}] inserts too; join insertions at one point."
                raise DirectiveError(f"{field}[{j}].start", f"{b.start} {what}")
        return cls._trusted((directive for directive, _ in checked), length)

    @classmethod
    def _trusted(cls, directives: Iterable[Directive], source_length: int) -> Edits:
        """Edits that the caller knows to be sorted, disjoint and valid."""
        edits = object.__new__(cls)
        edits._directives = tuple(directives)
        edits._source_length = source_length
        return edits

    @property
    def source_length(self) -> int:
        return self._source_length

    @property
    def target_length(self) -> int:
        return self._source_length + self.shift

    @property
    def shift(self) -> int:
        """Target length less source length."""
        return sum(directive.shift for directive in self._directives)

    @property
    def is_empty(self) -> bool:
        return not self._directives

    def apply(self, source: TokenArray) -> np.ndarray:
        """The edited sequence, int64 `[target_length]`."""
        tokens = self._source(source)
        pieces, at = [], 0
        for directive in self._directives:
            pieces.append(tokens[at : directive.start])
            pieces.append(np.array(directive.replacement, dtype=np.int64))
            at = directive.end
        pieces.append(tokens[at:])
        return np.concatenate(pieces)

    def compose(self, later: Edits) -> Edits:
        """One list for this one and then `later`, which edits this one's target.

        Edits that meet are joined; the joint edit has their strongest mode.
        """
        if later.source_length != self.target_length:
            raise DirectiveError(
                "later",
                f"these edits are for a source of {later.source_length} tokens, "
                f"but the target of the earlier ones has {self.target_length}.",
            )
        if self.is_empty:
            return later
        if later.is_empty:
            return self
        joined: list[Directive] = []
        shift = 0
        for group in _groups(self, later):
            directive, shift = _join(group, shift)
            if directive is not None:
                joined.append(directive)
        return Edits._trusted(joined, self._source_length)

    def invert(self, source: TokenArray) -> Edits:
        """Edits of `apply(source)` that give `source` back, mode amortize."""
        tokens = self._source(source)
        inverse: list[Directive] = []
        shift = 0
        for d in self._directives:
            start = d.start + shift
            end = start + len(d.replacement)
            old = tuple(tokens[d.start : d.end].tolist())
            if inverse and inverse[-1].start == inverse[-1].end == start == end:
                # two deletions that touch come back as one insertion
                old = inverse.pop().replacement + old
            inverse.append(Directive(start, end, old))
            shift += d.shift
        return Edits._trusted(inverse, self.target_length)

    def _source(self, source: TokenArray) -> np.ndarray:
        tokens = to_tokens(source, "source")
        if len(tokens) != self._source_length:
            raise DirectiveError(
                "source",
                f"{len(tokens)} tokens given, but these edits are for {self._source_length}.",
            )
        return tokens

    @overload
    def __getitem__(self, index: int) -> Directive: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Directive, ...]: ...
    def __getitem__(self, index: int | slice) -> Directive | tuple[Directive, ...]:
        return self._directives[index]

    def __len__(self) -> int:
        return len(self._directives)

    def __iter__(self) -> Iterator[Directive]:
        return iter(self._directives)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Edits):
            return NotImplemented
        same_source = self._source_length == other._source_length
        return same_source and self._directives == other._directives

    def __hash__(self) -> int:
        return hash((self._directives, self._source_length))

    def __repr__(self) -> str:
        return f"Edits({list(self._directives)!r}, source_length={self._source_length})"


def strongest(*modes: tuple[Mode, int]) -> tuple[Mode, int]:
    """The mode that keeps least, of `(mode, repair)` pairs: FORGET, then REPAIR, then AMORTIZE."""
    if any(mode == Mode.FORGET for mode, _ in modes):
        return Mode.FORGET, 0
    repairs = [repair for mode, repair in modes if mode == Mode.REPAIR]
    return (Mode.REPAIR, max(repairs)) if repairs else (Mode.AMORTIZE, 0)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A directive of either list; `[lo, hi)` is its span in the sequence between the two."""

    lo: int
    hi: int
    directive: Directive
    is_later: bool


def _groups(earlier: Edits, later: Edits) -> Iterator[list[_Placed]]:
    """Directives of both lists, grouped where their spans meet."""
    placed: list[_Placed] = []
    shift = 0
    for d in earlier:
        lo = d.start + shift
        placed.append(_Placed(lo, lo + len(d.replacement), d, False))
        shift += d.shift
    placed += [_Placed(d.start, d.end, d, True) for d in later]
    placed.sort(key=lambda p: (p.lo, p.hi))
    group: list[_Placed] = []
    end = -1
    for p in placed:
        if group and p.lo > end:
            yield group
            group = []
        group.append(p)
        end = max(end, p.hi)
    yield group


def _join(group: list[_Placed], shift: int) -> tuple[Directive | None, int]:
    """One source directive for a group (None if it inserts and deletes again).

    `shift` is that of the earlier edits before the group; returned is that after it.
    """
    lo, hi = group[0].lo, max(p.hi for p in group)
    # Tokens between the two lists: what no earlier edit wrote, a later edit deletes.
    middle = [0] * (hi - lo)
    start = lo - shift
    for p in group:
        if not p.is_later:
            middle[p.lo - lo : p.hi - lo] = p.directive.replacement
            shift += p.directive.shift
    written: list[int] = []
    at = lo
    for p in group:
        if p.is_later:
            written += middle[at - lo : p.lo - lo]
            written += p.directive.replacement
            at = p.hi
    written += middle[at - lo :]
    end = hi - shift
    if start == end and not written:
        return None, shift
    mode, repair = strongest(*((p.directive.mode, p.directive.repair) for p in group))
    return Directive(start, end, tuple(written), mode, repair), shift


def parse_directive(obj: object, field: str) -> Directive:
    """A directive from untrusted data.

    `obj` is an object with the fields of `Directive` (start and end are required) or a list
    `[start, end, replacement, mode]`. Raises DirectiveError.
    """
    values: dict[str, Any]
    if isinstance(obj, Mapping):
        for key in obj:
            if key not in FIELDS:
                raise DirectiveError(
                    field, f"{_show(key)} is no field of a directive; allowed are {_words(FIELDS)}."
                )
        for key in ("start", "end"):
            if key not in obj:
                raise DirectiveError(f"{field}.{key}", "missing; every directive needs it.")
        values = dict(obj)
    elif isinstance(obj, list | tuple):
        if len(obj) != 4:
            raise DirectiveError(
                field, f"a list of {len(obj)}; allowed is [start, end, replacement, mode]."
            )
        values = dict(zip(FIELDS, obj, strict=False))
    else:
        raise DirectiveError(
            field,
            f"{_show(obj)} is no directive; give an object or [start, end, replacement, mode].",
        )
    if values.get("mode") == Mode.REPAIR and "repair" not in values:
        raise DirectiveError(
            f"{field}.repair", "missing; mode repair needs the number of tokens to recompute."
        )
    return _typed(field, None, **values)


def _checked(directive: object, length: int, vocab_size: int | None, field: str) -> Directive:
    """The directive with plain types, checked against a source of `length` tokens."""
    if not isinstance(directive, Directive):
        raise DirectiveError(field, f"{_show(directive)} is no Directive.")
    d = _typed(
        field,
        vocab_size,
        directive.start,
        directive.end,
        directive.replacement,
        directive.mode,
        directive.repair,
    )
    for name, value in (("start", d.start), ("end", d.end)):
        if value > length:
            raise DirectiveError(
                f"{field}.{name}", f"{value} is past the source, which has {length} tokens."
            )
    return d


def _typed(
    field: str,
    vocab_size: int | None,
    start: object,
    end: object,
    replacement: object = (),
    mode: object = Mode.AMORTIZE,
    repair: object = 0,
) -> Directive:
    """All checks that need no source."""
    first = check_number(start, f"{field}.start")
    last = check_number(end, f"{field}.end")
    if last < first:
        raise DirectiveError(f"{field}.end", f"{last} is before start, which is {first}.")
    tokens = to_tokens(replacement, f"{field}.replacement")
    if vocab_size is not None:
        _below(tokens, vocab_size, f"{field}.replacement")
    if first == last and not len(tokens):
        raise DirectiveError(
            field, f"[{first}, {last}) with no replacement changes nothing; leave it out."
        )
    return Directive(first, last, tuple(tokens.tolist()), *check_mode(mode, repair, f"{field}."))


def check_mode(mode: object, repair: object = 0, prefix: str = "") -> tuple[Mode, int]:
    """A mode and its repair width; raises DirectiveError for `{prefix}mode`, `{prefix}repair`."""
    if not isinstance(mode, str) or mode not in tuple(Mode):
        raise DirectiveError(
            f"{prefix}mode", f"{_show(mode)} is no mode; allowed are {_words(tuple(Mode))}."
        )
    width = check_number(repair, f"{prefix}repair")
    if width and mode != Mode.REPAIR:
        raise DirectiveError(
            f"{prefix}repair", f"{width} given with mode {mode}; it is for mode repair only."
        )
    return Mode(mode), width


def to_tokens(x: object, field: str = "tokens") -> np.ndarray:
    """Token ids as int64 `[n]`, from a sequence or a one-dimensional integer array.

    Raises DirectiveError naming the first bad element. An int64 array is not copied.
    """
    if isinstance(x, Sequence) and not isinstance(x, str | bytes | bytearray | memoryview):
        if set(map(type, x)) <= {int} and (not x or (min(x) >= 0 and max(x) <= LIMIT)):
            return np.array(x, dtype=np.int64)
        # slow path: to name the bad one, or to accept numpy's integers
        return np.array([check_number(t, f"{field}[{i}]") for i, t in enumerate(x)], dtype=np.int64)
    if not hasattr(x, "__array__"):
        raise DirectiveError(field, f"{_show(x)} is no list of token ids.")
    array = np.asarray(x)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DirectiveError(
            field,
            f"an array of shape {array.shape} and type {array.dtype}; "
            "allowed is one dimension of integers.",
        )
    if len(array) and (array.min() < 0 or array.max() > LIMIT):
        at = int(np.flatnonzero((array < 0) | (array > LIMIT))[0])
        check_number(int(array[at]), f"{field}[{at}]")
    return array.astype(np.int64, copy=False)


def _below(tokens: np.ndarray, vocab_size: int, field: str) -> None:
    bad = np.flatnonzero(tokens >= vocab_size)
    if len(bad):
        at = int(bad[0])
        raise DirectiveError(
            f"{field}[{at}]", f"{tokens[at]} is no token; allowed is 0 to {vocab_size - 1}."
        )


def check_number(value: object, field: str) -> int:
    """A whole number, 0 to LIMIT (a bool is none); raises DirectiveError."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        if 0 <= value <= LIMIT:
            return int(value)
        raise DirectiveError(field, f"{_show(value)} is out of range; allowed is 0 to {LIMIT}.")
    raise DirectiveError(field, f"{_show(value)} is no whole number; allowed is 0 to {LIMIT}.")


def _show(value: object) -> str:
    """A value from a stranger, short and on one line."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print the largest
    if isinstance(value, str):
        return repr(value) if len(value) <= 32 else f"{value[:32]!r}..."
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "a list"
    return "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _words(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
