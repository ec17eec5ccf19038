"""The `leyline` object in SGLang's own requests: `/generate`, and an offline Engine."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from harness import Server, kv_hints
from hypothesis import given
from hypothesis import strategies as st

from leyline.api.errors import FieldError
from leyline.api.leyline_object import parse_leyline
from leyline.directive import Mode
from leyline.sglang.carriers import carrier, put, take
from leyline.sglang.cpu.__main__ import environment
from leyline.sglang.request import update_request_meta_info

pytestmark = pytest.mark.sglang

IDS = list(range(10, 110))
EDITED = [*IDS[:20], *IDS[40:], 7]
"""Without 20 tokens, and one more at the end: 60 kept rows turn."""
STRANGER = {"session": "request-never", "strict": True, "directives": [{"start": 0, "end": 1}]}
"""Asks for an edit in a session that has nothing."""
OTHER = {"action_id": "2", "action_type": "other", "action_version": "1", "payload": {"a": [1]}}


def of(**fields: Any) -> Any:
    """A request as SGLang's endpoints make it, before it is normalized."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return GenerateReqInput(**{"input_ids": IDS, **fields})


def custom(obj: object, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 2, **more, "custom_params": {"leyline": obj}}


# --- in -------------------------------------------------------------------------------------------

directives = st.builds(
    lambda start, n, replacement, mode: {
        "start": start,
        "end": start + n,
        "replacement": replacement,
        "mode": mode,
        **({"repair": n} if mode == Mode.REPAIR else {}),
    },
    st.integers(0, 10_000),
    st.integers(1, 100),
    st.lists(st.integers(0, 100_000), max_size=3),
    st.sampled_from([str(mode) for mode in Mode]),
)


@given(
    st.text(st.characters(categories=["L", "N"]), min_size=1),
    st.sampled_from([{}, {"mode": "forget", "scrub": True}, {"mode": "repair", "repair": 3}]),
    st.none() | st.lists(directives, max_size=3),
    st.booleans(),
)
def test_the_scheduler_reads_what_was_checked(
    session: str, mode: dict[str, Any], edits: Any, strict: bool
) -> None:
    """I4: not a token or a mode of it changes on the way."""
    given = {"session": session, "directives": edits, "strict": strict, **mode}
    checked = parse_leyline(given)
    read = parse_leyline(json.loads(carrier(checked)))
    for field in ("session", "mode", "repair", "edits", "strict", "scrub"):
        assert getattr(read, field) == getattr(checked, field)


@pytest.mark.parametrize("text", [None, "a"])
@pytest.mark.parametrize(
    "raw", [{"session": "s"}, json.dumps({"session": "s"}), {"session": "s", "policy": None}]
)
def test_object_in_custom_params(raw: object, text: str | None) -> None:
    params = {"max_new_tokens": 2, "custom_params": {"leyline": raw, "mine": 1}}
    before = copy.deepcopy(params)
    obj = of(text=text, input_ids=None if text else IDS, sampling_params=params)
    (found,) = take(obj)
    assert found is not None and found.session == "s"
    assert obj.sampling_params == {"max_new_tokens": 2, "custom_params": {"mine": 1}}
    put(obj, ["x"])
    assert obj.sampling_params["custom_params"] == {"mine": 1, "leyline": "x"}
    assert params == before, "the caller's dict"


@pytest.mark.parametrize("typed", [False, True])
def test_object_in_a_hint_is_consumed(typed: bool) -> None:
    """Others see their own actions, and no `leyline.edit` reaches a storage backend."""
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    hints: Any = kv_hints({"session": "s"})
    hints["actions"].append(OTHER)
    before = copy.deepcopy(hints)
    obj = of(kv_hints=decode_kv_hints_envelope(hints) if typed else hints)
    (found,) = take(obj)
    assert found is not None and found.session == "s"
    rest = decode_kv_hints_envelope(obj.kv_hints)
    assert [each.action_type for each in rest.actions] == ["other"]
    assert rest.message_id == hints["message_id"]
    assert hints == before
    alone = of(kv_hints=kv_hints({"session": "s"}))
    take(alone)
    assert alone.kv_hints is None


