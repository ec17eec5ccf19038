"""python offline_engine.py MODEL: what an offline Engine makes of a `leyline` object, with and
without Leyline's cache.

A process of its own, as an Engine starts others and sets up the whole process.
"""

from __future__ import annotations

import sys
from typing import Any

IDS = list(range(10, 110))
EDITED = [*IDS[:20], *IDS[40:], 7]
STRANGER = {"session": "never", "strict": True, "directives": [{"start": 0, "end": 1}]}


def custom(obj: object, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 3, "ignore_eos": True, **more, "custom_params": {"leyline": obj}}


def error_of(engine: Any, obj: object, stream: bool) -> str:
    try:
        answer = engine.generate(input_ids=IDS, sampling_params=custom(obj), stream=stream)
        answer = list(answer) if stream else answer
    except ValueError as error:
        return str(error)
    raise AssertionError(f"no error but {answer}")


def with_leyline(engine: Any) -> None:
    params = custom({"session": "s"})
    first = engine.generate(input_ids=IDS, sampling_params=params)
    assert first["meta_info"]["leyline"]["edits"] == [], first
    assert params == custom({"session": "s"}), "the caller's own"
    chunks = list(engine.generate(input_ids=EDITED, sampling_params=params, stream=True))
    report = chunks[-1]["meta_info"]["leyline"]
    assert report == chunks[0]["meta_info"]["leyline"], chunks
    assert report["tokens"]["moved"] >= 60, report
    samples = engine.generate(
        input_ids=[IDS, IDS[5:]],
        sampling_params=[custom({"session": "a"}, n=2), custom({"session": "b"}, n=2)],
    )
    names = [each["meta_info"]["leyline"]["session"] for each in samples]
    assert names == ["a", "a", "b", "b"], names
    for stream in (False, True):
        assert error_of(engine, {"session": ""}, stream).startswith("leyline.session: must have")
        assert "source_missing" in error_of(engine, STRANGER, stream)


def without_leyline(engine: Any) -> None:
    for stream in (False, True):
        error = error_of(engine, {"session": "s"}, stream)
        assert "without `--radix-cache-backend leyline`" in error, error


def main(model: str) -> None:
    import sglang

    for backend, check in (("leyline", with_leyline), (None, without_leyline)):
        engine = sglang.Engine(
            model_path=model,
            device="cpu",
            attention_backend="torch_native",
            mem_fraction_static=0.3,
            max_total_tokens=20000,
            radix_cache_backend=backend,
            log_level="warning",
        )
        try:
            plain = engine.generate(input_ids=IDS, sampling_params={"max_new_tokens": 1})
            assert "leyline" not in plain["meta_info"], plain
            check(engine)
        finally:
            engine.shutdown()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
