"""debug-gym's Python where its environment was made, and what an episode looks like."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyline.evals.gym import ENVIRONMENT, VARIABLE
from leyline.evals.store import Episode

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def debug_gym_python() -> Path:
    """Skips where the environment is missing: it needs a Python of its own."""
    named = os.environ.get(VARIABLE)
    python = Path(named) if named else ROOT / ENVIRONMENT / "bin" / "python"
    if not python.is_file():
        pytest.skip("debug-gym's environment is missing: make env-debug-gym")
    return python


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """An episode like any other, but for what is given."""

    def made(**given: Any) -> Episode:
        facts: dict[str, Any] = dict(
            arm="append",
            task="purr",
            seed=0,
            solved=True,
            reason="solved",
            turns=10,
            prompt=1000,
            cached=800,
            completion=50,
            moved=0,
            edits=0,
            fallbacks={},
            model_s=2.0,
            wall_s=5.0,
        )
        return Episode(**{**facts, **given})

    return made