def test_each_prompt_of_a_batch_may_have_its_own() -> None:
    prompts = [IDS, IDS[1:], IDS[2:]]
    params = [custom({"session": "a"}), {"max_new_tokens": 2}, custom({"session": "c"})]
    obj = of(input_ids=prompts, sampling_params=params)
    found = take(obj)
    assert [each and each.session for each in found] == ["a", None, "c"]
    put(obj, ["A", None, "C"])
    carried = [(each.get("custom_params") or {}).get("leyline") for each in obj.sampling_params]
    assert carried == ["A", None, "C"]
    hinted = of(input_ids=prompts[:2], kv_hints=[None, kv_hints({"session": "b"})])
    assert [each and each.session for each in take(hinted)] == [None, "b"]
    put(hinted, [None, "B"])
    hinted.normalize_batch_and_arguments()
    assert hinted[1].sampling_params["custom_params"] == {"leyline": "B"}
    assert not (hinted[0].sampling_params.get("custom_params") or {}).get("leyline")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "list": ({"sampling_params": custom([1])}, "leyline: must be an object"),
    "no json": ({"sampling_params": custom("{")}, "leyline: is not JSON"),
    "nan": ({"sampling_params": custom('{"session": NaN}')}, "leyline: is not JSON"),
    "deep": ({"sampling_params": custom("[" * 5000)}, "leyline: is not JSON"),
    "field": ({"sampling_params": custom({"session": "s", "x": 1})}, "leyline.x: is no field"),
    "session": ({"sampling_params": custom({"session": "\n"})}, "leyline.session: must have"),
    "policy": (
        {"sampling_params": custom({"session": "s", "policy": {"name": "clear_tool_outputs"}})},
        "leyline.policy: edits messages",
    ),
    "payload": ({"kv_hints": kv_hints({"session": 1})}, "leyline.session: must be"),
    "no payload": (
        {"kv_hints": {"actions": [{"action_type": "leyline.edit"}]}},
        "leyline: must be an object",
    ),
    "two places": (
        {"sampling_params": custom({"session": "s"}), "kv_hints": kv_hints({"session": "s"})},
        "leyline: is given twice, in custom_params and in kv_hints",
    ),
    "two hints": (
        {"kv_hints": {"actions": kv_hints({"session": "s"})["actions"] * 2}},
        "leyline: is given twice, in kv_hints and in kv_hints",
    ),
    "two prompts": (
        {"input_ids": [IDS, IDS], "sampling_params": custom({"session": "s"})},
        "leyline: is given in custom_params for 2 prompts",
    ),
    "one session": (
        {"text": ["a", "b"], "input_ids": None, "sampling_params": [custom({"session": "s"})] * 2},
        "leyline.session: 's' has two prompts",
    ),
    "custom_params": (
        {"sampling_params": {"custom_params": [1]}, "kv_hints": kv_hints({"session": "s"})},
        "sampling_params.custom_params: must be an object",
    ),
}


@pytest.mark.parametrize("fields, sentence", REFUSED.values(), ids=REFUSED.keys())
def test_malformed_requests_are_refused(fields: dict[str, Any], sentence: str) -> None:
    """I6: one sentence that names the field, before anything goes to the scheduler."""
    obj = of(**fields)
    with pytest.raises(FieldError) as refused:
        put(obj, [each and carrier(each) for each in take(obj)])
    assert str(refused.value).startswith(sentence)
    assert len(str(refused.value).splitlines()) == 1


def test_without_the_backend_an_object_is_refused() -> None:
    with pytest.raises(FieldError, match=r"without `--radix-cache-backend leyline`"):
        take(of(sampling_params=custom({"session": "s"})), enabled=False)
    assert take(of(sampling_params={"max_new_tokens": 1}), enabled=False) == [None]


