"""Models that come without a model hub, and what is missing when one can't be had."""

from __future__ import annotations


class MissingExtra(ImportError):
    """An optional dependency is not installed. ``str()`` is one line saying what to install."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f'{what} is not installed: pip install "leyline-kv[{extra}]"')
        self.extra = extra
