"""The paper's figures and ours side by side: one page, made from the results in a folder alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyline.proof.pages import ratio, seconds, share_on_paper, table
from leyline.verify.drift import PAPER as PAPER_DRIFT

Data = dict[str, Any]

MEASUREMENTS = ("rows", "drift", "forget", "influence", "answers")
PAPER_MODELS = ("deepseek_v2", "joyai_flash", "glm4_moe_lite", "moonlight")


@dataclass(frozen=True, slots=True)
class Claim:
    """A line of the page. here: what was measured, with its page."""

    what: str
    paper: str
    here: str
    page: str


def write(folder: Path) -> Path:
    """Write README.md into a folder of results; what was not run is said to be missing."""
    page = folder / "README.md"
    page.write_text(text(folder), encoding="utf-8")
    return page


def text(folder: Path) -> str:
    claims = list(_claims(folder))
    lines = [[c.what, c.paper, c.here, _link(folder, c.page)] for c in claims]
    return (
        "\n\n".join(
            [
                "# Results",
                "`make proof` makes what is here on a CPU, this page included, and "
                "`make eval-debug-gym` the rest. Each page names its own command, machine and "
                "versions.",
                "## The paper's figures and ours",
                table(["what", "paper", "here", "page"], lines),
                _WHY,
                "## Costs",
                *(list(_costs(folder)) or ["Not run."]),
                _UNMEASURED,
            ]
        )
        + "\n"
    )


def _link(folder: Path, page: str) -> str:
    return f"[{page}]({page})" if (folder / page).is_file() or page.startswith("..") else "–"


def _load(file: Path) -> Data | None:
    """Raises ValueError, naming the file, for one that can't be read."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not written by leyline")
    return found


def _claims(folder: Path) -> Iterator[Claim]:
    for model in ("nano", "smollm2"):
        yield from _mechanism(folder, model)
    for model in ("nano", "smollm2"):
        yield from _verified(folder, model)
    yield _architectures(folder)
    yield Claim(
        "debug-gym tasks solved, truncation through Leyline",
        "31.2 % → 45.5 %",
        "not measured: needs a model that solves them",
        "../eval.md",
    )


# -- recorded sessions against SGLang -----------------------------------------------------------


def _mechanism(folder: Path, model: str) -> Iterator[Claim]:
    page = f"mechanism-{model}/report.md"
    found = _load(folder / f"mechanism-{model}" / "results.json")
    if found is None:
        yield Claim(f"hit rate gained on SGLang, {model}", "+11.2 points", "not run", page)
        return
    beside, warm, plain = (
        [c for c in found["comparisons"] if (c["arm"], c["beside"]) == pair]
        for pair in (("splice", "truncate"), ("splice", "append"), ("truncate", "append"))
    )
    at = _at(beside)
    points = ", ".join("?" if c["points"] is None else f"{c['points']:+.1f}" for c in beside)
    computed = ", ".join(ratio(c["computed"]) for c in beside)
    yield Claim(
        f"hit rate gained over the prefix cache, SGLang, {model}, C = {at}",
        "+11.2 points, C = 1, 4, 8, 16",
        f"{points} points; tokens computed {computed} of the prefix cache's",
        page,
    )
    saved = ", ".join(f"{1e3 * c['saved_edited_s'] / max(1, c['edited']):.0f}" for c in beside)
    shares = ", ".join(ratio(c["e2e_edited"]) for c in beside)
    alike = ", ".join("?" if c["e2e_alike"] is None else ratio(c["e2e_alike"]) for c in beside)
    yield Claim(
        f"end-to-end time of answers of one token behind edits, {model}, C = {at}",
        "up to 241 ms a call saved (C = 8)",
        f"{saved} ms a call saved; {shares} of the prefix cache's (calls that are the same in both "
        f"arms, which show how steady the machine was: {alike})",
        page,
    )
    known = sum(c["known"] for c in warm)
    agree = f"splice {_pooled(warm):.1%} of {known} edited calls"
    clear = sum(c["clear"] for c in warm)
    if clear:
        agree += f" ({sum(c['same_clear'] for c in warm) / clear:.1%} where neither is near a tie)"
    different = max((c["different"] for c in warm), default=0)
    yield Claim(
        f"first token as with the full context (warm path), {model}, C = {_at(warm)}",
        "100 %",
        f"{agree}; fresh prefill of the edited prompt {_pooled(plain):.1%}; {different} different "
        "first tokens among them",
        page,
    )


def _at(comparisons: list[Data]) -> str:
    return ", ".join(str(c["concurrency"]) for c in comparisons)


def _pooled(comparisons: list[Data]) -> float:
    known = sum(c["known"] for c in comparisons)
    return sum(c["same_first"] for c in comparisons) / known if known else float("nan")


