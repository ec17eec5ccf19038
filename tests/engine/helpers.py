"""What the engine's tests share: engines of a given number of slots, a look at cached rows, and a
reference splice that is built from Transformers and fp64 arithmetic alone.

Nothing of `leyline.layout`, `leyline.rope`, `leyline.rotate` or `leyline.plan` is used for expected
values: where the rotary columns are is written down in ROTARY, from Transformers' source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from leyline.channel import Channel
from leyline.directive import Directive, Mode
from leyline.engine.engine import GIB, Answer, Config, Engine
from leyline.engine.request import Request, Sampling
from leyline.engine.tree import Node
from leyline.layout import layout_of
from leyline.lineage import MARK_BITS, Lineage
from leyline.tiny import TINY, VOCAB, tiny_model

ARCHITECTURES = sorted(TINY)
ALL = VOCAB
"""`logprobs=ALL` returns the whole distribution."""


@dataclass(frozen=True)
class Rotary:
    """Which cached columns of an architecture turn: the first `width` of `tensor`, but in layers
    `still`."""

    tensor: Literal["keys", "values"]
    width: int
    interleaved: bool = False
    still: tuple[int, ...] = ()


ROTARY = {
    "deepseek_v2": Rotary("values", 64, interleaved=True),
    "glm4": Rotary("keys", 64, interleaved=True),
    "glm4_moe_lite": Rotary("values", 64),
    "gpt_neox": Rotary("keys", 16),
    "joyai_flash": Rotary("values", 64),
    "llama": Rotary("keys", 64),
    "moonlight": Rotary("values", 64),
    "phi": Rotary("keys", 32),
    "qwen3": Rotary("keys", 128),
    "smollm3": Rotary("keys", 16, still=(3,)),
}

_ALL_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=8)
_EXPERTS = ("deepseek_v2", "glm4_moe_lite", "joyai_flash", "moonlight")


@cache
def _build(name: str, dtype: torch.dtype, what_for: str) -> Any:
    # Every expert is used: with a choice among them, one rounding more or less can switch an
    # expert, and no tolerance would be right. It has no bearing on cached rows.
    return tiny_model(name, dtype, **(_ALL_EXPERTS if name in _EXPERTS else {}))


def plain_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model as Transformers runs it; an engine never touches it."""
    return _build(name, dtype, "reference")


def engine_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights, for engines."""
    return _build(name, dtype, "engine")


@contextmanager
def engine(
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    slots: int = 4096,
    tokenizer: Any = None,
    **config: Any,
) -> Iterator[Engine]:
    """An engine with `slots` slots."""
    model = engine_model(name, dtype)
    model.set_attn_implementation("sdpa")  # the last engine left its own
    row = layout_of(model).row_elements * dtype.itemsize
    settings = Config(memory_gib=(slots + 0.5) * row / GIB, **config)
    with Engine(model, tokenizer, settings, name) as made:
        assert made.store.pool.capacity == slots
        yield made
        if not made._closing:
            check_slots(made)


# -- requests ---------------------------------------------------------------------------------


PREFILL = Sampling(max_tokens=0)


def greedy(n: int, logprobs: int | None = None) -> Sampling:
    return Sampling(max_tokens=n, ignore_eos=True, logprobs=logprobs)


def tokens_of(rng: np.random.Generator, n: int) -> np.ndarray:
    """n different tokens (3 to VOCAB - 1) in random order: derived edits have one solution."""
    return rng.permutation(np.arange(3, VOCAB))[:n].astype(np.int64)


def ask(
    made: Engine,
    prompt: np.ndarray | None,
    sampling: Sampling = PREFILL,
    session: str | None = None,
    **channel: Any,
) -> Answer:
    """One request to its end."""
    through = None if session is None else Channel(session, **channel)
    return made.submit(Request(prompt, sampling, through)).result()


def distribution(answer: Answer) -> Tensor:
    """Log-probabilities `[steps, VOCAB]` fp64 of an answer asked for with `logprobs=ALL`."""
    out = torch.full((len(answer.logprobs), VOCAB), float("nan"), dtype=torch.float64)
    for row, each in zip(out, answer.logprobs, strict=True):
        for token, value in each.top:
            row[token] = value
    assert not out.isnan().any()
    return out


# -- a look inside -------------------------------------------------------------------------------


Rows = list[tuple[Tensor, Tensor]]
"""Per layer keys and values, `[tokens, heads, columns]`."""


def lineage(made: Engine, session: str = "s", owner: str = "") -> Lineage:
    found = made.call(lambda: made.store.lineages.get(owner, session))
    assert found is not None
    return found


def rows_of(made: Engine, key: np.ndarray) -> Rows:
    """Copies of the cached rows of a key, all of which must be there."""

    def read() -> Rows:
        slots = torch.from_numpy(made.store.tree.match(key).slots)
        assert len(slots) == len(key), f"{len(slots)} of {len(key)} rows are cached"
        both = zip(made.store.planes.keys, made.store.planes.values, strict=True)
        return [(k[slots].clone(), v[slots].clone()) for k, v in both]

    return made.call(read)


def session_rows(made: Engine, session: str = "s", owner: str = "") -> Rows:
    """Copies of the rows of a session's lineage."""
    return rows_of(made, lineage(made, session, owner).key)


