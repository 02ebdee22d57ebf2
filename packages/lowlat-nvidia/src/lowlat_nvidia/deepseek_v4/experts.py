"""Routed experts for at most 8 rows: router, choice, FP4 products, weighted sum, in three launches that overlap.

Suffixes: R rows, H hidden, I inner, E experts, T experts a row.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowlat_nvidia.deepseek_v4.experts_plan import GROUP, MAX_ROWS, SUM_THREADS, THREADS, WARPS, ExpertsPlan
from lowlat_nvidia.deepseek_v4.experts_reference import ExpertWeights
from lowlat_nvidia.formats import fp4_codes
from lowlat_nvidia.jit import Function, compile_cubin

DEFAULT_SPIN_LIMIT = 4_000_000
_STAGES = {1: "weights of gate and up", 2: "weights of down", 3: "activations of another block", 4: "its own sums"}


class ExpertsDeadlineError(RuntimeError):
    """Weights, or what another block computes, did not arrive in time. Results are void."""


class _Params(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "hidden", "gate", "bias", "first", "second", "logits", "inner", "parts", "chosen", "weights", "out",
                "listed", "error", "epochs",
            )
        ),
        ("rows", ctypes.c_int),
        ("phases", ctypes.c_int),
        ("scaling", ctypes.c_float),
        ("spin_limit", ctypes.c_uint),
        ("zero", ctypes.c_uint),
    )  # fmt: skip


# Bits of a code (sign, exponent and mantissa) in the 16 bits that hold the codes of four inputs, for pairs 0 to 3.
_SIGN_BITS, _REST_BITS = (15, 12, 14, 13), (9, 6, 3, 0)


def _words(codes: Tensor) -> Tensor:
    """Eight codes along the last axis as four bytes [..., 4], their bits where `fp4_to_half` finds them."""
    halves = []
    for odd in (0, 1):
        word = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
        for pair, (sign, rest) in enumerate(zip(_SIGN_BITS, _REST_BITS, strict=True)):
            code = codes[..., 2 * pair + odd].int()
            word |= (code >> 3) << sign | (code & 7) << rest
        halves += [(word & 255).to(torch.uint8), (word >> 8).to(torch.uint8)]
    return torch.stack(halves, -1)


def _pack(codes: Tensor, scales: Tensor, warps: int, pairs: int) -> Tensor:
    """[tiles, 2 halves, 8, inputs] codes and [..., inputs / 32] scales to the bytes in the order that lanes read.

    For each tile and warp: 512 bytes a pair of groups, lane (g, q) having of both groups the word of inputs 8 q to
    8 q + 7 of row g and the word of row g + 8; then 32 bytes of scales a pair.
    """
    tiles = codes.shape[0]
    data = _words(codes.view(tiles, 2, 8, warps, pairs, 2, 4, 8))  # tile, half, g, warp, pair, group, q, byte
    data = data.permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(tiles, warps, pairs * 512)
    factors = scales.view(tiles, 2, 8, warps, pairs, 2).permute(0, 3, 4, 2, 5, 1).reshape(tiles, warps, pairs * 32)
    return torch.cat((data, factors), -1).flatten()


def pack_first(plan: ExpertsPlan, weights: ExpertWeights, number: int) -> Tensor:
    """Gate and up of one expert: tiles of 8 gates and the 8 ups that belong to them."""
    both = torch.stack((fp4_codes(weights.w1[number]), fp4_codes(weights.w3[number])))
    scales = torch.stack((weights.w1_scale[number], weights.w3_scale[number]))
    tiled = both.view(2, plan.inner // 8, 8, plan.hidden).transpose(0, 1).contiguous()
    tiled_scales = scales.view(2, plan.inner // 8, 8, plan.hidden // GROUP).transpose(0, 1).contiguous()
    return _pack(tiled, tiled_scales, WARPS, plan.first_pairs)


def pack_second(plan: ExpertsPlan, weights: ExpertWeights, number: int) -> Tensor:
    """Down of one expert."""
    tiled = fp4_codes(weights.w2[number]).view(plan.hidden // 16, 2, 8, plan.inner)
    scales = weights.w2_scale[number].view(plan.hidden // 16, 2, 8, plan.inner // GROUP)
    return _pack(tiled, scales, 1, plan.second_pairs)


class RoutedExperts:
    """A mixture packed for one GPU."""

    def __init__(self, plan: ExpertsPlan, gate_EH: Tensor, bias_E: Tensor, weights: ExpertWeights) -> None:
        """`gate_EH` bfloat16, `bias_E` float32; `weights` may be given back afterwards."""
        self.plan = plan
        cubin, self.log = compile_cubin("experts.cu", plan.definitions())
        self._router = Function(cubin, "expert_router", 0)
        self._products = Function(cubin, "experts_products", plan.shared_bytes)
        self._sum = Function(cubin, "experts_sum", 0)
        device = gate_EH.device
        self.gate, self.bias = gate_EH.bfloat16().contiguous(), bias_E.float().contiguous()
        self.first = torch.empty(plan.experts, plan.first_bytes, dtype=torch.uint8, device=device)
        self.second = torch.empty(plan.experts, plan.second_bytes, dtype=torch.uint8, device=device)
        for number in range(plan.experts):
            self.first[number] = pack_first(plan, weights, number)
            self.second[number] = pack_second(plan, weights, number)

        def floats(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float32, device=device)

        self.logits_RE = floats(MAX_ROWS, plan.experts)
        # Words of a float32 and the number of the launch that wrote it.
        self.inner = torch.zeros(MAX_ROWS * plan.top, MAX_ROWS, plan.inner, dtype=torch.int64, device=device)
        self.parts = floats(MAX_ROWS, plan.top, plan.hidden)
        self.chosen_RT = torch.zeros(MAX_ROWS, plan.top, dtype=torch.int32, device=device)
        self.weights_RT = floats(MAX_ROWS, plan.top)
        self.out_RH = floats(MAX_ROWS, plan.hidden)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self._epochs = torch.zeros(plan.multiprocessors, dtype=torch.int32, device=device)
        self.spin_limit = DEFAULT_SPIN_LIMIT

    def parameters(self, x_RH: Tensor, listed: Tensor | None = None, *, down: bool = True) -> _Params:
        """Arguments of the kernels for rows `x_RH` bfloat16. Without `down` the products end with the activations.

        `listed` int32 [1 + 8 T], where somebody else chose: how many experts, and which; `chosen_RT` and `weights_RT`
        are then read.
        """
        rows = len(x_RH)
        if not 1 <= rows <= MAX_ROWS or x_RH.shape[1] != self.plan.hidden or x_RH.dtype != torch.bfloat16:
            raise ValueError(
                f"rows {tuple(x_RH.shape)} {x_RH.dtype}; at most {MAX_ROWS} of {self.plan.hidden} bfloat16"
            )
        tensors = (
            x_RH, self.gate, self.bias, self.first, self.second, self.logits_RE, self.inner, self.parts,
            self.chosen_RT, self.weights_RT, self.out_RH,
        )  # fmt: skip
        return _Params(
            *(tensor.data_ptr() for tensor in tensors), None if listed is None else listed.data_ptr(),
            self.error.data_ptr(), self._epochs.data_ptr(), rows, 1 + down, self.plan.scaling, self.spin_limit, 0,
        )  # fmt: skip

    def route(self, parameters: _Params, stream: int) -> None:
        """Router logits."""
        self._router.launch_early(self.plan.experts // 4, self.plan.hidden // 16, parameters, stream, dependent=False)

    def products(self, parameters: _Params, stream: int, *, early: bool = True) -> None:
        """Choice, gate and up of all touched experts, and down."""
        self._products.launch_early(self.plan.multiprocessors, THREADS, parameters, stream, dependent=early)

    def weighted_sum(self, parameters: _Params, stream: int, *, early: bool = True) -> None:
        """Sum over a row's experts in the order of their choice."""
        blocks = -(-parameters.rows * self.plan.hidden // 4 // SUM_THREADS)
        self._sum.launch_early(blocks, SUM_THREADS, parameters, stream, dependent=early)

    def run(self, x_RH: Tensor, stream: int | None = None) -> Tensor:
        """The routed experts' sum [R, H] float32, a view that the next run overwrites. Capturable in graphs."""
        stream = stream or torch.cuda.current_stream().cuda_stream
        parameters = self.parameters(x_RH)
        self.route(parameters, stream)
        self.products(parameters, stream)
        self.weighted_sum(parameters, stream)
        return self.out_RH[: len(x_RH)]

    def check(self) -> None:
        """Waits. Raises ExpertsDeadlineError where something never came."""
        code = int(self.error[0])
        if code:
            self.error.zero_()
            raise ExpertsDeadlineError(f"a block gave up waiting for {_STAGES[code]}")
