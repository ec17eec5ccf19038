"""`leyline replay` against real SGLang, with and without the plugin: counts and first tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "replay"))

from checkpoints import tiny_tokenizer
from made_up import session

from leyline.replay.numbers import Line
from leyline.replay.run import Options, replay_on

SESSIONS = [session(seed, turns=5) for seed in range(4)]
OPTIONS = Options(concurrency=(1, 4), keep=2)
COUNTS = "--enable-cache-report"


def lines(server: Any, options: Options = OPTIONS) -> dict[tuple[str, int], Line]:
    results = replay_on(server.url, SESSIONS, options, tokenizer=tiny_tokenizer())
    assert results.server.kind == "sglang" and not results.errors
    return {(line.arm, line.concurrency): line for line in results.lines}


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
            assert each.agreement == 1.0 and each.known == 20


def test_without_the_plugin(servers: Any) -> None:
    found = lines(servers("gqa", COUNTS, plugin=False))
    assert set(found) == {(arm, n) for arm in ("append", "truncate") for n in (1, 4)}
    for line in found.values():
        assert line.hit_rate is not None and line.ceiling is not None
        assert abs(line.hit_rate - line.ceiling) < 0.01, line


def test_a_server_that_does_not_count(servers: Any) -> None:
    """Without its flag SGLang doesn't say what was cached: no hit rate, rather than none cached."""
    options = Options(arms=("truncate",), keep=2, calls=2)
    results = replay_on(servers("gqa", plugin=False).url, SESSIONS, options)
    (line,) = results.lines
    assert (line.answered, line.hit_rate, line.computed) == (8, None, None)
    assert "--enable-cache-report" in results.markdown()


def test_prompts_too_long_are_left_out(servers: Any) -> None:
    server = servers("gqa", COUNTS, "--context-length", "700", plugin=False)
    results = replay_on(server.url, SESSIONS, Options(keep=2))
    assert results.errors == {}
    append, truncate = results.lines
    assert 0 < append.answered < 20 and append.left_out == 20 - append.answered
    assert append.compared == truncate.compared == append.answered <= truncate.answered
