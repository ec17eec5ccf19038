"""One server for all tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI
from tiny_server import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as it:
        yield it


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()
