"""What Leyline can do with a model, told from its config or, with `check`, from its weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from leyline.layout import ModelLayout, Unsupported, layout_of, probe
from leyline.tiny import TINY, tiny_config, tiny_model


def tiny_names() -> list[str]:
    """The built-in random models."""
    return list(TINY)


def describe(name: str, source: str | Path, check: bool = False) -> dict[str, Any]:
    """source: a model directory, or the name of a tiny model. check: load weights, run the probe.

    Keys: name, supported; then model_type, layers (kind: count), rotary_width, key_columns,
    pairing, frequencies, bytes_per_token, dtype, positions, known, probed; or reason and why.
    Raises OSError or ValueError for a directory that Transformers can't read.
    """
    config = _config(source)
    try:
        layout = layout_of(config)
        if check:
            model = _model(source)
            layout = layout_of(model)
            probe(model, layout)
    except Unsupported as problem:
        return {"name": name, "supported": False, "reason": problem.reason, "why": problem.message}
    return {"name": name, "supported": True, **facts_of(config, layout), "probed": check}


def facts_of(config: Any, layout: ModelLayout) -> dict[str, Any]:
    import torch

    turning = next((layer for layer in layout.layers if layer.rotary_tensor), None)
    columns = 0
    if turning is not None:
        shape = turning.key_shape if turning.rotary_tensor == "keys" else turning.value_shape
        columns = shape[1]
    dtype = getattr(config, "dtype", None) or torch.float32
    parameters = getattr(config, "rope_parameters", None) or {}
    return {
        "model_type": layout.model_type,
        "layers": dict(Counter(layer.kind for layer in layout.layers)),
        "rotary_width": layout.rope.width if layout.rope else 0,
        "key_columns": columns,
        "pairing": _pairing(layout),
        "frequencies": parameters.get("rope_type", "default"),
        "bytes_per_token": layout.row_elements * dtype.itemsize,
        "dtype": str(dtype).removeprefix("torch."),
        "positions": getattr(config, "max_position_embeddings", None),
        "known": layout.known,
    }


def _pairing(layout: ModelLayout) -> str:
    if layout.rope is None:
        return ""
    return "neighbours" if layout.rope.interleaved else "halves"


def _config(source: str | Path) -> Any:
    if isinstance(source, str):
        return tiny_config(source)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source, local_files_only=True)


def _model(source: str | Path) -> Any:
    if isinstance(source, str):
        return tiny_model(source)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True)
