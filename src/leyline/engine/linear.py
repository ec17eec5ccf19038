"""Linear layers for a handful of tokens on a CPU.

`x @ W.T` of 2 to 32 fp32 tokens takes several times longer in torch's CPU build than of one: its
BLAS goes over to a kernel that wants many rows. `W @ x.T` is the same product with the weight's
rows as the many ones. It makes decoding in batches pay; `leyline bench` has the numbers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

FEW = range(2, 33)
"""Numbers of tokens for which the other order is faster."""


def use_few_token_linears(model: nn.Module) -> None:
    """Let the fp32 linear layers of a CPU model choose the faster order by the number of tokens."""
    for module in model.modules():
        if type(module) is nn.Linear and _suits(module.weight):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    """x: `[..., tokens, in]`. Returns `[..., tokens, out]`."""
    tokens = x.numel() // x.shape[-1]
    if tokens not in FEW:
        return linear(x, module.weight, module.bias)
    out = torch.mm(module.weight, x.reshape(tokens, -1).t()).t().contiguous()
    if module.bias is not None:
        out += module.bias
    return out.view(*x.shape[:-1], -1)
