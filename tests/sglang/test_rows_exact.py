"""Spliced rows on real servers: what doesn't turn is bitwise what it was (I2), what turns is an
fp64 rotation rounded once (I3), and the answer is that of a model that was given such rows (I4).

Rows are read from SGLang's pools before and after; expected values come from them, from the
checkpoint and from Transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Answer, Rows, Server
from reference import SETUPS, Case, Edit, Expected, Kept, Model, Setup, distributions, expected
from torch import Tensor

CASES = [
    Case("delete", 240, (Edit(100, 131),)),
    Case("grow", 240, (Edit(70, 73, 40),)),
    Case("one off", 240, (Edit(70, 71),)),
    Case("three", 320, (Edit(30, 40, 50), Edit(120, 190), Edit(250, 250, 3))),
    Case("back in place", 320, (Edit(40, 72), Edit(150, 150, 32))),
    Case("at 0", 240, (Edit(0, 33, 5),)),
]
STEP = {torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Distance of two neighbours in 1 to 2."""


@pytest.fixture(scope="session", params=SETUPS, ids=str)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture
def server(setup: Setup, servers: Any) -> Server:
    """With an empty cache: prompts that begin alike share rows."""
    server = setup.start(servers)
    server.flush()
    return server


@pytest.fixture
def model(setup: Setup, checkpoint: Callable[..., Path]) -> Model:
    return Model(checkpoint(setup.kind, setup.dtype))


@dataclass(frozen=True)
class Spliced:
    """A case, carried out: rows of the source as its own request left them, and of the prompt."""

    plan: Expected
    source: Rows
    prompt: list[int]
    rows: Rows
    answer: Answer


def splice(server: Server, setup: Setup, case: Case, n: int = 1, others: bool = False) -> Spliced:
    """others: somebody else uses the source too, so its rows are copied."""
    name = f"{setup} {case.name} {n} {others}".replace(" ", "-")
    source, prompt = case.prompts(name)
    session = {"session": name}
    server.generate(source, 1, session, probe=f"{name}-source")
    before = server.rows(f"{name}-source")
    assert before.ids == source
    if others:
        server.generate(source)
    answer = server.generate(
        prompt, n, session, probe=f"{name}-prompt", return_logprob=True, top_logprobs_num=2
    )
    after = server.rows(f"{name}-prompt")
    plan = expected(case.edits, len(source), case.new, setup.page)
    assert answer.report["tokens"] == plan.tokens
    assert answer.report["copied"] == (others or setup.page > 1 or not is_run(plan.kept))
    assert after.ids == prompt + answer.ids[: len(after.ids) - len(prompt)]
    return Spliced(plan, before, prompt, after, answer)


def is_run(kept: tuple[Kept, ...]) -> bool:
    """Whether these rows follow one another. Of several runs only the last one moves, if it can:
    till then the source's rows are needed where they are."""
    return all(one.dst + one.n == other.dst for one, other in pairwise(kept))


def bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32 if rows.element_size() == 4 else torch.int16)


def assert_bitwise(rows: Tensor, others: Tensor) -> None:
    assert torch.equal(bits(rows), bits(others))


