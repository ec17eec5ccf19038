"""What was measured, as Markdown: made from the JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Data = Mapping[str, Any]


def page(found: Data) -> str:
    """A whole page of what `report.save` wrote. KeyError for a kind that is not known."""
    title, body = PAGES[found["kind"]]
    parts = [f"# {title}", _origin(found), *body(found["data"])]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def seconds(value: float) -> str:
    """As people read it."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def ratio(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0995 else f"{value:.4f}"


def gbs(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


def _origin(found: Data) -> str:
    where = found["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v)
    cpu = f"{where['cpu'] or where['platform']}, {where['cores']} cores"
    quick = " A quick run, to see that it works: its numbers say nothing." if found["quick"] else ""
    return (
        f"Made by `{found['command']}` on {cpu}; Python {where['python']}, {versions}."
        f"{quick}\n\n![The same as a picture]({found['kind']}.png)"
    )


# -- peers ------------------------------------------------------------------------------------


def _peers(data: Data) -> list[str]:
    about = table(
        ["engine", "package", "what"],
        ([p["name"], f"{p['package']} {p['version']}", p["what"]] for p in data["peers"]),
    )
    parts = [
        f"A conversation of real agent sessions is sent, then an edited version of it: "
        f"a quarter of its tokens near the start is replaced by a stub or deleted, and new tokens "
        f"come behind. Every engine gets the same token ids over HTTP and answers one token. "
        f"{_of(data['repeats'])}; {data['threads']} threads.",
        about,
    ]
    sizes = dict.fromkeys((c["edit"]["conversation"], c["edit"]["kind"]) for c in data["cases"])
    for conversation, kind in sizes:
        cases = [
            c
            for c in data["cases"]
            if (c["edit"]["conversation"], c["edit"]["kind"]) == (conversation, kind)
        ]
        parts += [_peers_head(cases[0]["edit"]), _peers_table(cases)]
    return [*parts, _PEERS_NOTES]


def _of(repeats: int) -> str:
    return "One pair each" if repeats == 1 else f"Medians of {repeats} pairs"


def _peers_head(edit: Data) -> str:
    done = f"replaced by {edit['stub']}" if edit["kind"] == "replace" else "deleted"
    return (
        f"## {edit['conversation']} tokens: {edit['span']} at {edit['start']} {done}, "
        f"{edit['new']} new"
    )


def _peers_table(cases: Sequence[Data]) -> str:
    head = ["engine", "tokens computed", "of", "first token", "without a cache", "ratio"]
    return table(
        head,
        (
            [
                c["peer"],
                f"{c['computed']}",
                f"{c['prompt']}",
                seconds(c["edited_s"]),
                seconds(c["cold_s"]),
                ratio(c["ratio"]),
            ]
            for c in cases
        ),
    )


_PEERS_NOTES = """## How to read it

- Compare ratios, and times within a line. Across engines times say nothing about splicing:
  llama.cpp runs its own kernels on weights in Q4_1, the others run torch in fp32.
- *Without a cache* is the prompt with the stub and another first token, so that no engine finds any
  of it; for llama.cpp its cache is switched off for that request too. It is sent once for each
  length, between the two edits.
- llama.cpp shifts a cached run only if the tokens in front of it are found in the cache too, so
  `cache-reuse` helps with deletions, not with replacements.
- SGLang runs with the attention of `leyline.sglang.cpu` in both lines. SGLang's own for CPUs widens
  each prefill pass to the whole length, so there a splice would save no attention."""


# -- growth -----------------------------------------------------------------------------------


def _growth(data: Data) -> list[str]:
    speed = data["speed"]
    edit = data["splices"][0]["edit"]
    splices = table(
        ["rows kept", "rows", "computed", "splice", "first token", "re-prefill", "ratio"],
        (
            [
                f"{c['kept']}",
                c["way"],
                f"{c['computed']}",
                seconds(c["splice_s"]),
                seconds(c["splice_ttft_s"]),
                seconds(c["prefill_ttft_s"]),
                ratio(c["ratio"]),
            ]
            for c in data["splices"]
        ),
    )
    longest = max(c["edit"]["conversation"] for c in data["splices"])
    past = (
        f" The longest conversation has {longest} tokens, more than the model's "
        f"{data['positions']} positions: its answers are noise there, its times are not."
        if longest > data["positions"]
        else ""
    )
    return [
        f"## On a model: {data['model']}",
        f"{edit['span']} tokens at {edit['start']} are replaced by {edit['stub']}, "
        f"{edit['new']} new ones come behind; embedded engine, fp32. {_of(data['repeats'])}, the "
        f"two halves in turns. *Splice* is the handling of rows alone, *first token* all of a "
        f"request.{past}",
        splices,
        "## Rows alone",
        f"Rows of all layers in bf16, without a model, best of several runs. This machine copies "
        f"{gbs(speed['copy_bytes_s'])} (`Tensor.copy_` of 256 MB, reads and writes counted).",
        _rows_table(data["rows"], speed["copy_bytes_s"]),
        "*Turn*: the rotary columns in place, of rows that are the session's alone. *Move*: whole "
        "rows to other slots, turned on the way. *Copy*: `Tensor.copy_` of whole rows to other "
        "slots. The shares are of this machine's copy bandwidth. Rows lie as SGLang keeps them, "
        "latent and rotary key side by side. Where not all layers were measured at once, for want "
        "of memory, the time was scaled up.",
    ]


def _rows_table(rows: Sequence[Data], copy_bytes_s: float) -> str:
    def share(moved: float, time: float) -> str:
        return f"{moved / time / copy_bytes_s:.2f}"

    return table(
        ["model", "layers (at once)", "rows", "turn", "share", "move", "share", "copy", "share"],
        (
            [
                c["shape"],
                f"{c['layers']} ({c['measured_layers']})",
                f"{c['rows']}",
                seconds(c["turn_s"]),
                share(c["turned_bytes"], c["turn_s"]),
                seconds(c["move_s"]),
                share(c["row_bytes"], c["move_s"]),
                seconds(c["copy_s"]),
                share(c["row_bytes"], c["copy_s"]),
            ]
            for c in rows
        ),
    )


# -- model on paper ---------------------------------------------------------------------------


def _model(data: Data) -> list[str]:
    edit = data["edit"]
    lines = table(
        ["model", "GPU", "tokens", "re-prefill", "splice", "rows", "ratio", "copied", "its rows"],
        (
            [
                c["model"],
                c["where"],
                f"{c['conversation']}",
                seconds(c["prefill_s"]),
                seconds(c["move_s"]),
                seconds(c["move_rows_s"]),
                ratio(c["ratio"]),
                seconds(c["copy_s"]),
                seconds(c["copy_rows_s"]),
            ]
            for c in data["lines"]
        ),
    )
    return [
        "Nothing on this page but its last table was measured. It is what data sheets and "
        "published configs give with the formulas of `src/leyline/proof/paper_gpu.py`.",
        f"The edit: {edit['span']} tokens at {edit['start']} become {edit['stub']}, {edit['new']} "
        f"new ones come behind. *Re-prefill*: time to the first token with a prefix cache, which "
        f"has the {edit['start']} tokens in front of the edit. *Splice*: the same with rows moved "
        f"in place; *rows*: what the rows take of it. *Copied*: with whole rows copied.",
        lines,
        "## Assumptions",
        _assumed(data),
        _facts(data),
        _MODEL_NOTES,
        "## What if they are wrong",
        "The ratio splice / re-prefill when one assumption changes and the others stay.",
        _swings(data["swings"]),
        "## Check against what was measured here",
        *_checked(data["checked"]),
    ]


def _assumed(data: Data) -> str:
    rows = ([_ASSUMED[name], _assumption(name, value)] for name, value in data["assumed"].items())
    return table(["assumption", "value"], rows)


_ASSUMED = {
    "linear": "share of peak FLOP/s, linear layers",
    "attention": "share of peak FLOP/s, attention",
    "weights": "share of memory bandwidth, weights and rows read",
    "rows": "share of memory bandwidth, rows moved or copied",
    "host_s": "host time of a splice",
    "kernels": "kernels a layer",
    "launch_s": "launch of a kernel",
    "chunk": "tokens in a pass at most",
    "passes": "passes of a splice",
}


def _assumption(name: str, value: float) -> str:
    if name.endswith("_s"):
        return seconds(value)
    return f"{value}" if name in ("kernels", "chunk", "passes") else f"{value:.0%}"


def _facts(data: Data) -> str:
    gpus = table(
        ["GPU", "memory", "16 bit", "8 bit"],
        (
            [
                g["name"],
                f"{g['bytes_s'] / 1e12:.2f} TB/s",
                f"{g['flops_s'] / 1e12:.0f} TFLOP/s",
                f"{g['flops8_s'] / 1e12:.0f} TFLOP/s",
            ]
            for g in data["gpus"]
        ),
    )
    models = table(
        ["model", "layers", "heads", "row (rotary)", "parameters", "of them a token", "weights"],
        (
            [
                m["name"],
                f"{m['layers']}",
                f"{m['heads']}",
                f"{m['row_elements']} ({m['rotary_elements']})",
                f"{m['parameters'] / 1e9:.1f} G",
                f"{m['linear_parameters'] / 1e9:.1f} G",
                f"{8 * m['weight_bytes']} bit",
            ]
            for m in data["models"]
        ),
    )
    return f"{gpus}\n\n{models}"


_MODEL_NOTES = """\
- A pass takes as long as the slower of its arithmetic and the reading of its weights, plus its
  attention, and at least as long as its kernels take to launch.
- Linear layers: two FLOPs a parameter and token; parameters of a token without embedding and head.
- Attention: exact counts of rows read under the causal mask; heads expanded from the latents, or
  attention on the latents, whichever takes fewer FLOPs.
- A splice reads weights too: of the routed experts, those that its few tokens choose if each
  chooses at random. For short prompts that is most of its time.
- Several GPUs share every pass evenly and talk for free. Each turns all rows, as MLA rows are on
  all of them."""


def _swings(swings: Sequence[Data]) -> str:
    return table(
        ["assumption", "model", "tokens", "from", "to", "ratio from", "to", "as assumed"],
        (
            [
                _ASSUMED[s["assumption"]],
                s["model"],
                f"{s['conversation']}",
                _assumption(s["assumption"], s["low"]),
                _assumption(s["assumption"], s["high"]),
                ratio(s["at_low"]),
                ratio(s["at_high"]),
                ratio(s["usual"]),
            ]
            for s in swings
        ),
    )


def _checked(rows: Sequence[Data]) -> list[str]:
    if not rows:
        return ["Nothing was at hand: run `python -m leyline.proof growth` first."]
    head = ["rows kept", "rows", "splice", "on paper", "off by", "re-prefill", "on paper", "off by"]
    measured = table(
        [*head, "ratio", "on paper", "share"],
        (
            [
                f"{c['kept']}",
                c["way"],
                seconds(c["splice_s"]),
                seconds(c["splice_on_paper_s"]),
                f"{c['splice_on_paper_s'] / c['splice_s'] - 1:+.0%}",
                seconds(c["prefill_s"]),
                seconds(c["prefill_on_paper_s"]),
                f"{c['prefill_on_paper_s'] / c['prefill_s'] - 1:+.0%}",
                ratio(c["splice_s"] / c["prefill_s"]),
                ratio(c["splice_on_paper_s"] / c["prefill_on_paper_s"]),
                f"{share_on_paper(c):.2f}",
            ]
            for c in rows
        ),
    )
    text = (
        "The same formulas, for the model and machine of [growth.md](growth.md), with the FLOP/s "
        "of a linear layer and of attention and the copy bandwidth measured there, and nothing "
        "else assumed: no share of a peak, no host time, no launches. The ratios are splice / "
        "re-prefill of these times."
    )
    return [text, measured, _verdict([share_on_paper(c) for c in rows])]


def share_on_paper(checked: Data) -> float:
    """The ratio splice / re-prefill on paper, as a share of the measured one."""
    on_paper: float = checked["splice_on_paper_s"] / checked["prefill_on_paper_s"]
    return on_paper / (checked["splice_s"] / checked["prefill_s"])


def _verdict(shares: Sequence[float]) -> str:
    """shares: see `share_on_paper`."""
    low, high = min(shares), max(shares)
    between = f"between {low:.2f} and {high:.2f} of" if low < high else f"{low:.2f} of"
    if high < 1:
        judged = "they are too optimistic about what a splice saves"
    elif low > 1:
        judged = "they are too pessimistic about what a splice saves"
    else:
        judged = "they err both ways"
    return f"On this machine the formulas give {between} the measured ratio: {judged}."


PAGES: dict[str, tuple[str, Callable[[Data], list[str]]]] = {
    "peers": ("An edit, at several engines", _peers),
    "growth": ("What a splice costs as the context grows", _growth),
    "model": ("A splice on a large GPU, on paper", _model),
}