def test_reports_of_others_leave_no_trace() -> None:
    """I1: SGLang tells of custom keys for all of a batch, with nothing for most."""
    got: list[dict[str, Any]] = []

    def original(manager: Any, meta: Any, state: Any, info: Any, index: int, reason: Any) -> None:
        got.append(info)

    batch = {"leyline": [[], [{"session": "s"}]], "other": [[1], [2]]}
    for index in (0, 1):
        update_request_meta_info(original, None, {}, None, batch, index, None)
    assert got == [{"other": [[1], [2]]}, batch]


# --- /generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["custom_params", "json", "kv_hints"])
def test_all_places_are_spliced_and_reported(server: Server, place: str) -> None:
    session = {"session": f"request-{place}"}
    first = server.generate(IDS, leyline=session, carrier=place)
    assert first.report["session"] == session["session"] and first.report["edits"] == []
    answer = server.generate(EDITED, leyline=session, carrier=place)
    assert isinstance(answer.meta["leyline"], dict), "not in a list"
    assert [(e["start"], e["end"]) for e in answer.report["edits"]] == [(20, 40)]
    tokens = answer.report["tokens"]
    assert tokens["moved"] >= 60
    assert tokens["shared"] + tokens["moved"] == answer.cached


def stream(server: Server, leyline: Any, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    body = {
        "input_ids": IDS,
        "stream": True,
        "sampling_params": custom(leyline, max_new_tokens=4, ignore_eos=True),
        **fields,
    }
    answer = server.http.post("/generate", json=body)
    assert answer.status_code == 200
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_stream_reports_first_and_last(server: Server) -> None:
    chunks = stream(server, {"session": "request-stream"})
    assert len(chunks) > 1
    first, last = chunks[0]["meta_info"], chunks[-1]["meta_info"]
    assert last["finish_reason"] is not None
    assert first["leyline"] == last["leyline"]
    assert last["leyline"]["session"] == "request-stream"


@pytest.mark.parametrize("streamed", [False, True])
def test_samples_of_one_prompt_report_its_edit(server: Server, streamed: bool) -> None:
    """Directives are the prompt's, applied once: a second time they would be outside the source."""
    session = f"request-samples-{streamed}"
    server.generate(IDS, leyline={"session": session})
    leyline = {"session": session, "directives": [{"start": 10, "end": 75}]}
    params = custom(leyline, n=3, temperature=1)
    fields = {"input_ids": [*IDS[:10], *IDS[75:], 7], "sampling_params": params}
    if streamed:
        chunks = stream(server, None, **fields)
        assert {each["index"] for each in chunks} == {0, 1, 2}
        last = [each for each in chunks if each["meta_info"]["finish_reason"]]
    else:
        status, last = server.post("/generate", fields)
        assert status == 200
    assert len(last) == 3
    for each in last:
        assert each["meta_info"]["finish_reason"]["type"] in ("length", "stop")
        report = each["meta_info"]["leyline"]
        assert [(e["start"], e["end"]) for e in report["edits"]] == [(10, 75)]
        assert report["tokens"]["moved"] == 25


@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_of_a_batch_report_their_own(server: Server, streamed: bool) -> None:
    """I8"""
    names = [f"request-batch-{streamed}-{i}" for i in range(3)]
    params = [custom({"session": name}) for name in names]
    params[1] = {"max_new_tokens": 2}
    body = {"input_ids": [IDS, IDS[1:], IDS[2:]], "sampling_params": params}
    if streamed:
        chunks = stream(server, None, **body)
        by_index = {each["index"]: each for each in chunks}
        last = [by_index[i] for i in range(3)]
        assert not any("leyline" in each["meta_info"] for each in chunks if each["index"] == 1)
    else:
        status, last = server.post("/generate", body)
        assert status == 200
    reports = [each["meta_info"].get("leyline") for each in last]
    assert reports[1] is None
    assert [reports[0]["session"], reports[2]["session"]] == [names[0], names[2]]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("leyline", "status", "words"),
    [
        ({"session": ""}, 400, "leyline.session: must have"),
        ("{", 400, "leyline: is not JSON"),
        ({"session": {"a": [{}]}}, 400, "leyline.session: must be"),
        (STRANGER, 409, "source_missing"),
    ],
)
def test_refusals(server: Server, leyline: Any, status: int, words: str, streamed: bool) -> None:
    """I6: a sentence and a status; in a chunk where a stream of /generate has begun by then."""
    if streamed:
        (chunk,) = stream(server, leyline)
        assert chunk["error"]["code"] == status
        assert words in chunk["error"]["message"]
        return
    answer = server.generate(IDS, leyline=leyline)
    assert answer.status == status
    assert words in answer.error