@pytest.mark.parametrize("others", [False, True], ids=["moved", "copied"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_rows(setup: Setup, server: Server, model: Model, case: Case, others: bool) -> None:
    """I2: shared rows are the same slots; of kept rows, latents and values are bitwise the same.
    I3: their rotary columns are an fp64 rotation by the shift, rounded once."""
    spliced = splice(server, setup, case, others=others)
    plan, source, rows = spliced.plan, spliced.source, spliced.rows
    assert torch.equal(rows.slots[: plan.shared], source.slots[: plan.shared])
    for layer in range(len(rows.keys)):
        assert_bitwise(rows.keys[layer][: plan.shared], source.keys[layer][: plan.shared])
        assert_bitwise(rows.values[layer][: plan.shared], source.values[layer][: plan.shared])
    off = 0
    for i, kept in enumerate(plan.kept):
        src, dst = slice(kept.src, kept.src + kept.n), slice(kept.dst, kept.dst + kept.n)
        moved = torch.equal(rows.slots[dst], source.slots[src])
        assert moved == (not others and setup.page == 1 and is_run(plan.kept[i:]))
        for layer in range(len(rows.keys)):
            before, after = source.keys[layer][src], rows.keys[layer][dst]
            assert_bitwise(rows.values[layer][dst], source.values[layer][src])
            assert_bitwise(after[..., : model.latent], before[..., : model.latent])
            if kept.dst == kept.src:
                assert_bitwise(after, before)
            off += turned_as_far_as_rounding(model, before, after, kept.dst - kept.src)
    elements = sum(kept.n for kept in plan.kept) * sum(keys[0].numel() for keys in rows.keys)
    # Where the fp64 value is next to the middle between two neighbours, fp32 arithmetic before the
    # rounding can decide for the other one: with 16 and 13 fewer bits, in one of thousands.
    assert source.keys[0].dtype == torch.float32 or off < elements / 500, off / elements


def turned_as_far_as_rounding(model: Model, before: Tensor, after: Tensor, by: int) -> int:
    """Fails if a key is not the one before, turned in fp64 and rounded once; returns how many
    elements are the other neighbour."""
    exact = model.turned(before, by)
    wrong = (after.double() - exact).abs()
    # Half a step of the element itself, and what fp32 gives before it is rounded: steps of the
    # pair, which an element can be much smaller than; and SGLang's frequencies, fp32 themselves,
    # put an angle of `by` off by that many half steps at most.
    pair = pair_norms(model, before)
    fp32 = STEP[torch.float32]
    allowed = STEP[after.dtype] / 2 * two_to_the_floor(exact) + pair * fp32 * (2 + abs(by) / 2)
    if after.dtype == torch.float16:
        allowed += 2**-25  # half of its smallest number
    worst = (wrong / allowed).max()
    assert worst <= 1.01, f"{worst:.3f} of what rounding explains"
    return int((after != exact.to(after.dtype)).sum())


def two_to_the_floor(x: Tensor) -> Tensor:
    return torch.exp2(x.abs().clamp_min(1e-30).log2().floor() + 1)


def pair_norms(model: Model, keys: Tensor) -> Tensor:
    """For each element, the length of the pair that turns it; 0 for those that don't turn."""
    keys = keys.double()
    still, turns = keys.split([model.latent, keys.shape[-1] - model.latent], -1)
    if model.latent:
        norms = turns.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    else:
        norms = turns.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 2)
    return torch.cat([torch.zeros_like(still), norms], -1)


def distance(rows: Tensor, truth: Tensor, latent: int) -> float:
    """Relative, over the columns that turn."""
    wrong = (rows.double() - truth)[..., latent:]
    return float(wrong.norm() / truth[..., latent:].norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_first_layer(setup: Setup, server: Server, model: Model, case: Case) -> None:
    """I3: keys of the first layer, which no other token has a part in, are those that the weights
    give at the new positions: as close as SGLang's own, and far from those of positions one off."""
    spliced = splice(server, setup, case, others=True)
    positions = torch.arange(len(spliced.prompt))
    truth = model.first_keys(spliced.prompt, positions)
    one_off = model.first_keys(spliced.prompt, positions + 1)
    keys = spliced.rows.keys[0][: len(spliced.prompt)]
    kept = torch.cat([torch.arange(k.dst, k.dst + k.n) for k in spliced.plan.kept])
    computed = torch.ones(len(positions), dtype=torch.bool)
    computed[kept] = False
    own = distance(keys[computed], truth[computed], model.latent)
    step = STEP[keys.dtype]
    assert own < 4 * step + 2e-5, f"SGLang's own prefill is {own} off"
    assert distance(keys[kept], truth[kept], model.latent) < 1.5 * own + step / 4 + 5e-6
    assert distance(keys[kept], one_off[kept], model.latent) > 0.1
    latents = (keys[kept].double() - truth[kept])[..., : model.latent]
    assert latents.numel() == 0 or latents.norm() < (4 * step + 2e-5) * truth[kept].norm()


@pytest.mark.parametrize("others", [False, True], ids=["moved", "copied"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answer(setup: Setup, server: Server, model: Model, case: Case, others: bool) -> None:
    """I4: the answer and its log-probabilities are those of Transformers, running what is new over
    the rows from before the edit, turned in fp64."""
    spliced = splice(server, setup, case, 12, others)
    ids = spliced.answer.ids
    truth = distributions(model, spliced.plan, spliced.source, spliced.prompt, ids)
    found = torch.tensor(spliced.answer.logprobs, dtype=torch.float64)
    wrong = found - chosen(truth, ids)
    if setup.dtype == "float32":
        assert wrong.abs().max() < 1e-3 and truth.argmax(-1).tolist() == ids
        still = distributions(model, spliced.plan, spliced.source, spliced.prompt, ids, turn=False)
        assert (found - chosen(still, ids)).abs().max() > 0.02, "a turn makes no difference here"
        return
    noise = own_noise(server, setup, model)
    assert rms(wrong) < 2 * rms(noise), (wrong, noise)
    best = truth.topk(2, -1)
    clear = best.values[:, 0] - best.values[:, 1] > 2 * noise.abs().max()
    assert (best.indices[:, 0] == torch.tensor(ids))[clear].all(), (best, ids)


def chosen(distribution: Tensor, ids: list[int]) -> Tensor:
    return distribution[torch.arange(len(ids)), torch.tensor(ids)]


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


NOISE: dict[Setup, Tensor] = {}


def own_noise(server: Server, setup: Setup, model: Model) -> Tensor:
    """How far SGLang's log-probabilities are from Transformers' in fp32 where nothing is spliced:
    16 bits, and with them now and then another expert."""
    found = []
    for n in (150, 200, 250) if setup not in NOISE else ():
        _, prompt = Case(f"{setup} noise", n, ()).prompts(str(n))
        answer = server.generate(prompt, 12, return_logprob=True)
        nothing = Rows([], torch.empty(0), [], [])
        truth = distributions(model, Expected(0, (), len(prompt)), nothing, prompt, answer.ids)
        found.append(torch.tensor(answer.logprobs, dtype=torch.float64) - chosen(truth, answer.ids))
    return NOISE.setdefault(setup, torch.cat(found) if found else torch.empty(0))
