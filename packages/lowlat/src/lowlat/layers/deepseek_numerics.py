"""Where DeepSeek-V4 models round: one object that layers ask, so that quantised and plain computing share all code.

Legend of shape suffixes: R rows, K input features, N output features.

Quantised: values between layers are bfloat16, activations of FP8 and FP4 weights are e4m3, and arithmetic between is
float64, where sums of such products are exact or nearly so: a row's result is then the same at every width, and beside
any neighbours. Plain: nothing is rounded, arithmetic is float32 (or float64, for comparisons).
"""

from __future__ import annotations

import msgspec
import torch

from lowlat.layers import fp4, fp8


class Numerics(msgspec.Struct, frozen=True):
    """`group`: values that share an activation scale; `compute`: type of all arithmetic."""

    quantised: bool
    group: int
    compute: torch.dtype

    @classmethod
    def make(cls, quantised: bool, group: int, compute: torch.dtype | None = None) -> Numerics:
        """The default arithmetic of a mode, unless `compute` is given."""
        return cls(quantised, group, compute or (torch.float64 if quantised else torch.float32))

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """As kept between layers: through float32 to bfloat16."""
        return x.to(torch.float32).to(torch.bfloat16).to(self.compute) if self.quantised else x

    def keep_float32(self, x: torch.Tensor) -> torch.Tensor:
        """As kept in a compressor's ring."""
        return x.to(torch.float32).to(self.compute) if self.quantised else x

    def activation(self, x_RK: torch.Tensor) -> torch.Tensor:
        """As a quantised weight's matrix product sees it."""
        if not self.quantised:
            return x_RK
        return fp8.dequantise_groups(*fp8.quantise_activations(x_RK, self.group)).to(self.compute)

    def index_query(self, x: torch.Tensor) -> torch.Tensor:
        """As the index scores see it: FP4 in groups of 32."""
        if not self.quantised:
            return x
        return fp4.dequantise_groups(*fp4.quantise_groups(x)).to(self.compute)


class Weight:
    """A matrix [N, K]: its dense form in the compute type, made when first used, and kept."""

    def __init__(self, shape: tuple[int, int], quantised: bool) -> None:
        self.shape = shape
        self.quantised = quantised
        self._dense: torch.Tensor | None = None

    def decode(self) -> torch.Tensor:
        """float32 values [N, K]."""
        raise NotImplementedError

    def dense(self, numerics: Numerics) -> torch.Tensor:
        """Values in the compute type."""
        if self._dense is None:
            self._dense = self.decode().to(numerics.compute)
        return self._dense


class PlainWeight(Weight):
    """bfloat16 or float32 values; activations are not quantised for it."""

    def __init__(self, values_NK: torch.Tensor) -> None:
        super().__init__((values_NK.shape[0], values_NK.shape[1]), quantised=False)
        self.values_NK = values_NK

    def decode(self) -> torch.Tensor:
        """float32 values [N, K]."""
        return self.values_NK.to(torch.float32)


class Fp8Weight(Weight):
    """e4m3 bytes [N, K] with ue8m0 bytes for blocks; `offset`: where in their first block this part begins."""

    def __init__(
        self, codes_NK: torch.Tensor, scales: torch.Tensor, block: int, offset: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__((codes_NK.shape[0], codes_NK.shape[1]), quantised=True)
        self.codes_NK, self.scales, self.block, self.offset = codes_NK, scales, block, offset

    def decode(self) -> torch.Tensor:
        """float32 values [N, K]."""
        if self.offset == (0, 0):
            return fp8.dequantise_blocks(self.codes_NK, self.scales, self.block)
        values = fp8.e4m3_decode(self.codes_NK)
        scales = fp8.ue8m0_decode(self.scales)
        for axis, length in enumerate(values.shape):
            scales = scales.repeat_interleave(self.block, axis).narrow(axis, self.offset[axis], length)
        return values * scales


class Fp4Weight(Weight):
    """Packed e2m1 bytes [N, K / 2] with a ue8m0 byte for 32 inputs each."""

    def __init__(self, packed: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__((packed.shape[0], 2 * packed.shape[1]), quantised=True)
        self.packed, self.scales = packed, scales

    def decode(self) -> torch.Tensor:
        """float32 values [N, K]."""
        return fp4.dequantise_groups(self.packed, self.scales)


def project(x_RK: torch.Tensor, weight: Weight, numerics: Numerics) -> torch.Tensor:
    """x W^T, not yet rounded; activations are quantised where the weight is."""
    return multiply(operand(x_RK, weight, numerics), weight, numerics)


def operand(x_RK: torch.Tensor, weight: Weight, numerics: Numerics) -> torch.Tensor:
    """What `multiply` takes: activations, quantised where the weight is; for all weights of one kind, made once."""
    return numerics.activation(x_RK) if weight.quantised else x_RK


def multiply(x_RK: torch.Tensor, weight: Weight, numerics: Numerics) -> torch.Tensor:
    """x W^T of an `operand`, not yet rounded."""
    return x_RK @ weight.dense(numerics).T


def linear(x_RK: torch.Tensor, weight: Weight, numerics: Numerics) -> torch.Tensor:
    """x W^T as stored between layers."""
    return numerics.store(project(x_RK, weight, numerics))


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, numerics: Numerics) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return numerics.store(normed if weight is None else normed * weight)
