"""An edit near the start of a long conversation: the session's request against a plain one.

Both go to one server and compute one prompt each. Every request edits one token further on, so that
none finds what another one computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from leyline.bench.row import Row
from leyline.bench.splice import Sizes
from leyline.bench.timing import paired
from leyline.sglang.bench.server import Answer, Server
from leyline.sglang.bench.watch import Seen

GOAL = 0.15
Way = str
"""moved, or copied."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A request, and what the server did for it."""

    answer: Answer
    seen: Seen

    @property
    def without_attention(self) -> float:
        """Seconds of all but attention: linear layers, scheduler, HTTP, and the splice."""
        return self.answer.seconds - self.seen.attention_s


def run(
    server: Server,
    tokens: np.ndarray,
    sizes: Sizes,
    repeats: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """tokens: a conversation, at least `sizes.conversation` long. server: a watched one. Its cache
    is emptied."""
    source = tokens[: sizes.conversation]
    cases = [_edited(source, sizes, i, vocab_size) for i in range(4 * repeats)]
    server.generate(tokens[-64:])  # the first request sets things up
    server.flush()
    say("first prompt")
    server.generate(source, session="moved")
    pairs = []
    for i in range(repeats):
        say(f"rows moved, {i + 1} of {repeats}")
        spliced = timed(server, cases[2 * i], session="moved")
        pairs.append((spliced, timed(server, cases[2 * i + 1])))
        server.generate(source, session="moved")
    server.generate(source)  # now others use its rows too
    copies = []
    for i in range(repeats, 2 * repeats):
        say(f"rows copied, {i - repeats + 1} of {repeats}")
        server.generate(source, session=f"copied-{i}")
        spliced = timed(server, cases[2 * i], session=f"copied-{i}")
        copies.append((spliced, timed(server, cases[2 * i + 1])))
    return _rows(pairs, "moved", sizes) + _rows(copies, "copied", sizes)


def timed(
    server: Server,
    prompt: np.ndarray,
    session: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Timed:
    """One request to a server that does nothing else."""
    before = server.seen()
    answer = server.generate(prompt, session=session, options=options)
    return Timed(answer, server.seen().since(before))


def _edited(source: np.ndarray, sizes: Sizes, i: int, vocab_size: int) -> np.ndarray:
    """The source with its span, `i` tokens further on, replaced, and new tokens."""
    start, end = sizes.start + i, sizes.start + i + sizes.span
    rng = np.random.default_rng(i)
    stub, new = rng.integers(0, vocab_size, sizes.stub), rng.integers(0, vocab_size, sizes.new)
    # Not the tokens that stood there: the edit would be a smaller one.
    stub[0] = (source[start] + 1) % vocab_size
    stub[-1] = (source[end - 1] + 1) % vocab_size
    return np.concatenate([source[:start], stub, source[end:], new])


def _rows(pairs: list[tuple[Timed, Timed]], way: Way, sizes: Sizes) -> list[Row]:
    reports = [spliced.answer.report for spliced, _ in pairs]
    if any(not report or report["copied"] != (way == "copied") for report in reports):
        raise RuntimeError(f"rows were meant to be {way}, but were not: {reports}")
    done = f"{sizes.span} tokens of {sizes.conversation} replaced by {sizes.stub}, rows {way}"
    return [*_times(pairs, way, done), *_counts(pairs, way, sizes)]


def _times(pairs: list[tuple[Timed, Timed]], way: Way, done: str) -> list[Row]:
    spliced, whole, ratio = paired([(a.answer.seconds, b.answer.seconds) for a, b in pairs])
    bare, bare_whole, bare_ratio = paired(
        [(a.without_attention, b.without_attention) for a, b in pairs]
    )
    details: dict[str, Any] = {
        "splice_ttft_s": spliced,
        "prefill_ttft_s": whole,
        "pairs": [(a.answer.seconds, b.answer.seconds) for a, b in pairs],
        "attention_s": [(a.seen.attention_s, b.seen.attention_s) for a, b in pairs],
        "splice_ms": [a.answer.report["splice_ms"] for a, _ in pairs if a.answer.report],
    }
    share = [a.seen.attention_s / a.answer.seconds for a, _ in pairs]
    whole_share = [b.seen.attention_s / b.answer.seconds for _, b in pairs]
    return [
        Row(
            f"edit.{way}",
            f"time to first token, session / plain request: {done}",
            ratio,
            at_most=GOAL,
            details=details,
        ),
        Row(
            f"edit.{way}.without_attention",
            "the same without the time in attention",
            bare_ratio,
            at_most=GOAL,
            details={
                "splice_s": bare,
                "prefill_s": bare_whole,
                "attention_share": {"splice": share, "prefill": whole_share},
            },
        ),
    ]


def _counts(pairs: list[tuple[Timed, Timed]], way: Way, sizes: Sizes) -> list[Row]:
    expected = sizes.stub + sizes.new
    computed = [spliced.seen.tokens for spliced, _ in pairs]
    reported = [a.answer.report["tokens"]["computed"] for a, _ in pairs if a.answer.report]
    passes = [spliced.seen.passes for spliced, _ in pairs]
    return [
        Row(
            f"edit.{way}.computed",
            f"tokens prefilled for it ({sizes.stub} replaced + {sizes.new} new)",
            max(computed),
            unit="tokens",
            at_most=expected,
            details={"prefilled": computed, "reported": reported},
        ),
        Row(
            f"edit.{way}.passes",
            "prefill passes for it: one for each replacement, and the last",
            max(passes),
            at_most=2,
            details={"passes": passes},
        ),
    ]
