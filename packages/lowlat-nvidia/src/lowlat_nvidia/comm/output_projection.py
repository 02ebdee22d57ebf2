"""The output projection that publishes its tiles, and the kernel that sums, rebuilds the residual streams and norms.

Suffixes: R rows, H hidden, K inputs of this rank, N streams (4).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.formats import HALF_ORDER, quantise
from lowlat_nvidia.jit import Function, compile_cubin

FINISHERS, MAX_ROWS, GROUP, STREAMS, MAX_RANKS = 4, 8, 32, 4, 8
TILE_OUTPUTS = 8
DEFAULT_SPIN_LIMIT = 2_000_000
_STAGES = {1: "its copy of the weights", 2: "another rank's tiles"}


class OutputDeadlineError(RuntimeError):
    """A rank waited too long. Results are void on all ranks; the context lives, `reset` on all makes it usable."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """`inputs` columns of this rank to `hidden` outputs. Raises ValueError with the field that does not fit."""

    hidden: int = 5120
    inputs: int = 2048
    ranks: int = 4
    blocks: int = 132

    def __post_init__(self) -> None:
        if self.hidden % 512:
            raise ValueError(f"hidden {self.hidden}: a multiple of 512")
        if self.inputs % 512 or self.inputs > 4096:
            raise ValueError(f"inputs {self.inputs}: a multiple of 512, at most 4096")
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks {self.ranks}: 1 to {MAX_RANKS}")
        if self.shared_bytes > 227 * 1024:
            raise ValueError(f"{self.block_tiles} tiles of a block need {self.shared_bytes} bytes of shared memory")

    @property
    def block_tiles(self) -> int:
        """Tiles of the block that has most."""
        return -(-(self.hidden // TILE_OUTPUTS) // self.blocks)

    @property
    def warps(self) -> int:
        """Warps that multiply; they split the inputs."""
        return 16 if self.inputs % 1024 == 0 else 8

    @property
    def threads(self) -> int:
        """Threads of a projection block."""
        return 32 * (self.warps + FINISHERS)

    @property
    def cluster(self) -> int:
        """Blocks that share a row in the consumer."""
        return 4

    @property
    def consume_threads(self) -> int:
        """Threads of a consumer block, four outputs each."""
        return self.hidden // (4 * self.cluster)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a projection block."""
        tile = self.inputs * TILE_OUTPUTS + self.warps * TILE_OUTPUTS * MAX_ROWS * 4 + self.inputs // GROUP * 4 + 16
        return self.block_tiles * tile + self.warps * MAX_ROWS * 4 + 64

    @property
    def inbox_bytes(self) -> int:
        """Bytes of a rank's inbox."""
        return 2 * self.ranks * MAX_ROWS * self.hidden // 2 * 8

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        return {
            "HIDDEN": self.hidden, "INPUTS": self.inputs, "BLOCK_TILES": self.block_tiles, "CLUSTER": self.cluster,
            "RANKS": self.ranks, "WARPS": self.warps, "SHARED_BYTES": self.shared_bytes,
        }  # fmt: skip


class _Output(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weights", "block_scales")),
        ("inboxes", ctypes.c_void_p * MAX_RANKS),
        ("errors", ctypes.c_void_p * MAX_RANKS),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "epochs", "partial", "summed", "streams", "post", "mix", "collapse", "norm", "new_streams", "out",
                "sum_out",
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "rank")),
        ("eps", ctypes.c_float),
        ("spin_limit", ctypes.c_uint),
    )  # fmt: skip


@dataclass(slots=True)
class Residual:
    """What the sum goes into: streams_RNH bfloat16, post_RN, mix_RNN (from stream, to stream) and collapse_RN float32,
    norm_H bfloat16, as section 2 of the formulas of DeepSeek-V4.1 has them."""

    streams_RNH: Tensor
    post_RN: Tensor
    mix_RNN: Tensor
    collapse_RN: Tensor
    norm_H: Tensor


