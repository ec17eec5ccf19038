"""A shell command in words and operators, and these as simple commands.

Commands come from strangers, and are long: each is gone through once.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

LONGEST = 1 << 16
"""Characters of a command that is looked at, here documents aside."""

_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_PIECE = re.compile(
    r"""
    (?P<joint> \\\n )
  | (?P<blank> [ \t\r]+ | (?<![^ \t\r\n;&|()<>])\#[^\n]* )
  | (?P<operator> &>>? | [0-9]*(?:<<[<-]?|<[>&]?|>[>&|]?) | && | \|[|&]? | ;;? | [&()\n] )
  | '(?P<single> [^']* )'
  | "(?P<double> (?:[^"\\]+|\\.)*+ )"
  | \\(?P<escaped> . )
  | (?P<plain> [^ \t\r\n'"\\;&|()<>]+ )
  | (?P<open> . )
    """,
    re.VERBOSE | re.DOTALL,
)
"""open: a quote that isn't closed, or a backslash at the end."""
_ESCAPED = re.compile(r'\\(?:(["\\$`])|\n)')


class Token(NamedTuple):
    """A word without its quotes, or an operator. What was quoted is never one."""

    text: str
    is_operator: bool


class Command(NamedTuple):
    """A simple command. to: files that its output goes to. after: the operator in front of it."""

    words: tuple[str, ...]
    to: tuple[str, ...]
    after: str


def commands(command: str) -> Iterator[Command]:
    """The simple commands in it; none in one that is too long or can't be taken apart."""
    plain = without_heredocs(command)
    if len(plain) > LONGEST:
        return
    words: list[str] = []
    to: list[str] = []
    after, redirect = "", ""
    for text, is_operator in [*tokens(plain), Token("\n", True)]:
        if not is_operator:
            if not redirect:
                words.append(text)
            elif _is_written(redirect, text):
                to.append(text)
            redirect = ""
        elif "<" in text or ">" in text:
            redirect = text
        else:
            if words or to:
                yield Command(tuple(words), tuple(to), after)
            if words or to or text != "\n":  # a line may end behind an operator
                after = text
            words, to, redirect = [], [], ""


def tokens(command: str) -> list[Token]:
    """Words and operators, comments aside; none where a quote is open."""
    found: list[Token] = []
    word: list[str] = []  # its pieces: quoted, escaped, plain
    for piece in _PIECE.finditer(command):
        kind = piece.lastgroup
        if kind == "open":
            return []
        if kind in ("blank", "operator"):
            if word:
                found.append(Token("".join(word), False))
                word = []
            if kind == "operator":
                found.append(Token(piece[0], True))
        elif kind == "double":
            word.append(_ESCAPED.sub(r"\1", piece["double"]))
        elif kind is not None and kind != "joint":
            word.append(piece[kind])
    if word:
        found.append(Token("".join(word), False))
    return found


def without_heredocs(command: str) -> str:
    """Each here document with its opening alone."""
    lines = command.split("\n")
    ends: dict[str, list[int]] = {}
    for i, line in enumerate(lines):
        ends.setdefault(line.strip(" \t"), []).append(i)
    out, i = [], 0
    while i < len(lines):
        line, last = lines[i], i
        for found in _HEREDOC.finditer(lines[i]):
            closing = ends.get(found[2], [])
            at = bisect_right(closing, i)
            if at < len(closing):
                line = f"{line[: found.start()]}<<{found[2]}{line[found.end() :]}"
                last = closing[at]
                break
        out.append(line)
        i = last + 1
    return "\n".join(out)


def _is_written(redirect: str, target: str) -> bool:
    """Whether output goes to that file; errors that nobody wants don't count."""
    if redirect in ("2>", "2>>") and target == "/dev/null":
        return False
    return redirect.lstrip("0123456789&") in (">", ">>", ">|")
