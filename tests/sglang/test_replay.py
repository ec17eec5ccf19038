"""`leyline replay` against real SGLang, with and without the plugin: counts and first tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))

from checkpoints import tiny_tokenizer
from harness import Server
from made_up import session

from leyline.replay.run import Options, replay_on

SESSIONS = [session(seed, turns=5) for seed in range(4)]
OPTIONS = Options(concurrency=(1, 4), keep=2)
COUNTS = "--enable-cache-report"


def test_with_the_plugin(servers: Any) -> None:
    """Each arm hits what can be hit, and FORGET answers as a fresh engine does (I5)."""
    server = servers("gqa", COUNTS)
    results = replay_on(server.url, SESSIONS, OPTIONS, tokenizer=tiny_tokenizer())
    assert results.errors == {} and results.server.flush == "/flush_cache"
    assert results.server.sessions and results.server.counts
    assert len(results.lines) == 8
    for line in results.lines:
        assert line.calls == line.compared == 20 and line.fallbacks == {}
        assert line.prompt == line.ceiling_prompt, "the tokenizer is the server's"
        assert line.hit_rate is not None and line.ceiling is not None
        assert abs(line.hit_rate - line.ceiling) < 0.01, line
    by_arm = {(line.arm, line.concurrency): line for line in results.lines}
    for n in (1, 4):
        splice, truncate = by_arm["splice", n], by_arm["truncate", n]
        assert splice.moved > 0 and splice.edits > 0 and truncate.moved == 0
        assert splice.computed is not None and truncate.computed is not None
        assert splice.computed < 0.9 * truncate.computed
    for each in results.comparisons:
        if each.arm == "forget":
            assert each.agreement == 1.0 and each.known == each.edited == 8


def test_without_the_plugin(servers: Any) -> None:
    """What the last prompts of `append` are too long for is left out of every arm."""
    server = servers("gqa", COUNTS, "--context-length", "290", plugin=False)
    results = replay_on(server.url, SESSIONS, OPTIONS, tokenizer=tiny_tokenizer())
    assert results.errors == {} and not results.server.sessions
    append, truncate = results.lines[:2]
    assert (append.arm, truncate.arm) == ("append", "truncate")
    assert 0 < append.answered < 20 and append.left_out == 20 - append.answered
    assert append.compared == truncate.compared == append.answered < truncate.answered
    for line in results.lines:
        assert line.hit_rate is not None and line.ceiling is not None
        assert abs(line.hit_rate - line.ceiling) < 0.01, line


def test_a_server_that_does_not_count(server: Server) -> None:
    """Without its flag SGLang says what was cached in reports only: no hit rate for plain requests,
    rather than none cached."""
    options = Options(arms=("truncate", "splice"), keep=2, calls=2)
    results = replay_on(server.url, SESSIONS, options)
    truncate, splice = results.lines
    assert (truncate.answered, truncate.hit_rate, truncate.computed) == (8, None, None)
    assert splice.hit_rate is not None and splice.hit_rate > 0.2
    assert "--enable-cache-report" in results.markdown()
