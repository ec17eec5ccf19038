"""Random edits for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from leyline.directive import Directive, Edits, Mode


@st.composite
def edits_of(
    draw: st.DrawFn,
    length: int,
    *,
    modes: tuple[Mode, ...] = (Mode.AMORTIZE,),
    tokens: st.SearchStrategy[int] | None = None,
    max_edits: int = 5,
) -> Edits:
    """Valid edits of a source of `length` tokens; touching ones and insertions included."""
    tokens = st.integers(0, 3) if tokens is None else tokens
    count = draw(st.integers(0, max_edits))
    points = sorted(draw(st.lists(st.integers(0, length), min_size=2 * count, max_size=2 * count)))
    directives: list[Directive] = []
    for start, end in zip(points[::2], points[1::2], strict=True):
        inserts = start == end
        if inserts and directives and directives[-1].start == directives[-1].end == start:
            continue
        new = tuple(draw(st.lists(tokens, min_size=int(inserts), max_size=4)))
        mode = draw(st.sampled_from(modes))
        repair = draw(st.integers(0, 6)) if mode is Mode.REPAIR else 0
        directives.append(Directive(start, end, new, mode, repair))
    return Edits.of(draw(st.permutations(directives)), length)