def pack_projection(weight_HK: Tensor) -> Tensor:
    """FP8 weights [H, K] (float8_e4m3fn) as bytes in the order that lanes read: tiles of 8 outputs; a warp's pairs of
    groups; lane (g, q) has of both groups 8 bytes of row g, each four in `HALF_ORDER`."""
    hidden, inputs = weight_HK.shape
    parts = weight_HK.view(torch.uint8).view(hidden // 8, 8, inputs // 64, 2, 4, 2, 4)[..., HALF_ORDER]
    return parts.permute(0, 2, 1, 4, 3, 5, 6).contiguous().flatten()


class OutputProjection:
    """One rank's projection. `inboxes` and `errors`: addresses of every rank's inbox and error word, in rank order."""

    def __init__(
        self,
        plan: OutputPlan,
        weight_HK: Tensor,
        scale_hk: Tensor,
        rank: int,
        inboxes: Sequence[int],
        errors: Sequence[int],
    ) -> None:
        """`weight_HK` float8_e4m3fn; `scale_hk` float32 [H / 32, K / 32], a scale for each block of 32 x 32."""
        if tuple(weight_HK.shape) != (plan.hidden, plan.inputs):
            raise ValueError(f"weights of {tuple(weight_HK.shape)}; planned ({plan.hidden}, {plan.inputs})")
        if len(inboxes) != plan.ranks or len(errors) != plan.ranks:
            raise ValueError(f"{len(inboxes)} inboxes and {len(errors)} error words for {plan.ranks} ranks")
        self.plan, self.rank = plan, rank
        device = weight_HK.device
        cubin, self.log = compile_cubin("output_projection.cu", plan.definitions())
        self._project = Function(cubin, "output_project", plan.shared_bytes)
        self._push = Function(cubin, "output_push", 0)
        self._consume = Function(cubin, "output_consume", 0)
        self.weights, self.scales = pack_projection(weight_HK), scale_hk.float().contiguous()
        self._inboxes, self._errors = list(inboxes), list(errors)
        self._epochs = torch.zeros(4, 1024, dtype=torch.int32, device=device)  # one row for each kernel and way
        self.partial_RH = torch.zeros(MAX_ROWS, plan.hidden, dtype=torch.float32, device=device)
        self.sum_RH = torch.zeros_like(self.partial_RH)
        self.out_RH = torch.zeros(MAX_ROWS, plan.hidden, dtype=torch.bfloat16, device=device)
        self.streams_RNH = torch.zeros(MAX_ROWS, STREAMS, plan.hidden, dtype=torch.bfloat16, device=device)
        self.spin_limit, self.eps = DEFAULT_SPIN_LIMIT, 1e-20

    def reset(self) -> None:
        """Counters back to the start. Inboxes and error words must be cleared too, on all ranks, before any launch."""
        self._epochs.zero_()

    def parameters(self, z_RK: Tensor, residual: Residual, epochs: int, **given: Tensor) -> _Output:
        """Arguments of one launch; `given` names tensors of the plain ways: partial, summed, sum_out."""
        rows, pad = len(z_RK), [0] * (MAX_RANKS - self.plan.ranks)
        if not 1 <= rows <= MAX_ROWS or z_RK.shape[1] != self.plan.inputs or z_RK.dtype != torch.bfloat16:
            raise ValueError(
                f"rows {tuple(z_RK.shape)} {z_RK.dtype}; at most {MAX_ROWS} of {self.plan.inputs} bfloat16"
            )

        def optional(name: str) -> int | None:
            return given[name].data_ptr() if name in given else None

        return _Output(
            z_RK.data_ptr(), self.weights.data_ptr(), self.scales.data_ptr(),
            (ctypes.c_void_p * MAX_RANKS)(*self._inboxes, *pad), (ctypes.c_void_p * MAX_RANKS)(*self._errors, *pad),
            self._epochs[epochs].data_ptr(), optional("partial"), optional("summed"), residual.streams_RNH.data_ptr(),
            residual.post_RN.data_ptr(), residual.mix_RNN.data_ptr(), residual.collapse_RN.data_ptr(),
            residual.norm_H.data_ptr(), self.streams_RNH.data_ptr(), self.out_RH.data_ptr(), optional("sum_out"), rows,
            self.rank, self.eps, self.spin_limit,
        )  # fmt: skip

    def run(self, z_RK: Tensor, residual: Residual, stream: int | None = None) -> tuple[Tensor, Tensor]:
        """Two overlapping launches: normed collapse [R, H] and new streams [R, N, H], overwritten by the next run."""
        stream = stream or torch.cuda.current_stream().cuda_stream
        rows, plan = len(z_RK), self.plan
        self._project.launch_early(plan.blocks, plan.threads, self.parameters(z_RK, residual, 0), stream)
        consumer = self.parameters(z_RK, residual, 1)
        self._consume.launch_early(MAX_ROWS * plan.cluster, plan.consume_threads, consumer, stream)
        return self.out_RH[:rows], self.streams_RNH[:rows]

    def run_plain(self, z_RK: Tensor, residual: Residual, stream: int | None = None) -> tuple[Tensor, Tensor]:
        """The same as separate kernels: projection, one-shot all-reduce (push and take), rebuild with norm."""
        stream = stream or torch.cuda.current_stream().cuda_stream
        rows, plan = len(z_RK), self.plan
        blocks, threads = MAX_ROWS * plan.cluster, plan.consume_threads
        projection = self.parameters(z_RK, residual, 2, partial=self.partial_RH)
        self._project.launch_early(plan.blocks, plan.threads, projection, stream, dependent=False)
        push = self.parameters(z_RK, residual, 0, partial=self.partial_RH)
        self._push.launch_early(plan.blocks, threads, push, stream, dependent=False)
        take = self.parameters(z_RK, residual, 1, sum_out=self.sum_RH)
        self._consume.launch_early(blocks, threads, take, stream)
        rebuild = self.parameters(z_RK, residual, 3, summed=self.sum_RH)
        self._consume.launch_early(blocks, threads, rebuild, stream, dependent=False)
        return self.out_RH[:rows], self.streams_RNH[:rows]

    @staticmethod
    def explain(code: int) -> None:
        """Raises OutputDeadlineError for a rank's error word that is not 0."""
        if code:
            rank, stage = divmod(code - 1, 16)
            raise OutputDeadlineError(f"rank {rank} gave up waiting for {_STAGES[stage]}; call reset() on all ranks")


def reference(
    z_RRK: Sequence[Tensor], weights: Sequence[Tensor], residual: Residual, eps: float
) -> tuple[Tensor, Tensor]:
    """The same in float32 from every rank's rows [R, K] and weights [H, K]; partial sums rounded to bfloat16."""
    parts = [(quantise(z) @ weight.T).bfloat16().float() for z, weight in zip(z_RRK, weights, strict=True)]
    total = torch.stack(parts).sum(0)
    streams = residual.post_RN[..., None] * total[:, None]
    streams = streams + torch.einsum("rji,rjh->rih", residual.mix_RNN, residual.streams_RNH.float())
    streams = streams.bfloat16().float()
    y = torch.einsum("rn,rnh->rh", residual.collapse_RN, streams).bfloat16().float()
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * residual.norm_H.float()
    return normed.bfloat16(), streams.bfloat16()
