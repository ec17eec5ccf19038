"""`leyline replay` against the embedded server over real HTTP: counts, never times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import session
from tiny_server import Running, running, tiny_engine

from leyline.replay import Arm as Way
from leyline.replay import Turn, turns_of
from leyline.replay import replay as replay_in_process
from leyline.replay.arms import ARMS, Arm, jobs_of, messages_of
from leyline.replay.ceiling import ceiling
from leyline.replay.client import Client
from leyline.replay.loop import Run
from leyline.replay.numbers import Line
from leyline.replay.report import Results
from leyline.replay.run import Options, replay_on
from leyline.replay.server import look
from leyline.traces import Session, take

KEEP = 2


@pytest.fixture(scope="module")
def results(server: Running) -> Results:
    """All arms, one session at once and four."""
    recorded = [session(seed) for seed in range(5)]
    return replay_on(
        server.url,
        recorded,
        Options(concurrency=(1, 4), keep=KEEP),
        tokenizer=server.engine.tokenizer,
    )


def line(results: Results, arm: str, concurrency: int = 1) -> Line:
    (found,) = [x for x in results.lines if (x.arm, x.concurrency) == (arm, concurrency)]
    return found


def test_all_calls_are_answered_and_counts_add_up(results: Results) -> None:
    assert [(x.concurrency, x.arm) for x in results.lines] == [
        (concurrency, arm) for concurrency in (1, 4) for arm in ARMS
    ]
    for x in results.lines:
        assert x.calls == x.answered == x.compared == 30
        assert (x.errors, x.left_out, x.fallbacks) == (0, 0, {})
        assert x.cached is not None and x.prompt == x.cached + (x.computed or 0)
        assert x.ttft is not None and x.e2e is not None
        assert 0 < x.ttft.p50 <= x.e2e.p50 and x.ttft.p50 <= x.ttft.p95
        assert x.ttft.total <= x.e2e.total
    server = results.server
    assert (server.kind, server.model, server.sessions) == ("leyline", "tiny", True)
    assert server.counts and server.flush is None
    for run in results.runs:
        for outcome in run.outcomes:
            assert outcome.answer is not None and outcome.answer.completion == 1


def test_arms_send_what_they_say(results: Results) -> None:
    append, truncate = line(results, "append"), line(results, "truncate")
    splice, forget = line(results, "splice"), line(results, "forget")
    assert append.prompt > truncate.prompt == splice.prompt == forget.prompt
    assert splice.edits > 0 and splice.moved > 0
    assert (truncate.edits, truncate.moved, append.moved, forget.moved) == (0, 0, 0, 0)
    assert splice.computed is not None and truncate.computed is not None
    assert splice.computed < truncate.computed == forget.computed


def test_concurrency_changes_no_count(results: Results) -> None:
    """Sessions share nothing but the first words, whatever their order."""
    for arm in ARMS:
        one, four = line(results, arm, 1), line(results, arm, 4)
        assert one.prompt == four.prompt and one.moved == four.moved
        assert one.computed is not None and four.computed is not None
        assert abs(one.computed - four.computed) <= 4 * 30


def test_ceilings_are_reached(results: Results, server: Running) -> None:
    """An engine with room for everything hits all that can be hit, call for call."""
    jobs = jobs_of([session(seed) for seed in range(5)])
    for arm in ARMS:
        (run,) = [r for r in results.runs if (r.arm, r.concurrency) == (arm, 1)]
        marks = (run.mark, "[xxxxxx] ")
        best = ceiling(server.engine.tokenizer, jobs, arm, KEEP, marks)
        for outcome in run.outcomes:
            prompt, cached = best[outcome.session, outcome.call]
            assert outcome.answer is not None and outcome.answer.prompt == prompt
            hit = outcome.answer.cached
            assert hit is not None
            if outcome.call:
                assert hit == cached, (arm, outcome)
            else:  # some characters of the mark may be those of what came before, or not
                assert abs(hit - cached) <= 6
        found = line(results, arm)
        assert found.ceiling is not None and found.hit_rate is not None
        assert abs(found.hit_rate - found.ceiling) < 0.01


def test_counts_are_those_of_the_replay_in_process(results: Results) -> None:
    """With answers of one token, of which no row is cached, as over HTTP."""
    ways: tuple[tuple[str, Way], ...] = (("truncate", "prefix"), ("splice", "leyline"))
    for arm, way in ways:
        (run,) = [r for r in results.runs if (r.arm, r.concurrency) == (arm, 4)]
        over_http = [o.answer for o in run.outcomes if o.session == "s2"]
        with tiny_engine() as engine:
            turns = [
                Turn(turn.prompt, turn.answer[:1])
                for turn in turns_of(engine.tokenizer, marked(session(2), run.mark), keep=KEEP)
            ]
            alone = replay_in_process(engine, turns, way).turns
        assert [a and a.prompt for a in over_http] == [turn.prompt_tokens for turn in alone]
        # The first one may share the template's beginning with another arm's.
        assert [a and a.cached for a in over_http[1:]] == [turn.cached_tokens for turn in alone[1:]]


def marked(recorded: Session, mark: str) -> Session:
    first, *rest = recorded.messages
    return replace(recorded, messages=({**first, "content": mark + first["content"]}, *rest))


def test_times_of_edited_calls_are_taken_apart(results: Results) -> None:
    for pair in results.comparisons:
        runs = {run.arm: run for run in results.runs if run.concurrency == pair.concurrency}

        def seconds(arm: Arm, edited: bool, runs: dict[Arm, Run] = runs) -> float:
            outcomes = runs[arm].outcomes
            return sum(o.answer.e2e_s for o in outcomes if o.answer and (o.call >= 3) == edited)

        for edited, found in ((True, pair.e2e_edited), (False, pair.e2e_alike)):
            mine, other = seconds(pair.arm, edited), seconds(pair.beside, edited)
            assert found == pytest.approx(mine / other)
            if edited:
                assert pair.saved_edited_s == pytest.approx(other - mine)


def test_first_calls_are_skipped() -> None:
    with running(tiny_engine()) as server:
        results = replay_on(
            server.url,
            take([session(0)], 2),
            Options(("truncate", "splice"), skip=2, calls=3),
            tokenizer=server.engine.tokenizer,
        )
    assert (results.settings["sessions"], results.settings["copies"]) == (2, 1)
    assert "6 calls of 2 recorded sessions, 1 of them copies" in results.markdown()
    assert "without the first 2 of each" in results.markdown()
    for run in results.runs:
        assert [outcome.edited for outcome in run.outcomes] == [False, True, True] * 2
    splice = line(results, "splice")
    assert splice.edits >= 4 and splice.ceiling == pytest.approx(splice.hit_rate, abs=0.01)


def test_first_tokens_are_compared(results: Results) -> None:
    pairs = {(c.arm, c.beside): c for c in results.comparisons if c.concurrency == 1}
    assert set(pairs) == {
        ("truncate", "append"),
        ("splice", "append"),
        ("splice", "truncate"),
        ("forget", "truncate"),
    }
    # Of six calls of a session the last three: before, no tool output is old.
    assert all(pair.known == pair.edited == 15 for pair in pairs.values())
    for pair in pairs.values():
        assert 1 <= pair.different <= 15
        assert pair.e2e_edited is not None and pair.e2e_alike is not None
    for run in results.runs:
        edited = [outcome.call >= 3 for outcome in run.outcomes]
        wanted = edited if run.arm != "append" else [False] * 30
        assert [outcome.edited for outcome in run.outcomes] == wanted
    found = pairs["splice", "truncate"]
    splice, truncate = line(results, "splice"), line(results, "truncate")
    assert splice.hit_rate is not None and truncate.hit_rate is not None
    assert found.points == pytest.approx(100 * (splice.hit_rate - truncate.hit_rate)) != 0
    assert found.points is not None and found.points > 5
    assert found.computed is not None and found.computed < 0.9


def test_json_and_markdown_have_the_same_numbers(results: Results) -> None:
    value = json.loads(json.dumps(results.as_json()))
    page = results.markdown()
    assert len(value["runs"]) == len(value["lines"]) == 8
    for row, run in zip(value["lines"], value["runs"], strict=True):
        cached = sum(outcome["answer"]["cached"] or 0 for outcome in run["outcomes"])
        assert row["cached"] == cached
        assert f"| {row['concurrency']} | {row['arm']} | {row['hit_rate']:.1%} |" in page
        assert f"| {row['computed']:,} |" in page
    for each in value["comparisons"]:
        assert f"| {each['points']:+.1f} points |" in page
    assert "can't be emptied" in page and "30 calls of 5 recorded sessions" in page


def test_errors_are_counted_and_the_run_goes_on(server: Running) -> None:
    """The tiny server's template refuses a role of its own in the middle of one session."""
    good, bad = session(11, turns=3), session(12, turns=4)
    messages = list(bad.messages)
    messages[4] = {**messages[4], "role": "stranger"}
    results = replay_on(
        server.url,
        [replace(bad, messages=tuple(messages)), good],
        Options(arms=("truncate", "splice"), keep=KEEP),
    )
    for x in results.lines:
        assert (x.calls, x.answered, x.errors, x.left_out, x.compared) == (7, 5, 2, 0, 5)
    ((text, n),) = results.errors.items()
    assert n == 4 and "Role stranger is not one of mine" in text and "HTTP 400" in text
    assert "## Errors" in results.markdown() and "2 failed" in results.markdown()


