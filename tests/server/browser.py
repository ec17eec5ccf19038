"""A headless Chromium, driven by Playwright. None of either is downloaded here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def executable() -> str | None:
    """Where a Chromium is: named by LEYLINE_CHROMIUM, else on the path."""
    named = os.environ.get("LEYLINE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


def missing() -> str | None:
    """Why there can be no browser; None if there can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the package playwright is not installed"
    if executable() is None:
        return f"no browser: install Chromium, or name one with LEYLINE_CHROMIUM ({NAMES[0]}, …)"
    return None


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser until the block ends."""
    from playwright.sync_api import sync_playwright

    # As root, as in most containers, its sandbox does not start.
    root = getattr(os, "geteuid", lambda: 1)() == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable(), args=[*FLAGS, *(["--no-sandbox"] if root else [])]
        )
        try:
            yield browser
        finally:
            browser.close()
