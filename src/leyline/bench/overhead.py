"""What Leyline costs a request that does not use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from leyline.bench.row import Row
from leyline.bench.timing import paired, seconds

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

WITHIN = 0.02


def switched_off(engine: Engine) -> Engine:
    """Another engine over the same weights, with `Config(directives=False)`. Not to be used while
    the first one runs something."""
    from leyline.engine.engine import Engine as Other

    model = engine.model
    model.set_attn_implementation("sdpa")  # type: ignore[operator]  # engines set their own again
    return Other(model, engine.tokenizer, replace(engine.config, directives=False), engine.name)


def run(
    engine: Engine,
    off: Engine,
    prompt: np.ndarray,
    new: int,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """off: from `switched_off`."""
    from leyline.engine.request import Sampling

    sampling = Sampling(max_tokens=new, ignore_eos=True)

    def plain(which: Engine) -> float:
        which.reset()
        return seconds(lambda: which.generate(prompt, sampling))

    plain(engine), plain(off)
    pairs = []
    for i in range(repeats):
        say(f"{i + 1} of {repeats}")
        if i % 2:  # whoever comes first has the colder caches
            pairs.append((plain(engine), plain(off)))
        else:
            second = plain(off)
            pairs.append((plain(engine), second))
    ours, without, ratio = paired(pairs)
    return [
        Row(
            "overhead",
            f"plain request ({len(prompt)} + {new} tokens) / the same with Leyline switched off",
            ratio,
            at_least=1 - WITHIN,
            at_most=1 + WITHIN,
            details={"with_s": ours, "without_s": without, "pairs": pairs},
        )
    ]