def test_sessions_end_at_the_first_prompt_that_is_too_long() -> None:
    """Cleared prompts stay short, so arms get to different calls: only common ones are compared."""
    long = [session(seed, turns=12) for seed in range(3)]
    with running(max_tokens=500) as server:
        results = replay_on(server.url, long, Options(keep=KEEP))
    append, truncate = line(results, "append"), line(results, "truncate")
    assert 0 < append.answered < truncate.answered and not results.errors
    for x in results.lines:
        assert x.answered + x.left_out == x.calls == 36 and x.left_out > 0
        assert x.compared == append.answered
    for run in results.runs:
        for name in {outcome.session for outcome in run.outcomes}:
            gone = [o.left_out for o in run.outcomes if o.session == name]
            assert gone == sorted(gone), "nothing is sent behind the first that doesn't fit"
    assert "left out as too long" in results.markdown()


def test_answers_as_long_as_the_recorded_ones(server: Running) -> None:
    tokenizer = server.engine.tokenizer
    one = session(21, turns=2)
    options = Options(arms=("truncate",), answer=None)
    results = replay_on(server.url, [one], options, tokenizer=tokenizer)
    wanted = [len(tokenizer(m["content"]).input_ids) for m in one.messages[1::2]]
    answers = [outcome.answer for outcome in results.runs[0].outcomes]
    assert [answer and answer.completion for answer in answers] == wanted
    with pytest.raises(ValueError, match="without a tokenizer"):
        replay_on(server.url, [one], options)


