"""Text for the nano model: the Python standard library (PSF licence), of the running interpreter.

Two kinds: source files as they are, and short tool-using sessions written from them, in which what
an assistant says is found in what a tool printed before. The second kind is what makes a small
model read its context.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}
SKIPPED |= {"encodings"}  # tables of characters
HELD_OUT = 40
"""One module in this many is kept from training, to measure the loss on."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    """As a path below the library, "json/decoder.py"."""

    text: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.name.encode()) % HELD_OUT == 0

    @property
    def lines(self) -> list[str]:
        return self.text.split("\n")


@dataclass(frozen=True, slots=True)
class Definition:
    """A function or class at the top of a module."""

    module: Module
    name: str
    kind: str
    first: int
    """Its lines, from one, both included."""

    last: int
    summary: str
    """First line of its docstring."""


def modules() -> list[Module]:
    """The library's modules without tests, and what pydoc shows of the language reference."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [Module(f"topics/{name}.rst", text) for name, text in sorted(topics.items())]
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if not SKIPPED.intersection(below.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if 200 < len(text) < 400_000:
                found.append(Module(below.as_posix(), text))
    return found


def definitions(module: Module) -> Iterator[Definition]:
    """What a module defines at its top level and describes in a docstring."""
    if not module.name.endswith(".py"):
        return
    try:
        tree = ast.parse(module.text)
    except SyntaxError:
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno:
            text = ast.get_docstring(node)
            if text and text.strip():
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                summary = text.strip().split("\n")[0]
                yield Definition(module, node.name, kind, node.lineno, node.end_lineno, summary)


def sessions(held_out: bool, seed: int) -> Iterator[list[Message]]:
    """Endless tool-using sessions, each about one to four definitions of the chosen modules."""
    rng = random.Random(seed)
    known = [d for m in modules() if m.held_out == held_out for d in definitions(m)]
    while True:
        yield session(rng, rng.sample(known, rng.choice([1, 2, 2, 3, 4])))


def session(rng: random.Random, about: list[Definition]) -> list[Message]:
    names = ", ".join(f"`{definition.name}`" for definition in about)
    task = rng.choice(
        [
            f"Tell me what {names} of the standard library do and where they are.",
            f"Where are {names} defined? Read them and describe them.",
            f"I need to know about {names}. Look them up and answer.",
        ]
    )
    messages = [_message("user", task)]
    for definition in about:
        messages += _look_up(rng, definition)
    found = "\n".join(
        f"- `{d.name}` is a {d.kind} in {d.module.name}, line {d.first}: {d.summary}" for d in about
    )
    messages.append(_message("assistant", f"THOUGHT: I have read all of them.\n\n{found}"))
    return messages


def _look_up(rng: random.Random, definition: Definition) -> Iterator[Message]:
    """Two calls: find the definition, then read some of it."""
    word = "class" if definition.kind == "class" else "def"
    name, path, lines = definition.name, definition.module.name, definition.module.lines
    folder = path.rsplit("/", 1)[0] if "/" in path else "."
    yield _call(f"Let me find `{name}` first.", f'grep -rn "{word} {name}" {folder}')
    yield _message("tool", f"{path}:{definition.first}:{lines[definition.first - 1]}")
    last = min(definition.last, definition.first + rng.choice([8, 15, 25, 40]))
    thought = f"It is in {path}, line {definition.first}. Let me read it."
    yield _call(thought, f"sed -n '{definition.first},{last}p' {path}")
    yield _message("tool", "\n".join(lines[definition.first - 1 : last]))


def _call(thought: str, command: str) -> Message:
    return _message("assistant", f"THOUGHT: {thought}\n\n```bash\n{command}\n```")


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