# -- leyline verify -----------------------------------------------------------------------------


def _verified(folder: Path, model: str) -> Iterator[Claim]:
    page = f"verify/{model}.md"
    found = _load(folder / "verify" / f"{model}.json")
    if found is None:
        yield Claim(f"the mechanism on {model}", "holds", "not run", page)
        return
    yield Claim(f"the mechanism on {model}", "holds", _verdict(found), page)
    rows = {row["name"]: row for row in found["rows"]}
    sides = {
        name.split(".")[1].replace("_", " "): row["details"]["sides"]["0"]
        for name, row in rows.items()
        if name.startswith("influence.") and row["details"]
    }
    shown = "; ".join(
        f"{kind}: {s['full']} of {s['full'] + s['fresh'] + s['neither']}"
        for kind, s in sides.items()
    )
    if shown:
        yield Claim(
            f"splice takes the full context's side where the span decides the first token, {model}",
            "always",
            shown,
            page,
        )
    if "drift.once" not in rows or "answers.splice" not in rows:
        return
    curves = rows["drift.once"]["details"]
    errors = curves["curves"]["fp32, stored in bf16"]
    past = (n for n, e in zip(curves["splices"], errors, strict=True) if e > PAPER_DRIFT)
    n = next(past, None)
    yield Claim(
        f"relative L2 error of rotary columns in bf16, {model}",
        "about 4.7e-3, sub-linear",
        f"{errors[0]:.1e} after 1 splice, {errors[-1]:.1e} after {curves['splices'][-1]}, growing "
        f"as n^{rows['drift.growth']['value']:.2f}; "
        + ("always below the paper's" if n is None else f"past the paper's by {n} in a row"),
        page,
    )
    details = rows["answers.splice"]["details"]
    nll, turns = details["nll"], details["turns"]
    yield Claim(
        f"first choices of the model over {details['tokens']} recorded answer tokens as with the "
        f"full context, {model}",
        "100 % (of first tokens)",
        ", ".join(f"{name} {value:.1%}" for name, value in details["tokens_as_full"].items()),
        page,
    )
    listed = ", ".join(f"{name} {value:.3f}" for name, value in nll.items())
    yield Claim(
        f"nats a token of recorded answers, {turns} turns as edits pile up, {model}"
        + (" (prompts longer than it was trained on)" if model == "nano" else ""),
        "–",
        listed,
        page,
    )


def _verdict(found: Data) -> str:
    """In a few words, with what was not measured."""
    missed = [row["name"] for row in found["rows"] if row["met"] is False]
    wanted = [name for name in MEASUREMENTS if name not in found["skipped"]]
    left = [*found["failed"], *(name for name in wanted if not _measured(found, name))]
    verdict = "holds" if found["passed"] else ": ".join(["does not hold", ", ".join(missed)])
    if not any(row["met"] is not None for row in found["rows"]):
        verdict = "nothing checked"
    if left:
        verdict += f"; not measured: {', '.join(dict.fromkeys(left))}"
    return verdict + (" (a quick run)" if found["quick"] else "")


def _measured(found: Data, name: str) -> bool:
    """Whether anything of it was checked: a search that finds nothing checks nothing."""
    rows = [row for row in found["rows"] if row["name"].split(".")[0] == name]
    return any(row["met"] is not None for row in rows)


def _architectures(folder: Path) -> Claim:
    found = {name: _load(folder / "verify" / f"{name}.json") for name in PAPER_MODELS}
    run = {name: _verdict(data) for name, data in found.items() if data is not None}
    good = [name for name, verdict in run.items() if verdict.startswith("holds")]
    here = f"holds on {len(good)} of {len(run)} with their rows and frequencies, random weights"
    here += "".join(f"; {name}: {verdict}" for name, verdict in run.items() if verdict != "holds")
    return Claim(
        "DeepSeek-V2-Lite, JoyAI-LLM Flash, GLM-4.7-Flash, Moonlight-16B-A3B",
        "validated",
        here if run else "not run",
        f"verify/{PAPER_MODELS[0]}.md",
    )


# -- costs --------------------------------------------------------------------------------------