@pytest.mark.parametrize("streamed", [False, True])
def test_directive_outside_the_source(server: Server, streamed: bool) -> None:
    """I6"""
    session = {"session": f"request-outside-{streamed}"}
    server.generate(IDS, leyline=session)
    leyline = {**session, "directives": [{"start": 0, "end": 5000}]}
    if streamed:
        (chunk,) = stream(server, leyline)
        code, message = chunk["error"]["code"], chunk["error"]["message"]
    else:
        answer = server.generate(IDS, leyline=leyline)
        code, message = answer.status, answer.error
    assert code == 400
    assert "directives[0].end" in message and "5000" in message
    again = server.generate(IDS, leyline=session)
    assert again.report["tokens"]["shared"] == len(IDS) - 1, "nothing changed"


def test_one_refused_prompt_of_a_streamed_batch(server: Server) -> None:
    """The others go on."""
    body = {"input_ids": [IDS, IDS], "sampling_params": [{"max_new_tokens": 4}, custom(STRANGER)]}
    last = {each["index"]: each["meta_info"] for each in stream(server, None, **body)}
    assert last[0]["finish_reason"]["type"] in ("length", "stop")
    assert last[1]["finish_reason"]["status_code"] == 409
    assert server.post("/generate", body)[0] == 409


def test_several_requests_at_once(server: Server) -> None:
    """I1: who has no session gets no report, whoever is in the same batch."""

    async def ask(http: httpx.AsyncClient, i: int) -> httpx.Response:
        params = custom({"session": f"request-many-{i}"}) if i % 2 else {"max_new_tokens": 2}
        params = {**params, "max_new_tokens": 8, "ignore_eos": True}
        body = {"input_ids": IDS[i:], "sampling_params": params, "stream": i % 4 < 2}
        return await http.post("/generate", json=body)

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            return await asyncio.gather(*(ask(http, i) for i in range(12)))

    for i, answer in enumerate(asyncio.run(all_of_them())):
        assert answer.status_code == 200
        assert ("leyline" in answer.text) == (f"request-many-{i}" in answer.text) == bool(i % 2)


@pytest.mark.parametrize("token", [-1, 512, 450 + (1 << 32), 2**62])
def test_a_token_that_the_model_has_not(server: Server, token: int) -> None:
    """I8: a marked key is made of such tokens; nobody may ask for one."""
    for leyline in (None, {"session": "request-token"}):
        answer = server.generate([*IDS, token, 3], leyline=leyline)
        assert answer.status == 400
        assert f"{token} is no token of this model (0 to 511)" in answer.error
    assert server.generate(IDS).status == 200


def test_amortized_rows_can_not_be_asked_for_by_their_mark(server: Server) -> None:
    """I8: nobody else finds edited rows, whatever serial they guess."""
    server.generate(IDS, leyline={"session": "request-mark"})
    edited = [*IDS[:10], *IDS[75:]]
    report = server.generate(edited, leyline={"session": "request-mark"}).report
    assert report["tokens"]["moved"]
    for serial in range(1, 40):
        marked = [*edited, 7]
        marked[10] += serial << 32
        assert server.generate(marked).status == 400