def check_slots(made: Engine) -> None:
    """I7 at a quiet moment, and that no slot is named twice."""

    def check() -> None:
        store, stats = made.store, made._stats()
        assert (stats.running, stats.waiting) == (0, 0)
        cached = np.concatenate(
            [np.zeros(0, np.int64), *(node.slots for node in store.tree.nodes())]
        )
        every = np.concatenate([cached, store.pool.free_slots()])
        assert np.array_equal(np.sort(every), np.arange(stats.capacity)), (
            "a slot is lost or named twice"
        )
        assert stats.free + stats.cached + stats.private == stats.capacity
        assert (stats.private, len(cached), store.tree.locked) == (0, stats.cached, 0)
        assert all(node.locks == 0 for node in store.tree.nodes())

    made.call(check)


def nodes_of(made: Engine) -> list[tuple[np.ndarray, Node]]:
    """All nodes of the tree, each with the whole key down to its end."""

    def walk() -> list[tuple[np.ndarray, Node]]:
        tree = made.store.tree
        return [(np.concatenate([n.key for n in node.path()]), node) for node in tree.nodes()]

    return made.call(walk)


def snapshot(made: Engine) -> Any:
    """Everything that a request could have changed: cached keys and slots, free slots, sessions,
    rows."""

    def take() -> Any:
        store = made.store
        cached = {
            int(slot): tuple(whole[: len(whole) - len(node.key) + i + 1].tolist())
            for node in store.tree.nodes()
            for whole in [np.concatenate([n.key for n in node.path()])]
            for i, slot in enumerate(node.slots)
        }
        sessions = [(x.owner, x.session, x.key.tolist(), x.spans, x.edits) for x in store.lineages]
        rows = [stack.rows.clone() for stack in store.planes.stacks]
        return cached, store.pool.free_slots().tolist(), sorted(sessions), rows

    return made.call(take)


def assert_unchanged(before: Any, after: Any) -> None:
    """Two snapshots are the same, rows bitwise."""
    assert before[:3] == after[:3]
    assert all(torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))


def marked(key: np.ndarray) -> bool:
    """Whether a mark stands anywhere in a key."""
    return bool((key >> MARK_BITS).any())


def unmarked(key: np.ndarray) -> np.ndarray:
    """The tokens of a key."""
    return key & ((1 << MARK_BITS) - 1)


# -- the reference splice ----------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """Source rows `[src, src + n)` at target position `dst`."""

    src: int
    dst: int
    n: int


@dataclass(frozen=True)
class Fed:
    """Target tokens `[dst, dst + n)` run through the model."""

    dst: int
    n: int


def segments(
    source: int, edits: Sequence[Directive], new: int, available: int | None = None
) -> list[Kept | Fed]:
    """How `edits` (sorted) of `source` rows and `new` tokens behind them are to be executed:
    written down token by token, from design §1, to check the engine's plans against. available:
    only so many rows are still cached."""
    available = source if available is None else available
    plan: list[int | None] = []  # per target token its source row, None if it is computed
    at, repair = 0, 0
    for edit in [*edits, None]:
        for row in range(at, edit.start if edit else source):
            plan.append(None if repair or row >= available else row)
            repair = max(0, repair - 1)
        if edit:
            plan += [None] * len(edit.replacement)
            repair = max(repair, edit.repair if edit.mode == Mode.REPAIR else 0)
            at = edit.end
    plan += [None] * new
    plan[-1] = None
    out: list[Kept | Fed] = []
    for dst, kept in enumerate(plan):
        last = out[-1] if out else None
        if kept is None and isinstance(last, Fed):
            out[-1] = Fed(last.dst, last.n + 1)
        elif kept is None:
            out.append(Fed(dst, 1))
        elif isinstance(last, Kept) and last.src + last.n == kept:
            out[-1] = Kept(last.src, last.dst, last.n + 1)
        else:
            out.append(Kept(kept, dst, 1))
    return out


