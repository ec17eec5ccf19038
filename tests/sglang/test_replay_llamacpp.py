"""`leyline replay` against llama.cpp's server, which is in this environment too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))

from made_up import session

from leyline.bench.served import Served, free_port
from leyline.models import smollm2
from leyline.replay.run import Options, replay_on

CONTEXT = 512


@pytest.mark.parametrize("reuse", [0, 64])
def test_counts_and_limits(reuse: int) -> None:
    """It counts in its own manner, knows no sessions, and refuses what its slot has no room for."""
    gguf, port = str(smollm2._gguf_file()), free_port()
    line = [sys.executable, "-m", "leyline.proof.llamacpp", gguf, str(port), str(reuse)]
    recorded = [session(1, turns=4, output=25), session(2, turns=3, output=400)]
    with Served([*line, str(CONTEXT), "2"], port):
        results = replay_on(f"http://127.0.0.1:{port}", recorded, Options())
    server = results.server
    assert (server.kind, server.sessions, server.counts, server.flush) == (
        "llamacpp",
        False,
        True,
        None,
    )
    append, truncate = results.lines
    assert (append.arm, truncate.arm) == ("append", "truncate") and results.errors == {}
    for found in results.lines:
        assert (found.answered, found.left_out) == (5, 2)
        assert found.hit_rate is not None and 0.2 < found.hit_rate < 1
    assert all(pair.known == pair.edited > 0 for pair in results.comparisons)
