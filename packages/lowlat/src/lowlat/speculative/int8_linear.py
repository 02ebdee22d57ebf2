"""A draft's products on CPUs, in bytes: int8 weights with a scale a row, activations rounded to 127 levels a step.

Rounding moves guesses a little, never answers. It is several times as fast as float32, whose weights would be read from
memory again for every guess.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lowlat.speculative.draft_network import DraftNetwork

_LEAST = 1 << 14
"""Numbers in a matrix from which on int8 is faster."""


def available() -> bool:
    """Whether this PyTorch has integer products for x86 processors."""
    return torch.backends.quantized.engine in ("x86", "fbgemm")


def int8_product(weight_OI: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x W^T for rows x in float32."""
    weight_OI = weight_OI.detach().float()
    scale_O = (weight_OI.abs().amax(dim=1).clamp(min=1e-12) / 127).double()
    zero_O = torch.zeros_like(scale_O, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # quantised tensors are on their way out; these operators are not
        quantised = torch.quantize_per_channel(weight_OI, scale_O, zero_O, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantised, None)

    def multiply(x_RI: torch.Tensor) -> torch.Tensor:
        # Half the range: without VNNI, sums of two products could leave 16 bits.
        result: torch.Tensor = torch.ops.quantized.linear_dynamic(x_RI, packed, True)
        return result

    return multiply


def product(weight_OI: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """x W^T for rows x, in int8 where the processor has that and the matrix is large enough."""
    if available() and weight_OI.numel() >= _LEAST:
        return int8_product(weight_OI)
    return lambda x_RI: F.linear(x_RI, weight_OI)


class Int8Linear(nn.Module):
    """In place of an `nn.Linear` without bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._product = int8_product(linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def with_int8(network: DraftNetwork, least: int = _LEAST, *, layers: bool = True) -> DraftNetwork:
    """A copy whose matrices of at least so many numbers are int8; not the first: a few of the model's features are a
    thousand times as large as the others, which would round to nothing beside them. Not `layers`: without them."""
    network = copy.deepcopy(network, None if layers else {id(network.layers): nn.ModuleList()})
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and child is not network.fc and child.weight.numel() >= least:
                setattr(module, name, Int8Linear(child))
    return network