def inv_freq(model: Any) -> Tensor:
    """The frequencies that a model runs with, fp64."""
    found = [b for name, b in model.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    return found[0].double()


def turned(name: str, rows: Tensor, delta: int, model: Any) -> Tensor:
    """Rows `[n, heads, columns]` with their rotary columns at `delta` positions further on, in
    fp64."""
    rotary = ROTARY[name]
    angle = delta * inv_freq(model)
    cos, sin = angle.cos(), angle.sin()
    out = rows.double().clone()
    width = rotary.width
    if rotary.interleaved:
        first, second = slice(0, width, 2), slice(1, width, 2)
    else:
        first, second = slice(0, width // 2), slice(width // 2, width)
    x, y = rows[..., first].double(), rows[..., second].double()
    out[..., first], out[..., second] = x * cos - y * sin, x * sin + y * cos
    return out


def turned_rows(name: str, rows: Rows, delta: int, model: Any) -> list[tuple[Tensor, Tensor]]:
    """All layers' rows at `delta` positions further on, fp64."""
    rotary, out = ROTARY[name], []
    for layer, (k, v) in enumerate(rows):
        k, v = k.double(), v.double()
        if layer not in rotary.still:
            k = turned(name, k, delta, model) if rotary.tensor == "keys" else k
            v = turned(name, v, delta, model) if rotary.tensor == "values" else v
        out.append((k, v))
    return out


@torch.inference_mode()
def reference(
    name: str,
    source: Rows,
    plan: Sequence[Kept | Fed],
    tokens: np.ndarray,
    *,
    model: Any,
    rotate: bool = True,
) -> Tensor:
    """Log-probabilities fp64 `[rest, VOCAB]` that follow each of the tokens of the last segment and
    those behind it.

    source: the original rows. tokens: the target and, behind it, an answer. A DynamicCache is
    filled segment by segment: kept rows are turned in fp64 and rounded once, everything else is run
    by Transformers over what is there by then.
    """
    dtype = model.get_input_embeddings().weight.dtype
    cached = DynamicCache(config=model.config)
    logits = torch.empty(0)
    for segment in plan:
        if isinstance(segment, Kept):
            part = [
                (k[segment.src :][: segment.n], v[segment.src :][: segment.n]) for k, v in source
            ]
            shift = segment.dst - segment.src if rotate else 0
            for layer, (k, v) in enumerate(turned_rows(name, part, shift, model)):
                cached.update(
                    k.to(dtype).transpose(0, 1)[None], v.to(dtype).transpose(0, 1)[None], layer
                )
            continue
        end = len(tokens) if segment is plan[-1] else segment.dst + segment.n
        logits = run(model, tokens[segment.dst : end], segment.dst, cached)
    assert isinstance(plan[-1], Fed)
    return logits.double().log_softmax(-1)[plan[-1].n - 1 :]


@torch.inference_mode()
def fresh_rows(name: str, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> Rows:
    """The rows of a prefill by Transformers."""
    model = plain_model(name, dtype)
    cached = DynamicCache(config=model.config)
    run(model, tokens, 0, cached)
    return [(x.keys[0].transpose(0, 1), x.values[0].transpose(0, 1)) for x in cached.layers]  # type: ignore[union-attr, index]


@torch.inference_mode()
def run(model: Any, tokens: np.ndarray, at: int = 0, cached: DynamicCache | None = None) -> Tensor:
    """Transformers' logits `[n, VOCAB]` for tokens at positions from `at` on, behind what is
    cached."""
    out = model(
        input_ids=torch.from_numpy(tokens)[None],
        position_ids=torch.arange(at, at + len(tokens))[None],
        past_key_values=cached,
        use_cache=cached is not None,
    )
    return out.logits[0]


def fresh(
    name: str, prompt: np.ndarray, answer: Sequence[int], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Log-probabilities fp64 `[len(answer), VOCAB]` of a fresh Transformers forward."""
    tokens = np.concatenate([prompt, np.array(answer[:-1], dtype=np.int64)])
    return run(plain_model(name, dtype), tokens).double().log_softmax(-1)[len(prompt) - 1 :]


def generated(
    name: str, prompt: np.ndarray, n: int, dtype: torch.dtype = torch.float32
) -> list[int]:
    """Greedy answer by plain forwards over the whole text, without any cache."""
    tokens = prompt
    for _ in range(n):
        tokens = np.append(tokens, int(run(plain_model(name, dtype), tokens)[-1].argmax()))
    return [int(token) for token in tokens[len(prompt) :]]


def assert_same(answer: Answer, expected: Tensor, tolerance: float, what: str = "") -> None:
    """The answer's distributions are the expected ones, and each of its tokens is the most likely
    one (up to where the expected ones are closer together than the tolerance)."""
    found = distribution(answer)
    assert found.shape == expected.shape
    error = float((found - expected).abs().max())
    assert error <= tolerance, f"{what}: log-probabilities are off by {error:.3g} > {tolerance:.3g}"
    chosen = expected[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
    behind = float((expected.max(-1).values - chosen).max())
    assert behind <= 2 * tolerance, f"{what}: a token is {behind:.3g} behind the most likely one"
