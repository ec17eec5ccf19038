"""I2, I3, I4: what a splice leaves in the cache, and what is said over it.

Expected rows and log-probabilities come from `helpers`: the engine's own original rows, turned in
fp64, under Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache, partial

import numpy as np
import pytest
import torch
from helpers import (
    ALL,
    ARCHITECTURES,
    PREFILL,
    ROTARY,
    Fed,
    Kept,
    Rows,
    ask,
    assert_same,
    engine,
    fresh,
    fresh_rows,
    greedy,
    inv_freq,
    lineage,
    marked,
    plain_model,
    reference,
    rows_of,
    segments,
    session_rows,
    tokens_of,
    turned_rows,
)
from torch import Tensor, nn

from leyline.channel import Channel, Report
from leyline.directive import Directive, Mode
from leyline.engine.engine import Answer
from leyline.engine.request import Delta, Request

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SOURCE, NEW, STEPS = 160, 12, 8

Edit = tuple[int, int, int]
"""(start, end, replacement tokens)."""

CASES: dict[str, tuple[list[Edit], int]] = {
    "delete": ([(40, 70, 0)], NEW),
    "replace": ([(40, 70, 7)], NEW),
    "grow": ([(60, 64, 30)], NEW),
    "insert": ([(80, 80, 9)], NEW),
    "several": ([(10, 20, 3), (50, 90, 5), (110, 112, 0), (130, 130, 4)], NEW),
    "at the start": ([(0, 25, 4)], NEW),
    "start deleted": ([(0, 25, 0)], NEW),
    "up to the end": ([(100, SOURCE, 6)], NEW),
    "cut off": ([(100, SOURCE, 0)], 0),
    "equal length": ([(40, 60, 20)], NEW),
    "equal length and more": ([(20, 40, 20), (70, 90, 2)], NEW),
    "nothing new": ([], 0),
    "edit, nothing new": ([(40, 70, 7)], 0),
    "everything new": ([(0, SOURCE, 150)], 0),
}
HOW = [(asked, way) for asked in ("explicit", "derived") for way in ("moved", "copied")]


def make(
    rng: np.random.Generator, edits: Sequence[Edit], new: int, **mode: object
) -> tuple[np.ndarray, tuple[Directive, ...], np.ndarray]:
    """A source, directives and the target, all of different tokens."""
    tokens = tokens_of(rng, SOURCE + sum(n for *_, n in edits) + new).tolist()
    source, rest = tokens[:SOURCE], tokens[SOURCE:]
    directives, target, at = [], [], 0
    for start, end, n in edits:
        written, rest = rest[:n], rest[n:]
        directives.append(Directive(start, end, tuple(written), **mode))  # type: ignore[arg-type]
        target += source[at:start] + written
        at = end
    target += source[at:] + rest
    return np.array(source), tuple(directives), np.array(target)


@cache
def _in_fp32(name: str, dtype: torch.dtype) -> nn.Module:
    return deepcopy(plain_model(name, dtype)).float()


def tolerance(name: str, dtype: torch.dtype, *args: object) -> float:
    """How far two right answers can be apart in log-probabilities.

    fp32: a few hundred roundings of 2^-24 through three layers, log-probabilities of about 10:
    measured 1e-5 at most (phi), so 1e-4. bf16, fp16: the reference in this dtype is `noise` off
    from the same over the same rows in fp32. The engine orders its sums in another way but rounds
    as often, so it is as far off and both at most 2 * noise apart; noise is the largest of
    thousands of values, but still a sample: 3 * noise. Without rotation the distance is far larger
    (see the control below).
    """
    if dtype == torch.float32:
        return 1e-4
    rows, plan, tokens = args
    coarse = reference(name, rows, plan, tokens, model=plain_model(name, dtype))  # type: ignore[arg-type]
    rows32 = [(k.float(), v.float()) for k, v in rows]  # type: ignore[attr-defined]
    fine = reference(name, rows32, plan, tokens, model=_in_fp32(name, dtype))  # type: ignore[arg-type]
    return 3 * float((coarse - fine).abs().max()) + 1e-4


def counts(plan: Sequence[Kept | Fed]) -> tuple[int, int, int]:
    """Shared, moved, computed."""
    first = plan[0]
    shared = first.n if isinstance(first, Kept) and first.src == first.dst == 0 else 0
    kept = sum(s.n for s in plan if isinstance(s, Kept))
    return shared, kept - shared, sum(s.n for s in plan if isinstance(s, Fed))


def check_rows(
    name: str, before: Rows, after: Rows, plan: Sequence[Kept | Fed], roundings: int = 1
) -> None:
    """I2: bitwise but for the rotary columns. I3: those within one rounding of a turn in fp64.

    One rounding to the dtype is at most half its eps of the value (half its smallest step near
    zero); the product in fp32 has three roundings, each at most 2^-24 of the pair's two columns
    taken together.
    """
    rotary, model = ROTARY[name], plain_model(name, before[0][0].dtype)
    for segment in plan:
        if not isinstance(segment, Kept):
            continue
        old = [(k[segment.src :][: segment.n], v[segment.src :][: segment.n]) for k, v in before]
        new = [(k[segment.dst :][: segment.n], v[segment.dst :][: segment.n]) for k, v in after]
        shift = segment.dst - segment.src
        exact = turned_rows(name, old, shift, model)
        for layer, pairs in enumerate(zip(old, new, exact, strict=True)):
            for tensor, (o, n, e) in zip(("keys", "values"), zip(*pairs, strict=True), strict=True):
                turns = tensor == rotary.tensor and layer not in rotary.still and shift != 0
                width = rotary.width if turns else 0
                assert torch.equal(o[..., width:], n[..., width:]), (segment, layer, tensor)
                if not turns:
                    continue
                assert not torch.equal(o[..., :width], n[..., :width]), "not turned at all"
                info = torch.finfo(n.dtype)
                pair = o[..., :width].double().abs()
                half = width // 2
                if rotary.interleaved:
                    pair = pair.unflatten(-1, (half, 2)).sum(-1).repeat_interleave(2, -1)
                else:
                    pair = (pair[..., :half] + pair[..., half:]).repeat(1, 1, 2)
                bound = e[..., :width].abs() * info.eps / 2 + 4 * 2.0**-24 * pair
                bound = (bound + info.tiny * info.eps) * roundings
                error = (n[..., :width].double() - e[..., :width]).abs()
                assert (error <= bound).all(), (segment, layer, float((error / bound).max()))


def splice_once(
    name: str, dtype: torch.dtype, case: str, asked: str, way: str, chunk: int, seed: int
) -> None:
    edits, new = CASES[case]
    rng = np.random.default_rng(seed)
    source, directives, target = make(rng, edits, new)
    plan = segments(SOURCE, directives, new)
    shared, moved, computed = counts(plan)
    with engine(name, dtype, chunk=chunk) as made:
        if way == "copied":
            ask(made, source)
        ask(made, source, session="s")
        key = lineage(made).key
        before = rows_of(made, key)
        slots = made.call(lambda: made.store.tree.match(key).slots)

        explicit = directives if asked == "explicit" else None
        answer = ask(made, target, greedy(STEPS, ALL), "s", directives=explicit)
        report = answer.report
        assert report is not None
        assert (report.prompt, report.fallback) == (len(target), None)
        assert (report.shared, report.moved, report.computed) == (shared, moved, computed)
        assert report.copied == (way == "copied" and moved > 0)
        behind = [
            d for d in directives if any(isinstance(s, Kept) and s.src >= d.end for s in plan)
        ]
        assert [(e.start, e.end, e.replacement_tokens, e.shift) for e in report.edits] == [
            (d.start, d.end, len(d.replacement), d.shift) for d in behind
        ]

        after = session_rows(made)
        check_rows(name, before, after, plan)
        now = lineage(made)
        assert np.array_equal(now.tokens, np.concatenate([target, answer.tokens[:-1]]))
        assert now.edits == len(report.edits)
        new_slots = made.call(lambda: made.store.tree.match(now.key).slots)
        for s in (s for s in plan if isinstance(s, Kept)):
            same = slots[s.src : s.src + s.n] == new_slots[s.dst : s.dst + s.n]
            is_shared = s.src == s.dst == 0
            assert same.all() if is_shared or way == "moved" else not same.any()
        if way == "copied":
            for (k, v), (k2, v2) in zip(before, rows_of(made, source), strict=True):
                assert torch.equal(k, k2) and torch.equal(v, v2), "the source of a copy has changed"
        elif moved:  # no second copy: the source's last rows and everything that is left of it
            stats = made.stats()
            assert stats.cached == len(now.tokens)

        tokens = np.concatenate([target, answer.tokens[:-1]])
        expected = reference(name, before, plan, tokens, model=plain_model(name, dtype))
        assert_same(answer, expected, tolerance(name, dtype, before, plan, tokens), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_splice(name: str, dtype: torch.dtype) -> None:
    """I2, I3, I4: every kind of edit on every architecture and dtype; each asked for and executed
    in one of four ways."""
    offset = ARCHITECTURES.index(name) + DTYPES.index(dtype)
    for i, case in enumerate(CASES):
        if dtype == torch.float16 and (i + offset) % 3:
            continue  # fp16 is slow on CPUs: another third of the cases for each architecture
        asked, way = HOW[(i + offset) % len(HOW)]
        splice_once(name, dtype, case, asked, way, chunk=(1024, 7)[(i + offset) // 4 % 2], seed=i)


@pytest.mark.parametrize("way", ["moved", "copied"])
@pytest.mark.parametrize("asked", ["explicit", "derived"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["deepseek_v2", "llama"])
def test_splice_in_every_way(name: str, case: str, asked: str, way: str) -> None:
    """I2, I3, I4: the same edit explicit and derived, moved and copied."""
    splice_once(name, torch.float32, case, asked, way, chunk=16, seed=100)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_control_without_rotation(name: str, dtype: torch.dtype) -> None:
    """A reference that leaves the rotation out is far off, so the tests above would notice."""
    source, directives, target = make(np.random.default_rng(7), [(10, 60, 2)], NEW)
    plan = segments(SOURCE, directives, NEW)
    model = plain_model(name, dtype)
    with engine(name, dtype) as made:
        ask(made, source, session="s")
        before = session_rows(made)
        answer = ask(made, target, greedy(STEPS, ALL), "s")
        tokens = np.concatenate([target, answer.tokens[:-1]])
        allowed = tolerance(name, dtype, before, plan, tokens)
        unturned = reference(name, before, plan, tokens, model=model, rotate=False)
        right = reference(name, before, plan, tokens, model=model)
        assert_same(answer, right, allowed)
        assert (unturned - right).abs().max() > 4 * allowed
        with pytest.raises(AssertionError):
            assert_same(answer, unturned, allowed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_first_layer_is_true(name: str, dtype: torch.dtype) -> None:
    """I3: in layer 0 rotary keys depend on token and position alone, so moved rows are those of a
    fresh prefill.

    A model may round cos, sin, two products and their sum: at most 4 u of a pair's length for each
    of the two rows it made (original and fresh); the splice rounds once more: 9 u. And a model's
    angles are fp32 products.
    """
    source, _, target = make(np.random.default_rng(8), [(5, 60, 2), (90, 91, 40)], NEW)
    model, rotary = plain_model(name, dtype), ROTARY[name]
    with engine(name, dtype) as made:
        ask(made, source, session="s")
        ask(made, target, session="s")
        found = session_rows(made)[0]
    true = fresh_rows(name, target, dtype)[0]
    for tensor, have, want in zip(("keys", "values"), found, true, strict=True):
        have, want = have.double(), want.double()
        width = rotary.width if tensor == rotary.tensor else 0
        # Rows are products of one token's embedding: batched or not, they can differ by their sums'
        # rounding.
        size = want.abs().max()
        assert ((have - want)[..., width:].abs() <= 8 * torch.finfo(dtype).eps * size).all()
        if width:
            half, unit = width // 2, torch.finfo(dtype).eps / 2
            if rotary.interleaved:
                pairs = [torch.complex(x[..., :width:2], x[..., 1:width:2]) for x in (have, want)]
            else:
                pairs = [torch.complex(x[..., :half], x[..., half:width]) for x in (have, want)]
            angles = 2 * len(source) * inv_freq(model)
            # As above: what the pair is made of can differ by its sums' rounding.
            bound = pairs[1].abs() * (9 * unit + 2.0**-23 * (angles + 4)) + 8 * unit * size
            assert ((pairs[0] - pairs[1]).abs() <= bound).all()


@pytest.mark.parametrize("way", ["moved", "copied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_chain(name: str, dtype: torch.dtype, way: str) -> None:
    """I2, I3, I4: five edits in a row, before and behind earlier ones, each over the rows that the
    last one left. The rows of the first prompt have then been turned up to five times and are
    within as many roundings of one turn."""
    rng = np.random.default_rng(9)
    pool = tokens_of(rng, 500).tolist()
    source = np.array(pool[:SOURCE])
    rest = pool[SOURCE:]
    turns: list[list[Edit]] = [
        [(60, 80, 3)],
        [(20, 30, 0)],  # before the last one
        [(100, 104, 12)],  # behind both
        [(0, 3, 5), (40, 58, 2)],
        [(90, 90, 7)],
    ]
    origin = np.arange(SOURCE)  # of each cached row, its place in the first prompt, or -1
    with engine(name, dtype, chunk=32) as made:
        ask(made, source, session="s")
        first = session_rows(made)
        for turn, edits in enumerate(turns):
            last = lineage(made)
            before = session_rows(made)
            if way == "copied":  # as if another request of the session still read the rows
                tree, holder = made.store.tree, made.store.tree.match(last.key).node
                made.call(partial(tree.lock, holder))
            directives, target, at = [], [], 0
            for start, end, n in edits:
                written, rest = rest[:n], rest[n:]
                directives.append(Directive(start, end, tuple(written)))
                target += [*last.tokens[at:start].tolist(), *written]
                at = end
            new, rest = rest[:9], rest[9:]
            prompt = np.array([*target, *last.tokens[at:].tolist(), *new])
            plan = segments(len(last.tokens), directives, len(new))
            explicit = tuple(directives) if turn % 2 else None
            answer = ask(made, prompt, greedy(4, ALL), "s", directives=explicit)
            report = answer.report
            assert report is not None and report.fallback is None
            assert (report.shared, report.moved, report.computed) == counts(plan), turn
            assert report.copied == (way == "copied")
            if way == "copied":
                made.call(partial(tree.unlock, holder))
            after = session_rows(made)
            check_rows(name, before, after, plan)
            tokens = np.concatenate([prompt, answer.tokens[:-1]])
            expected = reference(name, before, plan, tokens, model=plain_model(name, dtype))
            assert_same(
                answer, expected, tolerance(name, dtype, before, plan, tokens), f"turn {turn}"
            )

            moved_to = np.full(len(tokens), -1)
            for s in (s for s in plan if isinstance(s, Kept)):
                moved_to[s.dst : s.dst + s.n] = origin[s.src : s.src + s.n]
            origin = moved_to
            now = lineage(made)
            start_of_moved = next(
                s.dst for s in plan if isinstance(s, Kept) and (s.src, s.dst) != (0, 0)
            )
            assert now.exact <= start_of_moved
        assert lineage(made).max_rotations <= len(turns)
        final = session_rows(made)
    where = np.flatnonzero(origin >= 0)
    cuts = np.flatnonzero((np.diff(where) != 1) | (np.diff(origin[where]) != 1)) + 1
    runs = np.split(where, cuts)
    assert sum(len(run) for run in runs) > 100
    whole = [Kept(int(origin[run[0]]), int(run[0]), len(run)) for run in runs]
    # After each turn the next one starts from a rounded pair: errors add up, and a pair's length is
    # spread over both columns: twice the bound for one rounding, a turn.
    bound_rows(name, first, final, whole, 2 * len(turns))


def bound_rows(name: str, before: Rows, after: Rows, plan: Sequence[Kept], roundings: int) -> None:
    """As `check_rows`, but relative to the pair's length, as the rounding of one turn is turned by
    the next."""
    rotary, model = ROTARY[name], plain_model(name, before[0][0].dtype)
    for s in plan:
        old = [(k[s.src :][: s.n], v[s.src :][: s.n]) for k, v in before]
        exact = turned_rows(name, old, s.dst - s.src, model)
        for layer, ((ok, ov), (ek, ev)) in enumerate(zip(old, exact, strict=True)):
            k, v = (x[s.dst :][: s.n] for x in after[layer])
            o, e, n, fixed = (
                (ok, ek, k, (ov, v)) if rotary.tensor == "keys" else (ov, ev, v, (ok, k))
            )
            assert torch.equal(*fixed)
            assert torch.equal(o[..., rotary.width :], n[..., rotary.width :])
            error = (n.double() - e)[..., : rotary.width]
            length = e[..., : rotary.width].norm(dim=-1, keepdim=True)
            pairs: Tensor = error.abs()
            unit = torch.finfo(n.dtype).eps / 2 + 4 * 2.0**-24
            assert (pairs <= roundings * unit * length).all()


@pytest.mark.parametrize("asked", ["explicit", "derived"])
@pytest.mark.parametrize("width", [0, 5, 10_000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_repair(name: str, width: int, asked: str) -> None:
    """I4 with REPAIR(w): the first w kept tokens behind each edit are computed. w = 0 is AMORTIZE,
    w = all a fresh prefill."""
    mode = dict(mode=Mode.REPAIR, repair=width)
    source, directives, target = make(
        np.random.default_rng(10), [(30, 50, 3), (80, 90, 1)], NEW, **mode
    )
    plan = segments(SOURCE, directives, NEW)
    with engine(name, chunk=32) as made:
        ask(made, source, session="s")
        before = session_rows(made)
        if asked == "explicit":
            answer = ask(made, target, greedy(STEPS, ALL), "s", directives=directives)
        else:
            answer = ask(made, target, greedy(STEPS, ALL), "s", **mode)
        report = answer.report
        assert report is not None
        assert (report.shared, report.moved, report.computed) == counts(plan)
        tokens = np.concatenate([target, answer.tokens[:-1]])
        after = session_rows(made)
        check_rows(name, before, after, plan)
        assert_same(answer, reference(name, before, plan, tokens, model=plain_model(name)), 1e-4)
        from_scratch = fresh(name, target, answer.tokens)
        if width == 10_000:
            assert_same(answer, from_scratch, 1e-4)
            assert lineage(made).exact == len(lineage(made).tokens) and not marked(
                lineage(made).key
            )
        else:
            with pytest.raises(AssertionError):  # an amortized answer is another one
                assert_same(answer, from_scratch, 1e-4)


def test_directives_without_a_prompt() -> None:
    """I4: explicit directives alone: the prompt is what they make of the source."""
    source, directives, target = make(np.random.default_rng(11), [(40, 70, 7)], 0)
    with engine("llama") as made:
        ask(made, source, session="s")
        before = session_rows(made)
        answer = ask(made, None, greedy(STEPS, ALL), "s", directives=directives)
        tokens = np.concatenate([target, answer.tokens[:-1]])
        plan = segments(SOURCE, directives, 0)
        assert isinstance(answer.report, Report)
        assert (answer.report.prompt, answer.report.computed) == (len(target), 8)
        assert_same(
            answer, reference("llama", before, plan, tokens, model=plain_model("llama")), 1e-4
        )


def test_edits_ahead_of_the_next_request() -> None:
    """Design §5: edits applied while the agent waits; the next request finds them done and computes
    only what is new."""
    source, directives, target = make(np.random.default_rng(12), [(40, 70, 7)], NEW)
    with engine("llama") as made:
        ask(made, source, session="s")
        before = session_rows(made)
        done = ask(made, None, PREFILL, "s", directives=directives)
        assert done.report is not None and done.report.moved > 0 and done.tokens == []
        answer = ask(made, target, greedy(STEPS, ALL), "s")
        assert answer.report is not None
        assert (answer.report.moved, answer.report.computed) == (0, NEW)
        assert lineage(made).exact == 47, "rows behind a moved row are not exact"
        tokens = np.concatenate([target, answer.tokens[:-1]])
        plan: list[Kept | Fed] = [
            *segments(SOURCE, directives, 0)[:-1],  # its last segment is the last token alone,
            Fed(len(target) - NEW - 1, NEW + 1),  # computed in the first request
        ]
        assert_same(
            answer,
            reference("llama", before, plan, tokens, model=plain_model("llama"))[-STEPS:],
            1e-4,
        )


def test_sessions_own_running_request_is_not_disturbed() -> None:
    """I4: an edit while another request of the session decodes copies the rows; both answers are
    right."""
    source, directives, target = make(np.random.default_rng(13), [(40, 70, 7)], NEW)
    plan = segments(SOURCE, directives, NEW)
    with engine("llama") as made:
        ask(made, source, session="s")
        before = session_rows(made)
        channel = Channel("s")
        running = made.submit(Request(source, greedy(200, ALL), channel))
        events = running.events()
        running_head = [next(events), next(events)]
        assert isinstance(running_head[1], Delta)
        answer = ask(made, target, greedy(STEPS, ALL), "s", directives=directives)
        assert answer.report is not None and answer.report.copied
        tokens = np.concatenate([target, answer.tokens[:-1]])
        assert_same(
            answer, reference("llama", before, plan, tokens, model=plain_model("llama")), 1e-4
        )
        other = Answer(logprobs=[])
        for event in [*running_head, *events]:
            if isinstance(event, Delta):
                other.tokens += event.tokens
                other.logprobs += event.logprobs
        assert len(other.tokens) == 200
        assert_same(other, fresh("llama", source, other.tokens), 1e-4)
