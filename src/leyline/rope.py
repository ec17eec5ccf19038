"""What a model does to a key when its position moves: the rotation R(delta).

Rotary positions turn each pair of key columns `i` by `position * inv_freq[i]` (RoFormer,
arXiv 2104.09864). Moving a cached row by `delta` tokens is therefore one more turn, by
`delta * inv_freq[i]`. The frequencies are read from the model's own rotary module, never
re-derived, so YaRN, Llama-3 scaling and the like are what the model runs with. Their attention
scaling is not part of R(delta): the cached row already carries it, and a turn keeps lengths.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_FIXED = ("default", "linear", "yarn", "llama3", "longrope", "proportional")


class Unsupported(ValueError):
    """A model that can't be spliced.

    `reason` is the word reported to clients (`unsupported_architecture` or `unsupported_feature`),
    `feature` the finer cause (`dynamic_ntk`, `alibi`, `sliding_window`, ...), `message` one
    sentence for people.
    """

    def __init__(self, reason: str, message: str, feature: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.feature = feature


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """A fixed rotation of `width` key columns.

    inv_freq: fp64 `[width // 2]` on the CPU, radians per token: the fp32 numbers that the model
    uses.
    interleaved: True for pairs (2i, 2i + 1), False for pairs (i, i + width // 2), as cached.
    """

    inv_freq: Tensor
    width: int
    interleaved: bool

    def __post_init__(self) -> None:
        if self.width <= 0 or self.width % 2 or self.inv_freq.shape != (self.width // 2,):
            raise ValueError(
                f"a rotary width of {self.width} columns needs {self.width // 2} frequencies, "
                f"got shape {tuple(self.inv_freq.shape)}; the width must be even and above 0"
            )
        if self.inv_freq.dtype != torch.float64 or self.inv_freq.device.type != "cpu":
            raise ValueError("inv_freq must be a float64 tensor on the CPU")

    def same_as(self, other: RopeSpec) -> bool:
        """Whether both are the same rotation of the same columns."""
        return (
            self.width == other.width
            and self.interleaved == other.interleaved
            and torch.equal(self.inv_freq, other.inv_freq)
        )

    def cos_sin(self, delta: int | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `delta * inv_freq` in fp64, each of shape `[*delta.shape, width // 2]`."""
        steps = torch.as_tensor(delta, dtype=torch.float64, device="cpu")
        angles = steps[..., None] * self.inv_freq
        return angles.cos(), angles.sin()

    @classmethod
    def from_module(
        cls, module: nn.Module, *, interleaved: bool = False, layer_type: str | None = None
    ) -> RopeSpec:
        """Read the frequencies of a Transformers rotary module (`inv_freq`, or
        `<layer_type>_inv_freq`).

        Raises Unsupported if the module has none, or if its config makes them move with the length.
        """
        config = getattr(module, "config", None)
        if config is not None:
            check_fixed(config, layer_type)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        found = getattr(module, name, None)
        if not isinstance(found, Tensor) or found.dim() != 1 or found.is_meta:
            raise Unsupported(
                "unsupported_architecture",
                f"{type(module).__name__} has no vector `{name}` to read rotary frequencies from",
                "no_frequencies",
            )
        return cls._of(found, interleaved)

    @classmethod
    def from_config(
        cls, config: Any, layer_type: str | None = None, *, interleaved: bool = False
    ) -> RopeSpec:
        """Build the rotary module that Transformers would build for `config` and read it.

        layer_type: which entry of a config whose rotary parameters differ by layer type.
        Raises Unsupported for a position scheme that is not a fixed rotation.
        """
        check_fixed(config, layer_type)
        module_class = _rotary_class(config)
        if module_class is not None:
            return cls.from_module(
                module_class(config), interleaved=interleaved, layer_type=layer_type
            )
        kind = _parameters(config, layer_type).get("rope_type", "default")
        if kind == "default":  # Transformers keeps the unscaled rule in each model's class
            raise Unsupported(
                "unsupported_architecture",
                f"{type(config).__name__} comes with no rotary module to read frequencies from",
                "no_frequencies",
            )
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, _attention_scaling = ROPE_INIT_FUNCTIONS[kind](config, layer_type=layer_type)
        return cls._of(inv_freq, interleaved)

    @classmethod
    def from_model(cls, model: nn.Module, *, interleaved: bool = False) -> RopeSpec:
        """Read the frequencies that a loaded model runs with: also those that a cast has rounded.

        Raises Unsupported if there are none or if the model's rotary modules disagree.
        """
        config = getattr(model, "config", None)
        if config is not None:
            check_fixed(config)
        found = [
            buffer
            for name, buffer in model.named_buffers()
            if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
        ]
        if config is not None and any(buffer.is_meta for buffer in found):
            return cls.from_config(config, interleaved=interleaved)
        if not found:
            raise Unsupported(
                "unsupported_architecture",
                f"{type(model).__name__} has no rotary module with `inv_freq` in it",
                "no_frequencies",
            )
        specs = [cls._of(buffer, interleaved) for buffer in found]
        if not all(spec.same_as(specs[0]) for spec in specs):
            raise Unsupported(
                "unsupported_feature",
                f"{type(model).__name__} has several rotary modules with different frequencies",
                "several_rotations",
            )
        return specs[0]

    @classmethod
    def _of(cls, inv_freq: Tensor, interleaved: bool) -> RopeSpec:
        exact = inv_freq.detach().to(device="cpu", dtype=torch.float32).double()
        return cls(exact, 2 * exact.numel(), interleaved)


def check_fixed(config: Any, layer_type: str | None = None) -> None:
    """Raise Unsupported unless the rotary parameters of `config` are one rotation for every
    length."""
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "mrope" or parameters.get("mrope_section"):
        raise Unsupported(
            "unsupported_feature",
            "M-RoPE gives a token three positions (time, height, width): a shift isn't one turn",
            "mrope",
        )
    if "dynamic" in kind:
        raise Unsupported(
            "unsupported_feature",
            "dynamic NTK scaling changes the frequencies with the length of the prompt, "
            "so rows cached at one length can't be turned to another",
            "dynamic_ntk",
        )
    if kind not in _FIXED:
        raise Unsupported(
            "unsupported_feature",
            f"rotary type {kind!r} isn't known to be a fixed rotation (known: {', '.join(_FIXED)})",
            "unknown_rotation",
        )
    if kind == "longrope":
        _check_longrope(config, parameters)


def _check_longrope(config: Any, parameters: dict[str, Any]) -> None:
    """LongRoPE switches factors once a prompt outgrows the original context (arXiv 2402.13753)."""
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    longest = getattr(config, "max_position_embeddings", None)
    same = list(parameters["short_factor"]) == list(parameters["long_factor"])
    never_long = original is not None and longest is not None and longest <= original
    if not (same or never_long):
        raise Unsupported(
            "unsupported_feature",
            f"LongRoPE changes its frequencies at {original} tokens and the model takes {longest}; "
            f"with max_position_embeddings of {original} it would be a fixed rotation",
            "longrope_switch",
        )


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The rotary parameters of a config, for one layer type if they differ; {} if it has none."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = {key: value for key, value in found.items() if isinstance(value, dict)}
    if not nested:
        return dict(found)
    if layer_type is not None:
        return dict(nested.get(layer_type) or {})
    different = {str(sorted(value.items(), key=str)) for value in nested.values()}
    if len(different) > 1:
        raise Unsupported(
            "unsupported_feature",
            f"layers rotate differently by type ({', '.join(sorted(nested))}): name the layer type",
            "several_rotations",
        )
    return dict(next(iter(nested.values())))


def _rotary_class(config: Any) -> type[nn.Module] | None:
    """The rotary module class beside the config's class in Transformers, if exactly one fits."""
    path = type(config).__module__
    if ".configuration_" not in path:
        return None
    try:
        modeling = importlib.import_module(path.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    found = {
        name: value
        for name, value in vars(modeling).items()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and name.endswith("RotaryEmbedding")
        and "config" in inspect.signature(value.__init__).parameters
    }
    own = type(config).__name__.removesuffix("Config") + "RotaryEmbedding"
    if own in found:
        return found[own]
    return next(iter(found.values())) if len(found) == 1 else None
