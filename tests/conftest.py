"""Shared fixtures. Nothing here may reach the network or need a GPU."""

from __future__ import annotations

import os
from importlib import util
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
from hypothesis import settings

# A busy machine must not fail a test: no deadlines.
settings.register_profile("leyline", deadline=None, print_blob=True)
settings.load_profile("leyline")


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> None:
    """One thread where several processes share the tests, else one per core up to two."""
    if util.find_spec("torch"):
        import torch

        alone = "PYTEST_XDIST_WORKER" not in os.environ
        torch.set_num_threads(min(2, os.cpu_count() or 1) if alone else 1)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory with the real weights. Skips where the extra is absent, but never in CI."""
    from leyline.models import MissingExtra
    from leyline.models.smollm2 import smollm2_path

    try:
        return smollm2_path()
    except MissingExtra as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing))
        pytest.skip(str(missing))
