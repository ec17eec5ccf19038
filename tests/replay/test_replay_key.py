"""Keys and passwords: what is sent, and what is said of one that is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from leyline.replay.client import Client
from leyline.replay.server import look
from other_server import serving


@pytest.mark.parametrize("key", ["secret", "schlüssel", "ключ", "\udcff"])
def test_a_key_of_any_letters_is_sent_as_its_bytes(key: str) -> None:
    with keeper() as (url, seen), Client(url, key) as client:
        with pytest.raises(ValueError, match="401; the server refused the key"):
            look(client)
        client.http.post(f"{url}/v1/chat/completions", json={})
    wanted = b"Bearer " + key.encode("utf-8", "surrogateescape")
    assert seen == [wanted, wanted]


def test_without_a_key_one_is_asked_for() -> None:
    with keeper() as (url, seen), Client(url) as client:
        with pytest.raises(ValueError, match="401; give its key with --api-key"):
            look(client)
    assert seen == [b""]


def test_a_password_in_the_address_is_sent_but_not_told() -> None:
    with keeper() as (url, seen), Client(url.replace("//", "//me:p%20w@") + "/v1") as client:
        assert client.root == url
        with pytest.raises(ValueError, match="401") as refused:
            look(client)
    assert seen == [b"Basic " + base64.b64encode(b"me:p w")]
    assert "p%20w" not in str(refused.value)


@contextmanager
def keeper() -> Iterator[tuple[str, list[bytes]]]:
    """An HTTP server that refuses everybody, and what `Authorization` it got."""
    seen: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(str(self.headers.get("Authorization", "")).encode("latin-1"))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

    with serving(Handler) as url:
        yield url, seen
