"""API keys, and whose a session is."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from leyline.server.errors import ApiError
from leyline.server.inspect.page import PATHS

OPEN_PATHS = ("/health", *PATHS)
"""What is told to everybody. The files of the page have no data in them."""


class Keys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        """Raises ValueError for an empty key, which everybody would have."""
        self._digests = []
        for key in keys:
            if not key.strip():
                raise ValueError("an API key must not be empty")
            self._digests.append(_digest(key))

    def owner(self, authorization: str | None, api_key: str | None = None) -> str:
        """Who asks: the key's SHA-256, "" on a server without keys. Raises ApiError 401.

        api_key: the header `x-api-key`, looked at if there is no `Authorization`. Sessions belong
        to the owner, so that no key sees another's.
        """
        if not self._digests:
            return ""
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _refused(
                "an API key is needed: send it as 'Authorization: Bearer …' or 'x-api-key: …'"
            )
        given = _digest(key.strip())
        # All of them every time: how long it takes tells nothing of the keys.
        known = [hmac.compare_digest(given, each) for each in self._digests]
        if not any(known):
            raise _refused("the API key is not one of this server's")
        return given


class AuthMiddleware:
    """Lets in who has a key; puts the owner into the request's state."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                headers = Headers(scope=scope)
                names = ("authorization", "x-api-key")
                owner = self.keys.owner(*(_as_text(headers.get(name)) for name in names))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = owner
        await self.app(scope, receive, send)


def _refused(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _as_text(header: str | None) -> str | None:
    """A header's bytes, which came as Latin-1, as the UTF-8 that they are."""
    return header and header.encode("latin-1").decode("utf-8", "surrogateescape")


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
