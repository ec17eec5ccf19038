"""Random edits of a prompt, and which of its rows they keep: written down token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from leyline.directive import Directive


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """source: token ids. edits: of the source. target: the edited prompt, new tokens behind it.
    kept: for each target token the source row that it keeps, -1 where it is computed."""

    name: str
    source: np.ndarray
    edits: tuple[Directive, ...]
    target: np.ndarray
    kept: np.ndarray

    @property
    def shifts(self) -> np.ndarray:
        """By how many positions each target row has moved; 0 where it is computed."""
        here = np.arange(len(self.kept))
        return np.where(self.kept >= 0, here - self.kept, 0)


KINDS: dict[str, list[tuple[float, int, int]]] = {
    "delete": [(0.2, 40, 0)],
    "replace": [(0.2, 40, 7)],
    "grow": [(0.3, 4, 50)],
    "insert": [(0.4, 0, 9)],
    "several": [(0.1, 20, 3), (0.4, 30, 0), (0.6, 2, 25), (0.8, 10, 10)],
}
"""Edits by kind: where in the source, tokens removed, tokens put there."""


def make(rng: np.random.Generator, kind: str, source: np.ndarray, new: np.ndarray) -> Case:
    """A case of one kind. Replacement tokens are drawn from the source's own; the first token
    behind each edit's start is another than before, so that the edit starts there and not later."""
    edits, target, kept, at = [], [], [], 0
    for share, removed, written in KINDS[kind]:
        start = int(share * len(source))
        if not written:
            start += int(np.argmax(source[start:-removed] != source[start + removed :]))
        others = source[source != source[start]]
        replacement = rng.choice(others, written).tolist()
        edits.append(Directive(start, start + removed, tuple(replacement)))
        target += source[at:start].tolist() + replacement
        kept += [*range(at, start), *[-1] * written]
        at = start + removed
    target += source[at:].tolist() + new.tolist()
    kept += [*range(at, len(source)), *[-1] * len(new)]
    kept[-1] = -1  # its logits are needed
    return Case(kind, source, tuple(edits), np.array(target), np.array(kept))
