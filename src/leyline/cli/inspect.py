"""`leyline inspect`"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from leyline.cli.common import check_writable, err, for_people, out

DEFAULT = "http://127.0.0.1:8000"
LIMIT_S = 60.0


def inspect(
    url: Annotated[str, typer.Argument(help="The server, with or without /v1.")] = DEFAULT,
    session: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one; repeatable. Else all.")
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", envvar="LEYLINE_API_KEY", help="The server's.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write there, not to stdout.")
    ] = None,
) -> None:
    """What a server holds for sessions and what became of each turn, as JSON."""
    with for_people():
        check_writable(file)
        found = look(url, session, key)
        for sentence in found["not_told"]:
            err.print(f"leyline: {sentence}", markup=False, highlight=False, soft_wrap=True)
        text = json.dumps(found, indent=2, ensure_ascii=False)
        if file is not None:
            file.write_text(text + "\n", encoding="utf-8")
            out.print(f"JSON: {file}", highlight=False)
        else:
            typer.echo(text)


def look(url: str, sessions: Iterable[str] | None, key: str | None) -> dict[str, Any]:
    """A server's sessions, all of them by default.

    Keys: server, time (Unix), sessions (each with session; cached, what GET of it tells; turns,
    which are null where the server keeps no record), not_told (sentences). Raises ValueError for a
    server that doesn't answer, or not like one of Leyline's.
    """
    import httpx

    from leyline.replay.client import bearer

    base = url.rstrip("/").removesuffix("/v1")
    headers = {} if key is None else bearer(key)
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=LIMIT_S) as http:
            return _Look(http, base).all(sessions)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ValueError(f"{base}: no answer ({error or type(error).__name__})") from error


class _Look:
    def __init__(self, http: Any, base: str) -> None:
        self._http = http
        self._base = base
        self._not_told: list[str] = []

    def all(self, sessions: Iterable[str] | None) -> dict[str, Any]:
        names = list(sessions or ()) or self._listed()
        # Each once, in this order.
        found = [self._one(name) for name in dict.fromkeys(names)]
        if sessions and not any(each["cached"] or each["turns"] for each in found):
            raise ValueError(f"{self._base}: knows no session {', '.join(map(repr, names))}")
        return {
            "server": self._base,
            "time": round(time.time(), 3),
            "sessions": found,
            "not_told": self._not_told,
        }

    def _listed(self) -> list[str]:
        answer = self._get("/v1/leyline/sessions")
        if answer is None:
            raise ValueError(
                f"{self._base}: this server does not list its sessions (with SGLang it can't); "
                "name one with --session"
            )
        if answer.get("more"):
            self._note(f"{answer['more']} older sessions are not listed; name them with --session")
        return [each["session"] for each in answer["sessions"]]

    def _one(self, name: str) -> dict[str, Any]:
        from leyline.client import in_path

        cached = self._get(f"/v1/leyline/sessions/{in_path(name)}", "what is cached for a session")
        query = {"session": name, "text": "whole"}
        turns = self._get("/v1/leyline/turns", "turns; it keeps no record of them", query)
        return {
            "session": name,
            "cached": cached or None,
            "turns": None if turns is None else turns.get("turns", []),
        }

    def _get(
        self, path: str, what: str | None = None, query: dict[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The answer; {} for a session that is not known, None where there is no such route: then
        a sentence says that `what` is not told."""
        answer = self._http.get(path, params=query)
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.status_code == 200 and isinstance(body, dict):
            return body
        error = body.get("error") if isinstance(body, dict) else None
        error = error if isinstance(error, dict) else {}
        if error.get("code") in ("session_not_found", "source_missing"):
            return {}
        if answer.status_code in (404, 405):
            if what is not None:
                self._note(f"{self._base}: this server does not tell {what}")
            return None
        if answer.status_code in (401, 403):
            raise ValueError(f"{self._base}: it wants a key: give --key, or set LEYLINE_API_KEY")
        said = error.get("message") or f"{answer.status_code} without a sentence"
        raise ValueError(f"{self._base}{path}: {said}")

    def _note(self, sentence: str) -> None:
        if sentence not in self._not_told:
            self._not_told.append(sentence)
