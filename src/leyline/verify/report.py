"""The report of one model: Markdown and plots, made from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leyline.verify import plots

Found = dict[str, Any]
"""What `Verified.as_json` gives."""


def write(found: Found, folder: Path, command: str) -> Path:
    """Write NAME.json, NAME.md and plots into `folder`; returns the Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = found["model"]
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    pictures = plots.draw(found, folder)
    page = folder / f"{name}.md"
    page.write_text(markdown(found, command, [p.name for p in pictures]), encoding="utf-8")
    return page


def markdown(found: Found, command: str, pictures: list[str]) -> str:
    parts = [
        f"# {found['model']}: does the mechanism hold?",
        f"Made by `{command}` in {_minutes(found)}. {_machine(found)}",
        _verdict(found),
        _facts(found["facts"]),
        _table(found["rows"]),
        *_influence(found),
        *_answers(found),
        *[f"![{Path(name).stem.replace('-', ' ')}]({name})" for name in pictures],
        *[f"Left out: {name}: {why}." for name, why in found["skipped"].items()],
        *[f"**Came to nothing:** {name}: {why}." for name, why in found["failed"].items()],
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _verdict(found: Found) -> str:
    if found["passed"]:
        return "All that was asked of it holds."
    return "**Not all of it holds.**" if found["checked"] else "**Nothing of it was checked.**"


def _minutes(found: Found) -> str:
    seconds = sum(found["seconds"].values())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


def _machine(found: Found) -> str:
    where = found["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items() if v)
    device = where["gpu"] or f"{where['cores']} cores ({where['cpu'] or where['platform']})"
    quick = " A quick run, with small sizes." if found["quick"] else ""
    return f"{device}, {versions}.{quick}"


def _facts(facts: dict[str, Any]) -> str:
    layers = ", ".join(f"{count} {kind}" for kind, count in facts["layers"].items())
    lines = [f"{facts['model_type']}, {facts['parameters']:,} parameters; {layers} layers"]
    if facts["inv_freq"]:
        highest, lowest = facts["inv_freq"][0], facts["inv_freq"][-1]
        lines.append(
            f"{facts['rotary_width']} of {facts['key_columns']} key columns rotate, pairs are "
            f"{facts['pairing']}, frequencies: {facts['frequencies']}, "
            f"{highest:.3g} to {lowest:.3g} radians a token"
        )
    lines.append(f"rows of {facts['bytes_per_token']:,} bytes a token, {facts['dtype']}")
    return "\n".join(f"- {line}" for line in lines)


def _table(rows: list[dict[str, Any]]) -> str:
    marks = {True: "holds", False: "**fails**", None: ""}
    lines = ["| what | measured | must be | |", "| --- | --- | --- | --- |"]
    for row in rows:
        what = row["what"].replace("|", "\\|")
        lines.append(f"| {what} | {row['shown']} | {row['goal'] or ''} | {marks[row['met']]} |")
    return "\n".join(lines)


def details(found: Found, start: str) -> list[dict[str, Any]]:
    """Details of the rows whose names begin so, where there are any."""
    return [r["details"] for r in found["rows"] if r["name"].startswith(start) and r["details"]]


def _influence(found: Found) -> list[str]:
    rows = [r for r in found["rows"] if r["name"].endswith(".full") and r["details"].get("sides")]
    if not rows:
        return []
    lines = [
        "| prompts | recomputed behind the edit | as with the span | as without | neither |"
        " nats from with | from without |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kind = row["name"].split(".")[1].replace("_", " ")
        for width, sides in row["details"]["sides"].items():
            counts = " | ".join(str(sides[key]) for key in ("full", "fresh", "neither"))
            nats = " | ".join(f"{_median(sides[k]):.3g}" for k in ("from_full", "from_fresh"))
            lines.append(f"| {kind} | {width} | {counts} | {nats} |")
    text = (
        "Whose first token does the spliced cache give, on prompts where the span decides it? "
        "“As it was”: text with a span replaced far from its end; “near”: close to it. “Phrase "
        "kept”: the text ends with a phrase out of the span, written before the edit; “phrase "
        "new”: after it. Divergences are medians."
    )
    return ["## What a splice still knows of the span", text, "\n".join(lines)]


def _answers(found: Found) -> list[str]:
    all_ = details(found, "answers.splice")
    if not all_:
        return []
    data = all_[0]
    lines = [
        "| arm | nats a token | first token as with full context | tokens computed |",
        "| --- | --- | --- | --- |",
    ]
    for name, nll in data["nll"].items():
        agree = data["first_token_as_full"][name]
        lines.append(f"| {name} | {nll:.3f} | {agree:.1%} | {data['computed'][name]:,} |")
    text = (
        f"Recorded answers of {len(data['sessions'])} agent sessions, {data['turns']} turns with "
        f"edits whose full context fits the model, {data['tokens']:,} answer tokens. Each turn "
        "splices what the turn before has left."
    )
    return ["## Recorded answers as edits pile up", text, "\n".join(lines)]


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
