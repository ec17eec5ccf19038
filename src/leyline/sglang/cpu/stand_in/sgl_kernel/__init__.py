"""Stands in for SGLang's compiled kernels where there is no GPU.

SGLang imports names from `sgl_kernel` as it starts. On a CPU without AMX it calls none of them for
the models that are served here: its own torch code runs. A call that comes here all the same fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.4.10"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is a GPU kernel and this server runs on a CPU. "
            "Leave out the flag or the model that needs it."
        )

    return missing
