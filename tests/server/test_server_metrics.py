"""/metrics: what happened is what is counted."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tiny_server import running, tiny_tokenizer, until, words

TOKENS = tiny_tokenizer()(words(5, 150), add_special_tokens=False).input_ids


def scraped(text: str) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counts() -> None:
    with running() as server, server.http() as http:

        def ask(prompt: list[int], **leyline: Any) -> dict[str, Any]:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            if leyline:
                body["leyline"] = leyline
            answer = http.post("/v1/completions", json=body)
            return answer.json()

        plain = ask(TOKENS)  # computed
        first = ask(TOKENS[:-1], session="a")  # shared
        moved = ask(TOKENS[:30] + TOKENS[50:], session="a")
        forget = ask(TOKENS[:20] + TOKENS[50:], session="a", mode="forget")
        missing = ask(TOKENS, session="b", directives=[[0, 2, [], "amortize"]])
        refused = ask(TOKENS, session="c", directives=[[0, 2, [], "amortize"]], strict=True)
        assert "error" in refused
        http.get("/v1/leyline/sessions/a")
        http.get("/v1/leyline/sessions/a/b/c")
        http.get("/no/such/path")
        answer = http.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    found = scraped(answer.text)
    reports = [each["leyline"]["tokens"] for each in (first, moved, forget, missing)]
    usage = plain["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert found["leyline_prompt_tokens_total", "moved"] == sum(r["moved"] for r in reports) > 0
    assert found["leyline_prompt_tokens_total", "shared"] == cached + sum(
        r["shared"] for r in reports
    )
    assert found["leyline_prompt_tokens_total", "computed"] == usage[
        "prompt_tokens"
    ] - cached + sum(r["computed"] for r in reports)
    assert found["leyline_generated_tokens_total",] == 10
    assert found["leyline_hits_total",] == 4
    outcomes = {o: found["leyline_splices_total", o] for o in ("moved", "copied", "forget", "none")}
    # The source's rows are the plain request's too, so they are copied.
    assert outcomes == {"moved": 0, "copied": 1, "forget": 1, "none": 2}
    assert moved["leyline"]["copied"]
    assert found["leyline_fallbacks_total", "source_missing"] == 2
    assert found["leyline_requests_total", "/v1/completions", "200"] == 5
    assert found["leyline_requests_total", "/v1/completions", "409"] == 1
    sessions = "/v1/leyline/sessions/{session:path}"
    assert found["leyline_requests_total", sessions, "200"] == 1
    assert found["leyline_requests_total", sessions, "404"] == 1
    assert found["leyline_requests_total", "other", "404"] == 1
    for name in ("ttft", "e2e"):
        assert found[f"leyline_{name}_seconds_count",] == 5
    assert found["leyline_splice_seconds_count",] == 1
    slots = [found["leyline_slots", state] for state in ("free", "cached", "private")]
    assert sum(slots) == found["leyline_slots_capacity",] > 0
    assert found["leyline_requests_running",] == found["leyline_requests_waiting",] == 0
    assert found["leyline_sessions",] == 2


def test_two_servers_count_apart() -> None:
    with running() as one, running() as other:
        with one.http() as http:
            http.get("/health")
        until(lambda: one.answered() == 1)
        assert other.answered() == 0
