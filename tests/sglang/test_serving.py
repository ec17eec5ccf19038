"""What a client sees of a session beyond one answer: samples, fallbacks, namespaces, metrics."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from harness import Server


@pytest.fixture
def server(servers: Callable[..., Server]) -> Server:
    return servers("mla", "--enable-metrics")


def tokens(seed: str, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(n)]


def metric(server: Server, name: str, **labels: str) -> float:
    """The value, 0 before it was first counted."""
    found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", server.http.get("/metrics").text, re.M)
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return sum(float(value) for given, value in found if wanted <= set(given.split(",")))


def test_several_samples(server: Server) -> None:
    """n > 1: one splice, and each sample goes on from there."""
    source = tokens("samples", 300)
    server.generate(source, 1, {"session": "samples"})
    prompt = source[:100] + source[140:] + tokens("samples new", 9)
    status, answers = server.post(
        "/generate",
        {
            "input_ids": prompt,
            "sampling_params": {
                "n": 3,
                "temperature": 1.0,
                "max_new_tokens": 8,
                "ignore_eos": True,
                "custom_params": {"leyline": {"session": "samples"}},
            },
        },
    )
    assert status == 200 and len(answers) == 3
    for each in answers:
        report = each["meta_info"]["leyline"]
        assert report["tokens"] == {"prompt": 269, "shared": 100, "moved": 160, "computed": 9}
    again = server.generate(prompt + tokens("samples more", 5), 1, {"session": "samples"})
    assert again.cached >= len(prompt)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (dict(return_logprob=True, logprob_start_len=0), "log-probabilities of the prompt"),
        (dict(session_id="sglang"), "SGLang's own sessions"),
    ],
)
def test_feature_that_does_not_go_with_it(
    server: Server, fields: dict[str, object], what: str
) -> None:
    """I6: served as usual, and said so; with `strict` refused."""
    source = tokens(f"feature {what}", 120)
    name = {"session": f"feature {what}"}
    before = metric(server, "leyline_fallbacks_total", reason="unsupported_feature")
    assert server.generate(source, 1, name).report["fallback"] is None
    prompt = source[:30] + source[60:]
    answer = server.generate(prompt, 2, name, **fields)
    assert answer.report["fallback"] == "unsupported_feature"
    where = answer.report["tokens"]
    assert where["moved"] == 0 and where["shared"] == answer.cached <= 30
    assert sum(where[kind] for kind in ("shared", "computed")) == where["prompt"] == 90
    refused = server.generate(prompt, 2, {**name, "strict": True}, **fields)
    assert refused.status == 409 and what in refused.error
    after = metric(server, "leyline_fallbacks_total", reason="unsupported_feature")
    assert after == before + 1


def test_output_logprobs_go_with_it(server: Server) -> None:
    source = tokens("output logprobs", 120)
    server.generate(source, 1, {"session": "output logprobs"})
    answer = server.generate(
        source[:30] + source[60:] + [7],
        3,
        {"session": "output logprobs", "strict": True},
        return_logprob=True,
    )
    assert answer.report["tokens"]["moved"] == 60 and len(answer.logprobs) == 3


def test_unknown_source(server: Server) -> None:
    """Directives without a source: prefilled (I6), with `strict` 409. Derived edits: a first
    request."""
    directives = [{"start": 5, "end": 9}]
    prompt = tokens("unknown", 50)
    answer = server.generate(prompt, 1, {"session": "unknown 1", "directives": directives})
    assert answer.report["fallback"] == "source_missing"
    refused = server.generate(
        prompt, 1, {"session": "unknown 2", "directives": directives, "strict": True}
    )
    assert refused.status == 409 and "source_missing" in refused.error
    first = server.generate(prompt, 1, {"session": "unknown 3", "strict": True})
    assert first.status == 200 and first.report["fallback"] is None


@pytest.mark.parametrize(
    ("directive", "sentence"),
    [
        ({"start": 50, "end": 1000}, "leyline.directives[0].end: 1000 is past the source"),
        ({"start": 50, "end": 60, "replacement": [99999]}, "99999 is no token"),
        ({"start": 60, "end": 50}, "50 is before start"),
    ],
)
def test_directive_that_does_not_fit(
    server: Server, directive: dict[str, object], sentence: str
) -> None:
    """HTTP 400, one sentence, nothing changed."""
    source = tokens(f"unfit {sentence}", 120)
    name = {"session": f"unfit {sentence}"}
    server.generate(source, 1, name)
    answer = server.generate(source, 1, {**name, "directives": [directive]})
    assert answer.status == 400 and sentence in answer.error
    spliced = server.generate(source[:30] + source[60:] + [7], 1, {**name, "strict": True})
    assert spliced.report["tokens"]["moved"] == 60


@pytest.mark.parametrize("namespace", ["extra_key", "cache_salt"])
def test_namespace_of_the_request(server: Server, namespace: str) -> None:
    """I8: a session of the same name in another namespace is another session."""
    source = tokens(f"namespace {namespace}", 120)
    name = {"session": f"namespace {namespace}"}
    for key in ("a", "b"):
        assert server.generate(source, 1, name, **{namespace: key}).cached == 0
    prompt = source[:30] + source[60:] + [7]
    spliced = server.generate(prompt, 1, name, **{namespace: "a"})
    assert spliced.report["tokens"] == {"prompt": 91, "shared": 30, "moved": 60, "computed": 1}
    for other in ({}, {namespace: "c"}):
        assert server.generate(prompt, 1, name, **other).cached == 0
    assert server.generate(prompt, 1, name, **{namespace: "b"}).report["tokens"]["moved"] == 60


def test_metrics(server: Server) -> None:
    source = tokens("metrics", 200)
    before = {
        kind: metric(server, "leyline_tokens_total", kind=kind)
        for kind in ("shared", "moved", "computed")
    }
    spliced = metric(server, "leyline_splices_total", outcome="moved")
    timed = metric(server, "leyline_splice_seconds_count")
    server.generate(source, 1, {"session": "metrics"})
    server.generate(source[:50] + source[80:] + [7, 8], 1, {"session": "metrics"})
    after = {kind: metric(server, "leyline_tokens_total", kind=kind) for kind in before}
    assert {kind: after[kind] - before[kind] for kind in before} == {
        "shared": 50,
        "moved": 120,
        "computed": 202,
    }
    assert metric(server, "leyline_splices_total", outcome="moved") == spliced + 1
    assert metric(server, "leyline_splice_seconds_count") == timed + 1
