"""What the measurements share: the model twice, a long real conversation, facts on the machine."""

from __future__ import annotations

import os
import platform
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leyline import __version__
from leyline.replay import encode
from leyline.traces import load_traces

if TYPE_CHECKING:
    from leyline.engine.engine import Engine

MEMORY_GIB = 2.0


class Bed:
    """A model directory, loaded when first needed. Close it at the end."""

    def __init__(self, path: Path, repeats: int) -> None:
        """repeats: of each pair of timed runs; medians are taken."""
        self.path = path
        self.repeats = repeats

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    @cached_property
    def bare(self) -> Any:
        """The same model in Transformers alone, with its own attention (sdpa)."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self.path, dtype="auto", attn_implementation="sdpa", local_files_only=True
        )
        return model.eval()

    @cached_property
    def engine(self) -> Engine:
        from leyline.engine.engine import Config, Engine

        return Engine.load(self.path, config=Config(memory_gib=MEMORY_GIB))

    @cached_property
    def conversation(self) -> np.ndarray:
        """Tokens of the shipped sessions, rendered one after the other, longest first."""
        sessions = sorted(load_traces(), key=lambda s: -sum(len(m["content"]) for m in s.messages))
        texts = [
            self.tokenizer.apply_chat_template(list(session.messages), tokenize=False)
            for session in sessions
        ]
        return encode(self.tokenizer, "".join(texts))

    def tokens(self, n: int, start: int = 0) -> np.ndarray:
        """`n` tokens of real conversation."""
        return self.conversation[start : start + n]

    def close(self) -> None:
        if "engine" in self.__dict__:
            self.engine.close()


def machine() -> dict[str, Any]:
    """Where numbers come from: cores, load, versions."""
    import torch

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "load": load,
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {
            "leyline": __version__,
            **{name: _version(name) for name in ("torch", "transformers", "numpy")},
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
    )
