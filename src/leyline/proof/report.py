"""Results on disk: JSON as measured; a page and a picture made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyline.models import MissingExtra
from leyline.proof.pages import PAGES, page

Found = Mapping[str, Any]


def found(
    kind: str, arguments: Sequence[str], machine: Mapping[str, Any], quick: bool, data: Found
) -> dict[str, Any]:
    """What goes into the JSON file. Absolute paths in the command line are cut to their names."""
    shown = [Path(each).name if Path(each).is_absolute() else each for each in arguments]
    return {
        "kind": kind,
        "command": " ".join(["python -m leyline.proof", *shown]),
        "quick": quick,
        "machine": dict(machine),
        "data": dict(data),
    }


def save(out: Path, result: Found) -> list[Path]:
    """Write KIND.json, KIND.md and KIND.png into a folder. Returns what was written."""
    file = out / f"{result['kind']}.json"
    file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [file, *render(file)]


def render(file: Path) -> list[Path]:
    """Make page and picture of a JSON file anew, beside it. Without matplotlib there is no picture.

    Raises ValueError, naming the file, for one that is none of ours.
    """
    result = load(file)
    text = file.with_name(f"{result['kind']}.md")
    try:
        shown = page(result)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{file}: is incomplete ({error!r})") from error
    text.write_text(shown, encoding="utf-8")
    picture = text.with_suffix(".png")
    from leyline.proof.plots import draw

    try:
        draw(result, picture)
    except MissingExtra:
        return [text]
    return [text, picture]


def load(file: Path, kind: str | None = None) -> dict[str, Any]:
    """A JSON file that `save` wrote, of this kind. Raises ValueError, naming it, otherwise."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: no JSON ({error})") from error
    if not isinstance(result, dict) or result.get("kind") not in PAGES:
        raise ValueError(f"{file}: not written by leyline.proof ({', '.join(PAGES)})")
    if kind not in (None, result["kind"]):
        raise ValueError(f"{file}: has {result['kind']}, not {kind}")
    if not result.get("data") or not isinstance(result.get("machine"), dict):
        raise ValueError(f"{file}: is incomplete")
    return result