def _costs(folder: Path) -> Iterator[str]:
    names = ("peers", "growth", "debug-gym", "model")
    peers, growth, gym, model = (_load(folder / f"{name}.json") for name in names)
    if peers is not None:
        yield (
            "[peers.md](peers.md): one edit at every engine, SmolLM2; time to first token / "
            "the same prompt without a cache, and tokens computed."
        )
        yield _peers(peers["data"]["cases"])
    if growth is not None:
        cases = [c for c in growth["data"]["splices"] if c["way"] == "moved"]
        first, last = cases[0], cases[-1]
        yield (
            f"[growth.md](growth.md): a splice takes {ratio(first['ratio'])} of a re-prefill with "
            f"{first['kept']} rows kept and {ratio(last['ratio'])} with {last['kept']} (SmolLM2, "
            f"{seconds(last['splice_ttft_s'])} instead of {seconds(last['prefill_ttft_s'])}); rows "
            "of the paper's models alone, up to 128 k of them."
        )
    if gym is not None and len(gym["comparisons"]) == 3:  # all arms
        yield _gym(gym)
    if model is not None:
        lines = model["data"]["lines"]
        best = min(lines, key=lambda c: c["ratio"])
        worst = max(lines, key=lambda c: c["ratio"])
        yield (
            "[model.md](model.md), on paper, not measured: on large GPUs a splice would take "
            f"{ratio(worst['ratio'])} ({worst['model']}, {worst['conversation']} tokens) to "
            f"{ratio(best['ratio'])} ({best['model']}, {best['conversation']} tokens) of a "
            f"re-prefill.{_trust(model['data']['checked'])}"
        )


def _trust(checked: list[Data]) -> str:
    """How far the same formulas are from what this machine measured."""
    shares = [share_on_paper(each) for each in checked]
    if not shares:
        return ""
    return (
        f" On this machine the same formulas give {min(shares):.2f} to {max(shares):.2f} of the "
        "ratios that were measured."
    )


def _gym(found: Data) -> str:
    lines = {line["arm"]: line for line in found["lines"]}
    sums = [f"{lines[arm]['computed']:,}" for arm in ("append", "truncate", "splice")]
    beside = {c["beside"]: c for c in found["comparisons"] if c["arm"] == "splice"}
    shares = [ratio(beside["truncate"][field]) for field in ("computed", "model_s")]
    return (
        f"[debug-gym.md](debug-gym.md): {len(found['by_task'])} of debug-gym's tasks with scripted "
        f"answers on {found['settings']['model']}; prompt tokens computed without truncation, with "
        f"it, with it and splices: {', '.join(sums)}. Splices compute {shares[0]} of what "
        f"truncation alone does, in {shares[1]} of its time in the model."
    )


def _peers(cases: list[Data]) -> str:
    kinds = list(dict.fromkeys((c["edit"]["conversation"], c["edit"]["kind"]) for c in cases))
    engines = dict.fromkeys(c["peer"] for c in cases)
    by = {(c["peer"], c["edit"]["conversation"], c["edit"]["kind"]): c for c in cases}
    lines = [[engine, *(_peer(by.get((engine, *kind))) for kind in kinds)] for engine in engines]
    return table(["engine", *(f"{kind}, {n} tokens" for n, kind in kinds)], lines)


def _peer(case: Data | None) -> str:
    return "–" if case is None else f"{ratio(case['ratio'])}, {case['computed']} tokens"


_WHY = """## What differs, and why

- The paper served large MLA models on GPUs. Here SmolLM2-135M (GQA) and `nano`, a trained MLA
  model of four million parameters, run on a CPU. Hit rates and counts of tokens do not depend on
  that; times do, and their ratios on how fast a machine computes beside how fast it copies.
- Hit rates depend on the sessions and on what is cleared. Here: recorded mini-swe-agent sessions,
  all but the newest two tool outputs cleared, and of each session only the calls around its first
  edits (each page says which), as longer prompts take a CPU too long. Nothing is evicted, so the
  number of sessions at once changes times, and hit rates only by which sessions there are.
- *First token as with the full context.* In the paper the warm path is the full context. A splice
  keeps what rows behind the span have read in it, not the span: what is computed after the edit
  can't look at it any more. On recorded answers that hardly shows: SmolLM2 nearly always chooses
  alike with splice, fresh prefill and full context, and is far off with keys that are not turned.
  (`nano`, on prompts longer than it was trained on, tells hardly any of them apart.) On prompts
  searched for edits that decide the first token, models with trained weights mostly side with the
  edited prompt, those with random weights about half the time; whether what repeats the phrase that
  was cut out stands before the edit or after it does not decide the side. The paper's *always* was
  not reproduced.
- Drift is measured against one exact rotation of the original rows, so that the roundings of all
  splices are in it."""

_UNMEASURED = """## Not measured

- GPUs: none was to be had. `scripts/gpu_splice.py` and `scripts/gpu_rows.py` measure on one; they
  have only been run at tiny size on a CPU.
- Models of real size, with real weights; the paper's four are there with their row shapes and
  frequencies, random weights and fewer layers.
- vLLM, and tensor parallelism.
- Agents' success: what clearing old outputs does to solve rates."""