def test_many_small_edits_take_few_passes(server: Server) -> None:
    """The longest kept runs enter, no more than 32; the rest is computed, and says no fallback."""
    rng = np.random.default_rng(5)
    source = rng.integers(2, 512, 1200).tolist()
    session = {"session": "request-dense"}
    server.generate(source, leyline=session)
    starts = [*range(100, 600, 2), *range(700, 1000, 50)]
    directives = [
        {"start": at, "end": at + 1, "replacement": [(source[at] + 1) % 510 + 2]} for at in starts
    ]
    target = list(source)
    for each in directives:
        target[each["start"]] = each["replacement"][0]
    answer = server.generate(target, leyline={**session, "directives": directives})
    report = answer.report
    # 99 behind 601, then 49 five times and 199 at the end; 25 of the single tokens.
    long_ones = (700 - 599) + 5 * 49 + (1199 - 951)
    assert report["fallback"] is None
    assert report["tokens"]["shared"] == 100
    assert report["tokens"]["moved"] == long_ones + 32 - 7
    assert answer.cached == 100 + report["tokens"]["moved"]


def test_single_prompt_with_listed_parameters(server: Server) -> None:
    """As SGLang takes it without the object."""
    for leyline in (None, {"session": "request-listed"}):
        body = {"input_ids": IDS, "sampling_params": [custom(leyline, n=2, max_new_tokens=2)]}
        status, answers = server.post("/generate", body)
        assert status == 200 and len(answers) == 2


def test_object_where_generate_does_not_look(server: Server) -> None:
    """Not ignored: it would seem to work."""
    status, answer = server.post("/generate", {"input_ids": IDS, "leyline": {"session": "s"}})
    assert status == 400
    assert "goes into sampling_params.custom_params" in answer["error"]["message"]
    status, answer = server.post(
        "/encode", {"text": "a", "sampling_params": custom({"session": 1})}
    )
    assert status == 400


# --- other servers --------------------------------------------------------------------------------


def test_guarded_server_with_other_transports(checkpoint: Callable[..., Path]) -> None:
    """The same over msgpack, with streams in increments, a compressed body and an API key: who has
    none gets no further than that."""
    env = {"SGLANG_USE_PICKLE_IPC": "0", "SGLANG_ENABLE_REQUEST_DECOMPRESSION": "1"}
    flags = ("--api-key", "secret", "--incremental-streaming-output", "--enable-cache-report")
    with Server(checkpoint("mla"), *flags, env=env) as server:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        bad = {**body, "leyline": {"session": 1}}
        assert server.post("/v1/chat/completions", bad)[0] == 401
        server.http.headers["authorization"] = "Bearer secret"
        assert server.post("/v1/chat/completions", bad)[0] == 400

        first = server.generate(IDS, leyline={"session": "s"}, carrier="kv_hints")
        assert first.report["session"] == "s"
        chunks = stream(server, {"session": "s"})
        # Increments: a chunk carries only what is new (SGLang may put several tokens in one).
        increments = [len(chunk["output_ids"]) for chunk in chunks]
        assert len(chunks) > 1 and sum(increments) == 4
        assert chunks[0]["meta_info"]["leyline"] == chunks[-1]["meta_info"]["leyline"]
        (chunk,) = stream(server, STRANGER)
        assert chunk["error"]["code"] == 409
        assert server.generate(IDS, leyline=STRANGER).status == 409

        import zstandard

        content = zstandard.compress(json.dumps({**body, "leyline": {"session": "z"}}).encode())
        headers = {"content-type": "application/json", "x-body-compressed": "zstd"}
        answer = server.http.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.json()["leyline"]["session"] == "z"
        strict = {**body, "stream": True, "leyline": STRANGER}
        assert server.post("/v1/chat/completions", strict)[0] == 409


OFFLINE = Path(__file__).with_name("offline_engine.py")


def test_offline_engine(checkpoint: Callable[..., Path]) -> None:
    """Engine.generate raises ValueError for what a server refuses; without Leyline's cache it
    refuses an object and nothing else."""
    line = [sys.executable, str(OFFLINE), str(checkpoint("mla"))]
    env = environment({**os.environ, "LEYLINE_CPU_FORK": "1"}, plain=False)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr[-6000:]
