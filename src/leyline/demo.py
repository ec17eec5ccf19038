"""The demo: one recorded agent session, old tool outputs dropped as it goes, served twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyline.replay import Arm, ArmResult, Turn, TurnResult, fitting, replay, turns_of
from leyline.traces import Session, load_traces

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

SESSION = "0d858f596973"
KEEP = 2
ARMS: tuple[Arm, ...] = ("prefix", "leyline")
MEMORY_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Demo:
    """Both arms of one replay. left_out: calls that the model has no positions for."""

    model: str
    session: str
    keep: int
    prefix: ArmResult
    leyline: ArmResult
    left_out: int

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "session": self.session,
            "keep": self.keep,
            "arms": {arm.arm: _arm_json(arm) for arm in (self.prefix, self.leyline)},
        }


def find_session(name: str, file: Path | None = None) -> Session:
    """A recorded session by its id. Raises ValueError that lists the ids there are."""
    sessions = {session.id: session for session in load_traces(file)}
    if name not in sessions:
        raise ValueError(f"no session {name!r}; there are {', '.join(sessions) or 'none'}")
    return sessions[name]


def load(path: Path, name: str) -> Engine:
    """The engine that both arms run on."""
    from leyline.engine.engine import Config, Engine

    return Engine.load(path, config=Config(memory_gib=MEMORY_GIB), name=name)


def run(
    engine: Engine,
    session: Session,
    *,
    keep: int = KEEP,
    turns: int | None = None,
    on_plan: Callable[[Sequence[Turn]], None] = lambda turns: None,
    on_turn: Callable[[Arm, TurnResult], None] = lambda arm, result: None,
) -> Demo:
    """Replay the session's first `turns` calls, all by default, once in each arm.

    Raises ValueError for a session of which not one call fits into the model.
    """
    planned = turns_of(engine.tokenizer, session, keep=keep)[:turns]
    fit = fitting(planned, engine.max_tokens)
    if fit == 0:
        raise ValueError(
            f"session {session.id}: not one call fits into the {engine.max_tokens} tokens "
            f"that {engine.name} takes"
        )
    left_out, planned = len(planned) - fit, planned[:fit]
    on_plan(planned)
    _warm_up(engine, planned[0])
    results = {}
    for arm in ARMS:
        engine.reset()
        results[arm] = replay(engine, planned, arm, session.id, partial(on_turn, arm))
    engine.reset()
    return Demo(engine.name, session.id, keep, results["prefix"], results["leyline"], left_out)


def _warm_up(engine: Engine, turn: Turn) -> None:
    """The first passes of a process set things up; they belong to neither arm."""
    from leyline.engine.request import Sampling

    engine.generate(turn.prompt, Sampling(max_tokens=2, ignore_eos=True))


def _arm_json(arm: ArmResult) -> dict[str, Any]:
    return {
        "prompt_tokens": arm.prompt_tokens,
        "cached_tokens": arm.cached_tokens,
        "computed_tokens": arm.computed_tokens,
        "ttft_s": arm.ttft_s,
        "turns": [asdict(turn) for turn in arm.turns],
    }
