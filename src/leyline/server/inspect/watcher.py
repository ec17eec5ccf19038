"""Somebody who looks on, and is told when there is news."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watcher:
    """Waits for changes on an event loop. As a context manager: until it ends; leave: then told."""

    def __init__(self, owner: str, leave: Callable[[Watcher], None]) -> None:
        self.owner = owner
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._told = False

    def wake(self) -> None:
        """Something changed; any thread."""
        if self._told:
            return
        self._told = True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:  # the loop was closed under us: nobody is listening
            pass

    async def wait(self, seconds: float, pace: float) -> None:
        """Until something has changed since the last call, `pace` to `seconds` seconds."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return
        await asyncio.sleep(pace)
        self._event.clear()
        self._told = False

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self)
