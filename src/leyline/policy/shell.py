"""Which files a call reads and writes, as far as that can be told without running it."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from leyline.policy.words import Command, commands

READERS = ("read", "read_file", "view", "view_file", "open_file")
WRITERS = ("write", "write_file", "create_file", "edit", "edit_file", "str_replace", "insert")

_PATHS = ("path", "file_path", "filename", "file")
_PARTS = ("view_range", "offset", "limit", "start", "end", "start_line", "end_line")
_VIEWS, _CHANGES = ("view",), ("create", "str_replace", "insert", "undo_edit")
_WHOLE, _PART = ("cat", "nl", "tac"), ("head", "tail", "sed")
_UNKNOWN = re.compile(r"[*?\[\]{}$`~]")
_ASSIGNS = re.compile(r"\w+=")
_MOST_FILES, _DEEPEST = 100, 1000
"""Files of a command, and characters of a folder, beyond which nothing is said about it."""


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
    and `cp`. What the shell would expand isn't guessed at, and very long commands aren't looked at.
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
    found = commands(command_of(arguments))
    return tuple(word for each in found if (word := _program(each.words)))


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


def _of_command(command: str) -> Touched:
    found = list(commands(command))
    start = 0
    while start < len(found) and _is_cd(found[start]):
        start += 1
    folder = posixpath.join("", *(each.words[1] for each in found[:start]))
    found = found[start:]
    writes = [file for each in found for file in _written(each)]
    reads: list[str] = []
    piped = [each.after == "|" for each in found[1:]]
    if found and all(piped) and not found[0].to:
        reads = _read(found[0].words)
    if any(map(_UNKNOWN.search, [folder, *reads])):
        reads = []
    if _UNKNOWN.search(folder):
        writes = []
    if len(reads) + len(writes) > _MOST_FILES or len(folder) > _DEEPEST:
        return _NOTHING
    is_whole = bool(reads) and found[0].words[0] in _WHOLE and not piped

    def paths(names: list[str]) -> frozenset[str]:
        known = [name for name in names if not _UNKNOWN.search(name)]
        return frozenset(posixpath.normpath(posixpath.join(folder, name)) for name in known)

    return Touched(paths(reads), paths(writes), is_whole)


def _is_cd(command: Command) -> bool:
    return len(command.words) == 2 and command.words[0] == "cd"


def _program(words: Sequence[str]) -> str:
    for word in words:
        if not _ASSIGNS.match(word):
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


def _written(command: Command) -> list[str]:
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
