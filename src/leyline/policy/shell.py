"""Which files a call reads and writes, as far as that can be told without running it."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

READERS = ("read", "read_file", "view", "view_file", "open_file")
WRITERS = ("write", "write_file", "create_file", "edit", "edit_file", "str_replace", "insert")

_PATHS = ("path", "file_path", "filename", "file")
_PARTS = ("view_range", "offset", "limit", "start", "end", "start_line", "end_line")
_VIEWS, _CHANGES = ("view",), ("create", "str_replace", "insert", "undo_edit")
_WHOLE, _PART = ("cat", "nl", "tac"), ("head", "tail", "sed")
_UNKNOWN = re.compile(r"[*?\[\]{}$`~]")
_HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
_SILENCED = re.compile(r"(?<!\S)2>>?[ \t]*/dev/null(?!\S)")
_OPERATORS = ";&|()<>\n"


class Touched(NamedTuple):
    """Paths, normalized. whole: all of what is read is shown."""

    reads: frozenset[str]
    writes: frozenset[str]
    whole: bool = False


_NOTHING = Touched(frozenset(), frozenset())


def touched(
    tool: str,
    arguments: str,
    readers: Sequence[str] = READERS,
    writers: Sequence[str] = WRITERS,
) -> Touched:
    """What a call touches: by its tool's name and path, or by its command. arguments: JSON, or the
    command of a plain call.

    A command counts as a read where it is one `cat`, `nl`, `tac`, `head`, `tail` or `sed -n`, after
    `cd` and before a pipe at most. Writes are redirections, `sed -i`, `tee`, `touch`, `rm`, `mv`
    and `cp`. What the shell would expand isn't guessed at.
    """
    values = _values(arguments)
    path = next((values[key] for key in _PATHS if isinstance(values.get(key), str)), None)
    verb = values.get("command")
    if path is not None:
        file = frozenset([posixpath.normpath(path)])
        if tool in writers or verb in _CHANGES:
            return Touched(frozenset(), file)
        if tool in readers or verb in _VIEWS:
            return Touched(file, frozenset(), not any(values.get(key) for key in _PARTS))
        return _NOTHING
    return _of_command(command_of(arguments))


def programs(arguments: str) -> tuple[str, ...]:
    """The programs that a call's command runs, in order; none for a call without a command."""
    commands = _commands(command_of(arguments))
    return tuple(word for each in commands if (word := _program(each.words)))


def command_of(arguments: str) -> str:
    """The shell command of a call: its only argument, or the one called `command` or `cmd`."""
    values = _values(arguments)
    if not values:
        return "" if arguments.lstrip().startswith("{") else arguments
    command = values.get("command", values.get("cmd", ""))
    return command if isinstance(command, str) else ""


def _values(arguments: str) -> dict[str, Any]:
    if not arguments.lstrip().startswith("{"):
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Command(NamedTuple):
    """One command. to: files that its output goes to. after: the operator in front of it."""

    words: tuple[str, ...]
    to: tuple[str, ...]
    after: str


def _of_command(command: str) -> Touched:
    commands = list(_commands(command))
    folder = ""
    while commands and commands[0].words[:1] == ("cd",) and len(commands[0].words) == 2:
        folder = posixpath.join(folder, commands.pop(0).words[1])
    writes = [file for each in commands for file in _written(each)]
    reads: list[str] = []
    piped = [each.after == "|" for each in commands[1:]]
    if commands and all(piped) and not commands[0].to and "(" not in command:
        reads = _read(commands[0].words)
    if any(map(_UNKNOWN.search, [folder, *reads])):
        reads = []
    if _UNKNOWN.search(folder):
        writes = []
    is_whole = bool(reads) and commands[0].words[0] in _WHOLE and not piped

    def paths(names: list[str]) -> frozenset[str]:
        known = [name for name in names if not _UNKNOWN.search(name)]
        return frozenset(posixpath.normpath(posixpath.join(folder, name)) for name in known)

    return Touched(paths(reads), paths(writes), is_whole)


def _commands(command: str) -> Iterator[_Command]:
    """The simple commands; nothing for what can't be taken apart (an open quote)."""
    plain = _SILENCED.sub("", _without_heredocs(command))
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        return
    words: list[str] = []
    to: list[str] = []
    after, redirect = "", ""
    for token in [*tokens, ";"]:
        if not token or token.strip(_OPERATORS):
            if not redirect:
                words.append(token)
            elif redirect.startswith(">") and not redirect.endswith("&"):
                to.append(token)
            redirect = ""
        elif "<" in token or ">" in token:
            redirect = token.lstrip("&")
        else:
            if words or to:
                yield _Command(tuple(words), tuple(to), after)
            words, to, after, redirect = [], [], token.strip(), ""


def _without_heredocs(command: str) -> str:
    """Each with its opening alone. In one pass: commands come from strangers, and are long."""
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


def _program(words: Sequence[str]) -> str:
    for word in words:
        if not re.match(r"\w+=", word):
            return posixpath.basename(word)
    return ""


def _files(words: Sequence[str]) -> list[str]:
    """Arguments that are no options and no counts."""
    return [word for word in words[1:] if word[:1] not in "-+" and not word.isdigit()]


def _read(words: Sequence[str]) -> list[str]:
    if not words or words[0] not in (*_WHOLE, *_PART):
        return []
    files = _files(words)
    if words[0] == "sed":
        return files[1:] if "-n" in words else []
    return files


def _written(command: _Command) -> list[str]:
    words, files = command.words, _files(command.words)
    match words[0] if words else "":
        case "sed" if any(word.startswith("-i") for word in words):
            files = files[1:]
        case "tee" | "touch" | "rm" | "mv":
            pass
        case "cp":
            files = files[-1:]
        case _:
            files = []
    return [*files, *command.to]
