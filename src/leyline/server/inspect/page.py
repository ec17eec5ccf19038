"""/leyline: the page. Its files have no data in them; it asks for that under /v1/, with the key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter()

_SCRIPT, _STYLE = "text/javascript; charset=utf-8", "text/css; charset=utf-8"
PATHS = {
    "/leyline": ("index.html", "text/html; charset=utf-8"),
    "/leyline/page.css": ("page.css", _STYLE),
    "/leyline/bars.css": ("bars.css", _STYLE),
    "/leyline/page.js": ("page.js", _SCRIPT),
    "/leyline/turn.js": ("turn.js", _SCRIPT),
    "/leyline/panel.js": ("panel.js", _SCRIPT),
    "/leyline/bar.js": ("bar.js", _SCRIPT),
    "/leyline/data.js": ("data.js", _SCRIPT),
    "/leyline/dom.js": ("dom.js", _SCRIPT),
    "/leyline/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""All there is: a file and its type by path."""

HEADERS = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Only what lies here may run or be shown, and nothing can be written as HTML."""


@cache
def _read(name: str) -> bytes:
    return (files("leyline.server.inspect") / "page" / name).read_bytes()


def _serve(path: str) -> None:
    name, kind = PATHS[path]

    async def serve() -> Response:
        return Response(_read(name), media_type=kind, headers=HEADERS)

    router.add_api_route(path, serve, methods=["GET", "HEAD"])


for _path in PATHS:
    _serve(_path)
