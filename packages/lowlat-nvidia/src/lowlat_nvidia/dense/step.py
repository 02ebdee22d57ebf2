"""A built dense step: its memory, its parameters, one launch.

Suffixes: R rows, V vocabulary, Q requests, P pages a request, T rows of the page table, L layers, S slots, H KV heads,
D head dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.dense.pack import DenseWeights, pack, pack_biases, pack_head_norms, pack_norms
from lowlat_nvidia.dense.plan import BLOCKS, MAX_ROWS, UNIT_TOKENS, WARPS, DensePlan
from lowlat_nvidia.jit import TENSOR_MAP, BuildError, Function, compile_cubin

THREADS = 32 * (WARPS + 4)  # four warps copy the cache
STAGES = (
    "q, k and v", "", "attention", "sum of splits", "attention output", "gate and up", "down", "logits",
    "any product: a page of weights", "attention: cached keys and values", "copies of cached keys and values: room",
)  # fmt: skip
"""Names of the numbers in the error word: what waited."""
DEFAULT_SPIN_LIMIT = 4_000_000  # fruitless polls of one wait: seconds, where a step takes milliseconds


class StepDeadlineError(RuntimeError):
    """A block waited too long. The results are void; the context lives, `DenseStep.reset` makes it usable again."""


_POINTERS = (
    "weights", "embedding", "norms", "head_norms", "biases", "rotary", "pools", "maps", "tokens", "positions",
    "query_start", "write_slots", "table_rows", "page_table", "scratch", "exchange", "state", "logits", "best",
    "next_token", "stamps",
)  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("slot_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("table_stride", ctypes.c_int),
        ("page_shift", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("requests", ctypes.c_int),
        ("spin_limit", ctypes.c_uint),
        ("zero", ctypes.c_uint),
        ("eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
    )


@dataclass(slots=True)
class StepTensors:
    """One step's inputs, on the device, as the contract's `StepInputs` has them.

    tokens_R, positions_R int64; query_start_Q1 int32: request q owns rows query_start[q] to query_start[q + 1] - 1,
    with consecutive positions; page_table_TP int32: of request q row q, or table_rows_Q[q] (int32). write_slots_R int64
    is looked at for its sign alone, negative in padding rows, which repeat the first real row; None: there are none.
    logits_RV float32, contiguous: where the logits go; None: `DenseStep.logits_RV`.
    """

    tokens_R: Tensor
    positions_R: Tensor
    query_start_Q1: Tensor
    page_table_TP: Tensor
    write_slots_R: Tensor | None = None
    table_rows_Q: Tensor | None = None
    logits_RV: Tensor | None = None


def load_kernels(plans: Sequence[DensePlan]) -> tuple[list[Function], str]:
    """The kernels of plans and what the compiler said; they are compiled side by side."""
    with ThreadPoolExecutor(len(plans)) as pool:
        made = list(pool.map(lambda plan: compile_cubin("dense_step.cu", plan.definitions()), plans))
    loaded = [Function(cubin, "dense_step", plan.shared_bytes()) for (cubin, _), plan in zip(made, plans, strict=True)]
    return loaded, "\n".join(log for _, log in made if log)


class DenseStep:
    """Weights packed, kernels loaded: one for steps of one row, one for steps of several.

    `bind` names the KV pools, `run` computes a step of 1 to 8 rows.
    """

    def __init__(
        self,
        plan: DensePlan,
        weights: DenseWeights,
        rotary: Tensor,
        device: str = "cuda",
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
        scratch_elements: int = 4096,
    ) -> None:
        """`rotary` is [positions, 2, head_dim / 2] float32: cosine, sine. `allocate` gives device memory of a shape.

        `scratch_elements`: from the first to the last element of one slot of the pools, for steps of padding alone.
        """
        empty = allocate or (lambda size, dtype: torch.empty(size, dtype=dtype, device=device))
        shape = plan.shape
        self.plan = plan
        self.functions, self.log = load_kernels([plan.kernel(1), plan.kernel(MAX_ROWS)])
        width = BLOCKS * WARPS * plan.page_bytes // 2
        self.stream_PE = empty((plan.stream_pages(), width), torch.bfloat16)
        pack(plan, weights, self.stream_PE)
        self.embedding = weights.embedding.contiguous()
        self.norms = pack_norms(weights)
        self.head_norms = pack_head_norms(shape, weights)
        self.biases = pack_biases(shape, weights)
        self.rotary = rotary.contiguous()
        self.scratch = empty((scratch_elements,), torch.bfloat16)
        words = [plan.kernel(rows).exchange_words() for rows in (1, MAX_ROWS)]
        self.exchanges = [empty((count,), torch.int32) for count in words]
        self.state = empty((16,), torch.int32)
        self.best = empty((MAX_ROWS,), torch.int64)
        self.logits_RV = empty((MAX_ROWS, shape.vocab), torch.float32)
        self.next_token_R = empty((MAX_ROWS,), torch.int64)
        self.addresses_L2 = empty((shape.layers, 2), torch.int64)
        self.maps = empty((shape.layers, 2, TENSOR_MAP), torch.uint8)
        self.stamps = empty((BLOCKS, shape.layers + 1, max(1, plan.stamps)), torch.int64)
        self.spin_limit = DEFAULT_SPIN_LIMIT
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._mapped = False
        self.reset()

    def reset(self) -> None:
        """Forget all words that either kernel published, as before the first step and after a missed deadline."""
        for exchange in self.exchanges:
            exchange.fill_(-1)
        self.state.zero_()
        self.best.zero_()

    def bind(self, pools: list[tuple[Tensor, Tensor]], page_size: int) -> None:
        """K and V of each layer, [S, H, D] bfloat16 with any slot and head strides, the same in all."""
        first = pools[0][0]
        for tensor in (tensor for pair in pools for tensor in pair):
            if tensor.dtype != torch.bfloat16 or tensor.stride() != first.stride() or tensor.stride(-1) != 1:
                raise ValueError("KV pools must be bfloat16 with equal strides and contiguous heads")
        if first.stride(0) % 8 or first.stride(1) % 8:
            raise ValueError(f"KV strides {first.stride()} must be multiples of 8 elements")
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page size {page_size} is not a power of two")
        self._pools = pools
        self._mapped = self._describe(pools)
        self.addresses_L2.copy_(torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in pools], dtype=torch.int64))
        self._slot_stride, self._head_stride = first.stride(0), first.stride(1)
        self._page_shift = page_size.bit_length() - 1

    def _describe(self, pools: list[tuple[Tensor, Tensor]]) -> bool:
        """Tells the copy engine of the pools: boxes of 16 slots of one head, in panels of 64 elements.

        False where it takes no such tensors; they are then copied 16 bytes at a time.
        """
        slots, heads, size = pools[0][0].shape
        strides = (2 * pools[0][0].stride(0), 2 * pools[0][0].stride(1), 128)
        sizes, box = (64, slots, heads, size // 64), (64, UNIT_TOKENS, 1, size // 64)
        try:
            maps = [Function.tensor_map(x.data_ptr(), sizes, strides, box) for pair in pools for x in pair]
        except BuildError:
            return False
        self.maps.copy_(torch.frombuffer(bytearray(b"".join(maps)), dtype=torch.uint8).view(self.maps.shape))
        return True

    def function(self, rows: int) -> Function:
        """The kernel for steps of so many rows."""
        return self.functions[rows > 1]

    def exchange(self, rows: int) -> Tensor:
        """The words that blocks of the kernel for so many rows exchange; no other kernel touches them."""
        return self.exchanges[rows > 1]

    def close(self) -> None:
        """Unloads the kernels. Nothing may be launched any more."""
        for function in self.functions:
            function.close()

    def parameters(self, step: StepTensors) -> _Params:
        rows = len(step.tokens_R)
        if not 1 <= rows <= MAX_ROWS:
            raise ValueError(f"{rows} rows; a step has 1 to {MAX_ROWS}")
        logits = self.logits_RV if step.logits_RV is None else step.logits_RV
        tensors = (
            self.stream_PE, self.embedding, self.norms, self.head_norms, self.biases, self.rotary, self.addresses_L2,
            self.maps if self._mapped else None, step.tokens_R, step.positions_R, step.query_start_Q1,
            step.write_slots_R, step.table_rows_Q, step.page_table_TP, self.scratch, self.exchange(rows), self.state,
            logits, self.best, self.next_token_R, self.stamps,
        )  # fmt: skip
        eps = self.plan.shape.eps
        return _Params(
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors), self._slot_stride,
            self._head_stride, step.page_table_TP.stride(0), self._page_shift, rows, len(step.query_start_Q1) - 1,
            self.spin_limit, 0, eps, eps,
        )  # fmt: skip

    def run(self, step: StepTensors, stream: int | None = None) -> Tensor:
        """Launches one step; returns logits [R, V] float32, overwritten by the next. Greedy tokens: `next_token_R`.

        `next_token_R` is -1 where a row's greatest logit is no finite number. A step that fails, and all after it until
        `reset`, leave -1 for every row, and NaN in every row's first logit; `error` says why.
        """
        if self.plan.alone:
            raise ValueError("a step that can run stages alone is run by dense.alone")
        parameters = self.parameters(step)
        function = self.function(parameters.rows)
        function.launch(BLOCKS, THREADS, parameters, stream or torch.cuda.current_stream().cuda_stream, early=True)
        return self.logits_RV[: len(step.tokens_R)] if step.logits_RV is None else step.logits_RV

    def error(self) -> StepDeadlineError | None:
        """Waits for the device; the error of a step since the last `reset`, naming the block and what it waited for."""
        word = int(self.state[1])
        if not word:
            return None
        block, stage = divmod(word - 1, 16)
        return StepDeadlineError(
            f"block {block} gave up waiting for the input of stage '{STAGES[stage]}'; call reset()"
        )

    def check(self) -> None:
        """Waits for the step. Raises its `error`, if it has one."""
        error = self.error()
        if error is not None:
            raise error
