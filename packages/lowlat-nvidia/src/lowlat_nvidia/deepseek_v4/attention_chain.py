"""The attention region of a DeepSeek-V4.1 layer for at most 8 rows: four kernels that overlap.

Projections to the query latent and the keys, norm and up-projection, attention over 128 window and 512 chosen entries
in their native FP8 and FP4 layouts, grouped projection. One GPU's part of tensor parallelism: 16 heads, 2 groups.

Suffixes: R rows, H hidden, L query latent (1280), N heads (16), D head dimension (512), O grouped outputs, W window
(128), C chosen (512), P rotated pairs (32).
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.jit import Function, compile_cubin

MAX_ROWS, GROUP, DIM, HEADS, WINDOW, CHOSEN, PAIRS = 8, 32, 512, 16, 128, 512, 32
THREADS, BLOCKS_A_ROW, TILE, CLUSTER = 256, 8, 64, 4
# Up to so many rows, kernels ask for what later kernels will read, which waits for them in the L2, and a multiprocessor
# takes two blocks of the grouped projection, or one beside one of attention's. With more rows they do not ask, and
# those blocks have a multiprocessor each.
FEW_ROWS = 4
# Bytes of shared memory that a multiprocessor has once: such blocks spread, and the next kernel's fit beside each.
ALONE = 115 * 1024
DEFAULT_SPIN_LIMIT = 4_000_000
STAMPED_KERNELS, STAMPED_BLOCKS, STAMPS_A_BLOCK = 4, 256, 8


class ChainDeadlineError(RuntimeError):
    """A copy of weights, or what another kernel should publish, did not arrive in time. Results are void."""


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """Sizes of one GPU's part. Raises ValueError with the field that does not fit.

    `stamps`: blocks note when their phases end, in nanoseconds.
    """

    hidden: int = 5120
    latent: int = 1280
    groups: int = 2
    group_outputs: int = 1024
    stamps: bool = False

    def __post_init__(self) -> None:
        if self.hidden % 256 or self.hidden > 6144:
            raise ValueError(f"hidden {self.hidden}: a multiple of 256, at most 6144")
        if self.latent % 256 or self.latent > 1536:
            raise ValueError(f"latent {self.latent}: a multiple of 256, at most 1536")
        if self.groups not in (1, 2, 4) or self.group_outputs % TILE:
            raise ValueError(f"{self.groups} groups of {self.group_outputs}: 1, 2 or 4, of a multiple of {TILE}")

    @property
    def group_inputs(self) -> int:
        """Inputs of a group."""
        return HEADS // self.groups * DIM

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights: the floor of the region together with the entries."""
        down = (self.latent + DIM) * self.hidden
        return down + HEADS * DIM * self.latent + self.groups * self.group_outputs * self.group_inputs

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        return {
            "HIDDEN": self.hidden, "QUERY_LATENT": self.latent, "GROUPS": self.groups,
            "GROUP_OUTPUTS": self.group_outputs, "FEW_ROWS": FEW_ROWS, "STAMPS": int(self.stamps),
            **{f"{name.upper()}_SHARED": size for name, size in self.shared().items()},
        }  # fmt: skip

    def shared(self) -> dict[str, int]:
        """Bytes of shared memory of a block of each kernel. A multiprocessor has 227 KB for those that overlap."""
        keys = (WINDOW + CHOSEN) // BLOCKS_A_ROW
        attend = keys * (DIM * 2 + 16) + 4 * HEADS * keys * 4 + HEADS * 176 + 1280
        group = _product_bytes(self.group_inputs // CLUSTER, CLUSTER)
        return {
            "down": _product_bytes(self.hidden // CLUSTER, CLUSTER), "up": max(_product_bytes(self.latent, 1), ALONE),
            "attend": attend, "group": max(group, ALONE), "group_beside": group,
        }  # fmt: skip


def _product_bytes(inputs: int, blocks: int) -> int:
    """Shared memory of a block that multiplies `inputs` inputs, with blocks that share a tile."""
    parts = 2 * blocks * MAX_ROWS * (TILE + 4 if blocks == 1 else TILE // blocks) * 4
    return inputs // GROUP * (TILE * GROUP + MAX_ROWS * GROUP + MAX_ROWS * 4 + 8) + parts + 512


class _Chain(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "x", "down", "down_scales", "up", "up_scales", "group", "group_scales", "query_norm", "key_norm",
                "sinks", "angles", "window", "chosen", "window_entries", "chosen_entries", "latent", "query", "mixed",
                "mixed_scales", "out", "error", "stamps",
            )
        ),
        ("window_page", ctypes.c_longlong),
        ("chosen_page", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("window_entries_a_page", "chosen_entries_a_page", "rows")),
        ("eps", ctypes.c_float),
        ("spin_limit", ctypes.c_uint),
    )  # fmt: skip


@dataclass(slots=True)
class ChainWeights:
    """As checkpoints hold them: float8_e4m3fn with a float32 scale for each block of 32 x 32; norms bfloat16.

    Sinks are float32; wq_a [L, H], wkv [D, H], wq_b [N D, L], wo_a [groups * outputs, group inputs].
    """

    wq_a: Tensor
    wq_a_scale: Tensor
    wkv: Tensor
    wkv_scale: Tensor
    wq_b: Tensor
    wq_b_scale: Tensor
    wo_a: Tensor
    wo_a_scale: Tensor
    query_norm: Tensor
    key_norm: Tensor
    sinks: Tensor


@dataclass(slots=True)
class ChainInputs:
    """One step: x_RH bfloat16; angles_R2P float32 (cosine, sine); entries int32, -1 where there is none.

    window, chosen uint8 [pages, bytes]: a page is all data rows (512 bytes of e4m3; 256 of e2m1, even values in the low
    halves), then all scale rows (16 powers of two; 32 e4m3). The last row + 1 window entries of a row are those of this
    step's rows, in order: their keys are written by `run`.
    """

    x_RH: Tensor
    angles_R2P: Tensor
    window: Tensor
    chosen: Tensor
    window_page_entries: int
    chosen_page_entries: int
    window_RW: Tensor
    chosen_RC: Tensor


def pack_product(weight_OK: Tensor) -> Tensor:
    """FP8 weights as bytes in the order that the matrix instruction reads: tiles of 64 outputs, groups of 32 inputs,
    halves of 16 inputs; of those 64 outputs of 16 bytes."""
    outputs, inputs = weight_OK.shape
    parts = weight_OK.contiguous().view(torch.uint8).view(outputs // TILE, TILE, inputs // GROUP, 2, 16)
    return parts.permute(0, 2, 3, 1, 4).contiguous().flatten()


@functools.cache
def _kernels(plan: ChainPlan, device: int) -> dict[str, Function]:
    """The four kernels of a plan, the last one in both sizes.

    The layers of a model share them, and a GPU's instruction caches keep them.
    """
    cubin, _ = compile_cubin("attention_chain.cu", plan.definitions())
    entries = {"down": "down_project", "up": "up_project", "attend": "attend"}
    return {name: Function(cubin, entries.get(name, "group_project"), shared) for name, shared in plan.shared().items()}


class AttentionChain:
    """Weights packed on one GPU, and the words through which the kernels exchange."""

    def __init__(self, plan: ChainPlan, weights: ChainWeights, eps: float = 1e-20) -> None:
        self.plan, self.eps, self.spin_limit = plan, eps, DEFAULT_SPIN_LIMIT
        device = weights.wq_a.device
        self.kernels = _kernels(plan, device.index or 0)
        self._weights = [
            pack_product(torch.cat((weights.wq_a.view(torch.uint8), weights.wkv.view(torch.uint8)))),
            torch.cat((weights.wq_a_scale, weights.wkv_scale)).float().contiguous(),
            pack_product(weights.wq_b), weights.wq_b_scale.float().contiguous(),
            pack_product(weights.wo_a), weights.wo_a_scale.float().contiguous(),
            weights.query_norm.contiguous(), weights.key_norm.contiguous(), weights.sinks.contiguous(),
        ]  # fmt: skip
        sizes = ((plan.latent + DIM) * 2, HEADS * DIM * 2, HEADS * DIM, HEADS * DIM // GROUP * 4)
        self.exchanged = [torch.empty(MAX_ROWS, size, dtype=torch.uint8, device=device) for size in sizes]
        self.out_RO = torch.zeros(MAX_ROWS, plan.groups * plan.group_outputs, dtype=torch.bfloat16, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        stamps = (STAMPED_KERNELS, STAMPED_BLOCKS, STAMPS_A_BLOCK) if plan.stamps else (1,)
        self.stamps = torch.zeros(stamps, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """Empties all exchanged words: at the start, and after a step that missed its deadline."""
        for words in self.exchanged:
            words.fill_(255)
        self.error.zero_()

    def launches(self, rows: int) -> dict[str, int]:
        """Blocks of each kernel, in order."""
        plan = self.plan
        return {
            "down": (plan.latent + DIM) // TILE * CLUSTER, "up": HEADS * DIM // TILE, "attend": rows * BLOCKS_A_ROW,
            "group": plan.groups * plan.group_outputs // TILE * CLUSTER,
        }  # fmt: skip

    def run(self, inputs: ChainInputs, stream: int | None = None, *, early: bool = True) -> Tensor:
        """Grouped outputs [R, O] bfloat16, a view that the next run overwrites; the step's keys lie in the window.

        Without `early` every kernel starts when the one before it has ended. Capturable in graphs.
        """
        stream = stream or torch.cuda.current_stream().cuda_stream
        parameters, rows = self.parameters(inputs), len(inputs.x_RH)
        for name, blocks in self.launches(rows).items():
            kernel = self.kernels["group_beside" if name == "group" and rows <= FEW_ROWS else name]
            kernel.launch_early(blocks, THREADS, parameters, stream, dependent=early)
        return self.out_RO[:rows]

    def parameters(self, inputs: ChainInputs) -> _Chain:
        """What all kernels get. Raises ValueError where rows do not fit."""
        plan, rows = self.plan, len(inputs.x_RH)
        if not 1 <= rows <= MAX_ROWS or inputs.x_RH.shape[1] != plan.hidden or inputs.x_RH.dtype != torch.bfloat16:
            raise ValueError(
                f"rows {tuple(inputs.x_RH.shape)} {inputs.x_RH.dtype}: at most 8 of {plan.hidden} bfloat16"
            )
        return _Chain(
            inputs.x_RH.data_ptr(), *(tensor.data_ptr() for tensor in self._weights), inputs.angles_R2P.data_ptr(),
            inputs.window.data_ptr(), inputs.chosen.data_ptr(), inputs.window_RW.data_ptr(),
            inputs.chosen_RC.data_ptr(), *(words.data_ptr() for words in self.exchanged), self.out_RO.data_ptr(),
            self.error.data_ptr(), self.stamps.data_ptr(), inputs.window.stride(0), inputs.chosen.stride(0),
            inputs.window_page_entries, inputs.chosen_page_entries, rows, self.eps, self.spin_limit,
        )  # fmt: skip

    def check(self) -> None:
        """Waits. Raises ChainDeadlineError where something never came."""
        if int(self.error[0]):
            self.reset()
            raise ChainDeadlineError("weights or another kernel's words did not arrive; the step is void")