def test_gaps_are_waited_for(server: Running) -> None:
    one = replace(session(22, turns=3), gaps_ms=(300.0, 200.0))
    walls = {}
    for gaps in (True, False):
        options = Options(arms=("truncate",), gaps=gaps)
        (run,) = replay_on(server.url, [one], options).runs
        walls[gaps] = run.wall_s - sum(o.answer.e2e_s for o in run.outcomes if o.answer)
    assert walls[True] >= 0.5 > walls[False]


def test_with_an_api_key_and_v1_in_the_url(sessions: list[Session]) -> None:
    from leyline.server.limits import Settings

    with running(settings=Settings(api_keys=("schlüssel",))) as server:
        options = Options(arms=("splice",), calls=1)
        results = replay_on(f"{server.url}/v1", sessions, options, model="tiny", key="schlüssel")
        assert results.answered == 3
        with pytest.raises(ValueError, match="--api-key"):
            replay_on(server.url, sessions, options)


def test_what_is_no_server_gets_a_sentence(sessions: list[Session]) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/v1/models: no server answers"):
        replay_on("http://127.0.0.1:9", sessions, Options())


def test_look_finds_what_the_server_can(server: Running) -> None:
    with Client(server.url) as client:
        found = look(client)
        assert found.max_tokens == server.engine.max_tokens and client.extras["logprobs"]
        with pytest.raises(ValueError, match="a first call failed: HTTP 404"):
            look(client, "another")


def test_a_server_without_sessions_runs_the_plain_arms(
    server: Running, sessions: list[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    from leyline.replay import run as replay_run

    def deaf(client: Client, model: str | None) -> Any:
        return replace(look(client, model), sessions=False)

    monkeypatch.setattr(replay_run, "look", deaf)
    results = replay_on(server.url, sessions, Options(calls=2))
    assert [x.arm for x in results.lines] == ["append", "truncate"]
    with pytest.raises(ValueError, match="arm splice needs a server"):
        replay_on(server.url, sessions, Options(arms=("splice",)))


def test_pictures(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from leyline.replay.plots import draw

    files = draw(results.lines, "a title", tmp_path)
    assert [file.name for file in files] == ["hit_rate.png", "first_token.png"]
    for file in files:
        pixels = imread(file)
        assert 0.02 < (pixels[..., :3].min(-1) < 0.9).mean() < 0.7


def test_marks_leave_the_call_as_it_is(sessions: list[Session]) -> None:
    call = jobs_of(sessions)[0].calls[2]
    before = json.dumps(call.messages)
    assert messages_of("truncate", call, 0, "[1] ")[0]["content"].startswith("[1] ")
    assert json.dumps(call.messages) == before


def test_sessions_of_one_name_are_refused(sessions: list[Session]) -> None:
    with pytest.raises(ValueError, match="session 's0' more than once"):
        jobs_of([*sessions, sessions[0]])


def test_text_that_is_no_unicode_is_an_error_of_its_call(server: Running) -> None:
    messages = ({"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"})
    results = replay_on(server.url, [Session("s", messages, ())], Options(arms=("append",)))
    assert results.lines[0].errors == 1 and "UnicodeEncodeError" in next(iter(results.errors))
