"""I6: of a thousand malformed directives each is a 400 that names the field; nothing changes."""

from __future__ import annotations

import json
import random
from typing import Any

from tiny_server import Running, running, tiny_tokenizer, words

TOKENS = tiny_tokenizer()(words(5, 150), add_special_tokens=False).input_ids
SOURCE = [*TOKENS[:10], 7, *TOKENS[30:]]
N = len(SOURCE)
MESSAGES = [{"role": "user", "content": "hello"}]
BAD_NUMBERS: list[Any] = [
    -1,
    1.5,
    "3",
    None,
    True,
    [],
    {},
    2**31,
    10**30,
    -(10**30),
    "",
    float("inf"),
]
BAD_TOKENS: list[Any] = [-1, 1.5, "a", None, False, [1], {}, 512, 2**31, 10**30]
BAD_MODES: list[Any] = ["", "drop", "AMORTIZE", "Forget", 0, None, True, [], {}, "x" * 5000]
BAD_WHOLES: list[Any] = [None, 5, "x", True, [], [1], [1, 2], [1, 2, []], [1, 2, [], "amortize", 0]]


def good(dice: random.Random) -> dict[str, Any]:
    """A directive that is fine for the session's source."""
    start = dice.randrange(0, N // 2)
    found: dict[str, Any] = {"start": start, "end": start + dice.randrange(1, 9)}
    if dice.random() < 0.5:
        found["replacement"] = [dice.randrange(512) for _ in range(dice.randrange(4))]
    if dice.random() < 0.5:
        found["mode"] = dice.choice(["amortize", "forget"])
    return found


def bad(dice: random.Random) -> tuple[Any, str]:
    """A directive that is not, and the field that is to blame, seen from the directive."""
    d = good(dice)
    kind = dice.randrange(12)
    if kind < 2:
        name = ("start", "end")[kind]
        d[name] = dice.choice(BAD_NUMBERS)
        return d, f".{name}"
    if kind == 2:
        d["end"] = dice.randrange(N + 1, 10 * N)
        return d, ".end"
    if kind == 3:
        d["start"], d["end"] = sorted((dice.randrange(N), N + dice.randrange(1, N)), reverse=True)
        return d, ".end"
    if kind == 4:
        d["replacement"] = [5] * dice.randrange(4)
        d["replacement"].append(dice.choice(BAD_TOKENS))
        return d, f".replacement[{len(d['replacement']) - 1}]"
    if kind == 5:
        d["replacement"] = dice.choice([5, "abc", None, True, {}, 1.5])
        return d, ".replacement"
    if kind == 6:
        d["mode"] = dice.choice(BAD_MODES)
        return d, ".mode"
    if kind == 7:
        d |= {"mode": "repair", "repair": dice.choice(BAD_NUMBERS)}
        return d, ".repair"
    if kind == 8:
        if dice.random() < 0.5:
            return {**d, "mode": "repair"}, ".repair"
        return {**d, "mode": "amortize", "repair": dice.randrange(1, 99)}, ".repair"
    if kind == 9:
        return {**d, dice.choice(["stop", "End", "", "x" * 500]): 1}, ""
    if kind == 10:
        del d[name := dice.choice(["start", "end"])]
        return d, f".{name}"
    if dice.random() < 0.5:
        at = dice.randrange(N)
        return {"start": at, "end": at}, ""
    return dice.choice(BAD_WHOLES), ""


def malformed(dice: random.Random) -> tuple[list[Any], str]:
    """A list of directives with one that is bad, and where."""
    if dice.random() < 0.1:  # each is fine, together they are not
        start = dice.randrange(20, N - 20)
        first = {"start": start, "end": start + 9}
        second = {"start": start + dice.randrange(9), "end": start + 12}
        return [first, second], "directives[1].start"
    one, where = bad(dice)
    before = [good(dice)] if dice.random() < 0.3 else []
    if before and isinstance(one, dict) and isinstance(one.get("start"), int):
        before = []  # they might overlap, which would be another complaint
    return [*before, one], f"directives[{len(before)}]{where}"


def send(server: Any, dice: random.Random, directives: list[Any]) -> tuple[Any, str]:
    """By one of the ways into the server; the answer and what the field is called there."""
    leyline = {"session": "s", "directives": directives}
    stream = dice.random() < 0.3
    match dice.randrange(3):
        case 0:
            path, body, prefix = "/v1/leyline/sessions/s/directives", {"directives": directives}, ""
        case 1:
            body = {"prompt": TOKENS, "leyline": leyline, "stream": stream}
            path, prefix = "/v1/completions", "leyline."
        case _:
            body = {"messages": MESSAGES, "leyline": leyline, "stream": stream}
            path, prefix = "/v1/chat/completions", "leyline."
    text = json.dumps(body).replace("Infinity", "1e999")
    return server.post(path, content=text), prefix


def history(server: Running) -> None:
    """What the session has been through before."""
    with server.http() as http:
        leyline = {"session": "s"}
        body = {"prompt": TOKENS, "max_tokens": 3, "temperature": 0, "leyline": leyline}
        assert http.post("/v1/completions", json=body).status_code == 200
        leyline["directives"] = [[10, 30, [7], "amortize"]]  # type: ignore[assignment]
        body = {"prompt": SOURCE, "max_tokens": 0, "leyline": leyline}
        assert http.post("/v1/completions", json=body).status_code == 200


def follow_up(server: Running) -> dict[str, Any]:
    """An answer that shows what became of the session, without what differs from run to run."""
    prompt = SOURCE[:50] + SOURCE[80:]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 2}
    with server.http() as http:
        answer = http.post("/v1/completions", json={**body, "leyline": {"session": "s"}}).json()
    for changing in ("id", "created"):
        del answer[changing]
    del answer["leyline"]["splice_ms"]
    return answer


def test_a_thousand_malformed_directives_change_nothing() -> None:
    dice = random.Random(17)
    with running() as twin:
        history(twin)
        want = follow_up(twin)
    with running() as server:
        history(server)
        stats, view = server.engine.stats(), server.engine.session("", "s")
        assert view is not None
        with server.http() as http:
            for _ in range(1200):
                directives, where = malformed(dice)
                answer, prefix = send(http, dice, directives)
                context = (directives, answer.text)
                assert answer.status_code == 400, context
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error", context
                assert error["code"] == "invalid_directive", context
                assert error["param"] == prefix + where, context
                assert error["message"].startswith(f"{prefix}{where}: "), context
                assert len(error["message"]) < 400 and "\n" not in error["message"], context
        after = server.engine.session("", "s")
        assert after is not None
        assert server.engine.stats() == stats
        for name in view.__slots__:
            if name != "age_s":
                assert getattr(after, name) == getattr(view, name), name
        assert follow_up(server) == want
        server.settled()
