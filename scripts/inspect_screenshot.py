"""Makes docs/inspect.png: /leyline with a recorded session, replayed on the embedded engine.

    python scripts/inspect_screenshot.py [OUT]

Needs a Chromium (LEYLINE_CHROMIUM names one) and the packages playwright and leyline-kv[smollm2].
Tokens are the same each time; times are the machine's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from leyline.demo import find_session
from leyline.engine.engine import Config, Engine
from leyline.models.smollm2 import smollm2_path
from leyline.server.limits import Settings
from leyline.server.run import listen, make_server, url_of
from leyline.traces import calls

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "server"))

from browser import chromium  # noqa: E402

SESSION = "8f7920a28c54"
POLICY = {"name": "clear_tool_outputs", "keep": 2}
SIZE = {"width": 1180, "height": 1150}


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """A server on a free port until the block ends; gives its URL."""
    with listen("127.0.0.1", 0) as listener:
        server = make_server(engine, Settings(), log_level="error", grace_s=1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def replay(url: str) -> None:
    """The session's calls, each with its recorded history and one token as an answer."""
    for call in calls(find_session(SESSION)):
        body: dict[str, Any] = {
            "messages": call.messages,
            "max_tokens": 1,
            "temperature": 0,
            "leyline": {"session": "fix-the-bug", "policy": POLICY},
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None)
        answer.raise_for_status()


def picture(url: str, out: Path) -> None:
    """The page, with what the newest turn moved pointed at."""
    with chromium() as browser:
        page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.goto(f"{url}/leyline")
        page.locator(".turn").first.locator(".piece.moved .cell").nth(1).hover()
        page.locator("#panel-texts pre").first.wait_for()
        page.screenshot(path=out)


def main(out: Path) -> None:
    engine = Engine.load(smollm2_path(), config=Config(memory_gib=0.6), name="smollm2")
    with engine, serving(engine) as url:
        replay(url)
        picture(url, out)
    print(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "inspect.png")
