"""One server for all tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from made_up import session
from tiny_server import Running, running

from leyline.traces import Session


@pytest.fixture
def sessions() -> list[Session]:
    return [session(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as it:
        yield it
