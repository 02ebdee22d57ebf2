"""Sequential proposals of a Markov draft head in one launch.

Suffixes: R requests, S steps, V vocabulary, L rows of the vocabulary on this GPU, K rank of the head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.draft.plan import MAX_RANKS, MAX_STEPS, THREADS, TILE_ROWS, MarkovPlan
from lowlat_nvidia.jit import Function, compile_cubin

DEFAULT_SPIN_LIMIT = 2_000_000  # fruitless polls of one wait: about a second, where a launch takes microseconds


class ProposalDeadlineError(RuntimeError):
    """A block waited too long for another block or rank. Tokens are void; `reset` on all ranks makes it usable."""


class _Params(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "head", "embedding", "base", "anchors", "temperatures", "seeds", "positions", "tokens", "logits"
            )
        ),
        ("inboxes", ctypes.c_void_p * MAX_RANKS),
        ("errors", ctypes.c_void_p * MAX_RANKS),
        ("epochs", ctypes.c_void_p),
        ("base_request", ctypes.c_longlong),
        ("base_step", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("requests", "steps", "local_vocabulary", "first_token", "tiles", "rank")
        ),
        ("spin_limit", ctypes.c_uint),
    )  # fmt: skip


def pack_head(head_LK: Tensor, plan: MarkovPlan) -> Tensor:
    """Rows of the head in the order in which lanes read them, [tiles, K / 16, 32, 8] bfloat16.

    Lane (g, q) of a warp multiplies, for each 32 elements of the rank, rows g and g + 8 of a tile by elements
    8 q .. 8 q + 7: two matrix instructions whose reduction order is permuted alike on both sides.
    """
    rows, rank = head_LK.shape
    padded = torch.zeros(plan.tiles * TILE_ROWS, rank, dtype=torch.bfloat16, device=head_LK.device)
    padded[:rows] = head_LK
    # [tile, half, g, pair of instructions, q, instruction, register, 2] -> registers: (row half fastest, then register)
    parts = padded.view(plan.tiles, 2, 8, rank // 32, 4, 2, 2, 2)
    return parts.permute(0, 3, 5, 2, 4, 6, 1, 7).reshape(plan.tiles, rank // 16, 32, 8).contiguous()


@dataclass(slots=True)
class ProposalTensors:
    """Inputs of one launch, on the device: base_RSL float32 (contiguous along L), anchors_R int64, temperatures_R
    float32 (0: greedy), seeds_R int64, positions_R int64: the place of the first proposal in its sequence.
    logits_RSL float32, contiguous, is filled when given."""

    base_RSL: Tensor
    anchors_R: Tensor
    temperatures_R: Tensor
    seeds_R: Tensor
    positions_R: Tensor
    logits_RSL: Tensor | None = None


class MarkovProposals:
    """A head packed for one GPU. With several ranks, `connect` names the inboxes and error words of all."""

    def __init__(self, plan: MarkovPlan, head_LK: Tensor, embedding_VK: Tensor, rank: int = 0) -> None:
        """`head_LK`: this rank's rows; `embedding_VK`: the whole table; both bfloat16 on one GPU."""
        if tuple(head_LK.shape) != (plan.local_vocabulary, plan.rank):
            raise ValueError(f"head of {tuple(head_LK.shape)}; planned ({plan.local_vocabulary}, {plan.rank})")
        if embedding_VK.dtype != torch.bfloat16 or tuple(embedding_VK.shape) != (plan.vocabulary, plan.rank):
            raise ValueError(f"embedding of {tuple(embedding_VK.shape)} {embedding_VK.dtype}")
        self.plan, self.rank = plan, rank
        device = head_LK.device
        cubin, self.log = compile_cubin("markov.cu", plan.definitions())
        self.function = Function(cubin, "markov_proposals", plan.shared_bytes)
        self.head = pack_head(head_LK, plan)
        self.embedding = embedding_VK.contiguous()
        self.inbox = torch.zeros(plan.inbox_bytes // 8, dtype=torch.int64, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)
        self.epochs = torch.zeros(plan.blocks, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(plan.max_requests, MAX_STEPS, dtype=torch.long, device=device)
        self.spin_limit = DEFAULT_SPIN_LIMIT
        if plan.ranks == 1:
            self.connect([self.inbox.data_ptr()], [self.error.data_ptr()])

    def connect(self, inboxes: Sequence[int], errors: Sequence[int]) -> None:
        """Addresses of every rank's inbox and error word, as this GPU sees them, in rank order."""
        if len(inboxes) != self.plan.ranks or len(errors) != self.plan.ranks:
            raise ValueError(f"{len(inboxes)} inboxes for {self.plan.ranks} ranks")
        self._inboxes, self._errors = list(inboxes), list(errors)

    def reset(self) -> None:
        """Forget all published words: after a missed deadline, on all ranks, before any launches again."""
        for tensor in (self.inbox, self.error, self.epochs):
            tensor.zero_()

    def run(self, inputs: ProposalTensors, stream: int | None = None) -> Tensor:
        """Launches; returns tokens [R, S] int64, a view that the next launch overwrites. Capturable in graphs."""
        requests, steps, local = inputs.base_RSL.shape
        plan = self.plan
        if not 1 <= requests <= plan.max_requests or not 1 <= steps <= MAX_STEPS or local != plan.local_vocabulary:
            raise ValueError(f"base logits of {tuple(inputs.base_RSL.shape)}; planned for {plan}")
        tokens = self.tokens.view(-1)[: requests * steps].view(requests, steps)
        pad = [0] * (MAX_RANKS - plan.ranks)
        parameters = _Params(
            self.head.data_ptr(), self.embedding.data_ptr(), inputs.base_RSL.data_ptr(), inputs.anchors_R.data_ptr(),
            inputs.temperatures_R.data_ptr(), inputs.seeds_R.data_ptr(), inputs.positions_R.data_ptr(),
            tokens.data_ptr(), None if inputs.logits_RSL is None else inputs.logits_RSL.data_ptr(),
            (ctypes.c_void_p * MAX_RANKS)(*self._inboxes, *pad), (ctypes.c_void_p * MAX_RANKS)(*self._errors, *pad),
            self.epochs.data_ptr(), inputs.base_RSL.stride(0), inputs.base_RSL.stride(1), requests, steps, local,
            self.rank * local, plan.tiles, self.rank, self.spin_limit,
        )  # fmt: skip
        self.function.launch(plan.blocks, THREADS, parameters, stream or torch.cuda.current_stream().cuda_stream)
        return tokens

    def check(self) -> None:
        """Waits for the launch. Raises ProposalDeadlineError where it gave up."""
        self.explain(int(self.error[0]) & 0xFFFFFFFF)

    @staticmethod
    def explain(code: int) -> None:
        """Raises ProposalDeadlineError for a rank's error word that is not 0."""
        if code:
            block, stage = divmod((code & 0x7FFFFFFF) - 1, 16)
            where = "another rank" if code >> 31 else "this rank"
            what = "its copy of the head" if stage == 15 else f"the words of proposal {stage}"
            raise ProposalDeadlineError(
                f"block {block} of {where} gave up waiting for {what}; call reset() on all ranks"
            )
