"""A request from its arrival to its end, and the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from leyline.channel import Report
from leyline.engine.attention_mass import AttentionMass
from leyline.engine.cache import Chunk
from leyline.engine.request import Event, Request
from leyline.engine.slots import Slots
from leyline.engine.text import TextStream
from leyline.engine.tree import PUBLIC, Node, User
from leyline.lineage import Span


@dataclass(eq=False)
class Running:
    """A request from its arrival to its end.

    tokens, key, slots: int64, as long as the request can get. The first `n` tokens are known, the
    first `n_rows` of them have rows (while prefilling: those before the next one to compute).
    """

    request: Request
    emit: Callable[[Event], None]
    text: TextStream
    generator: torch.Generator | None
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    key: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: Slots = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    n: int = 0
    n_slots: int = 0
    todo: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    node: Node | None = None
    locked: int = 0
    spans: tuple[Span, ...] = ()
    source_gone: bool = False
    report: Report | None = None
    max_new: int = 0
    produced: int = 0
    aborted: bool = False
    detached: bool = False  # its session was dropped: its rows must not be found again
    remembered: bool = False
    mass: AttentionMass | None = None

    @property
    def user(self) -> User:
        """Whom its rows belong to."""
        return PUBLIC if self.request.channel is None else self.request.channel.user

    @property
    def prefilling(self) -> bool:
        """Whether tokens of its prompt are still to be computed."""
        return len(self.todo) > 0

    @property
    def n_rows(self) -> int:
        """Leading tokens whose rows are computed."""
        return int(self.todo[0]) if self.prefilling else self.n_slots

    def chunk(self, budget: int) -> Chunk:
        """Its next tokens to compute, at most `budget`."""
        positions = self.todo[:budget] if self.prefilling else np.array([self.n - 1])
        return Chunk(self.slots[: positions[-1] + 1], positions, self.mass)

    @property
    def attention(self) -> np.ndarray | None:
        """What each token of the prompt got, fp64 `[prompt]`, where that was asked for."""
        return None if self.mass is None else self.mass.shares()


def spans_up_to(spans: tuple[Span, ...], n: int) -> tuple[Span, ...]:
    """`spans` over the first `n` rows: cut, or led on by rows computed behind them."""
    cut = tuple(
        Span(span.start, min(span.n, n - span.start), span.exact, span.rotations)
        for span in spans
        if span.start < n
    )
    end = cut[-1].start + cut[-1].n if cut else 0
    if end == n:
        return cut
    exact = all(span.exact for span in cut)
    return (*cut, Span(end, n - end, exact, 0))
