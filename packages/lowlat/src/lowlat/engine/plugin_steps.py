"""Steps that kernels compute: the plan of a step as the contract's inputs, and the way back to the general path.

Legend of shape suffixes: R rows, Q requests, P pages a request, V vocabulary, B batch slots.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from lowlat.engine.batch import StepPlan
from lowlat_plugin import LowLatency, Mode, State, StepFailed, StepInputs
from lowlat_plugin.routing import FAILED, SWITCHED_OFF

log = logging.getLogger("lowlat.plugins")


class KernelSteps:
    """Tries every step on the kernels and counts who computed it."""

    def __init__(self, low: LowLatency, page_size: int) -> None:
        self.low = low
        self._page_size = page_size

    def run(self, plan: StepPlan, tokens: list[int], lengths: list[int], kv_slots: np.ndarray) -> torch.Tensor | None:
        """Logits [R, V] of a step of decodes; None where the general path must compute it.

        `tokens` and `lengths` are by batch slot, before the step; `kv_slots` [B, tokens] names each token's KV slot.
        Raises `StepFailed` where kernels fail beside other ranks, which cannot be asked to start the step again.
        """
        low = self.low
        requests = len(plan.decodes)
        route = low.route(Mode.PREFILL if plan.chunks else Mode.DECODE, requests, plan.rows)
        if plan.general and low.state is State.ACTIVE:
            route = SWITCHED_OFF
        logits_RV = None
        if route.kernels:
            try:
                logits_RV = low.forward(self._inputs(plan.decodes, tokens, lengths, kv_slots))
            except StepFailed:
                if low.host.agreement.size > 1:
                    raise
                log.warning("step %d runs again on the general path", plan.step)
                route = FAILED
        low.counters.add(route)
        return logits_RV

    def _inputs(self, slots: list[int], tokens: list[int], lengths: list[int], kv_slots: np.ndarray) -> StepInputs:
        requests = len(slots)
        positions_R = np.array([lengths[slot] for slot in slots], dtype=np.int64)
        index_Q = np.array(slots)
        starts_P = np.arange(0, int(positions_R.max()) + 1, self._page_size)
        page_table_QP = (kv_slots[index_Q[:, None], starts_P] // self._page_size).astype(np.int32)
        return StepInputs(
            Mode.DECODE,
            torch.tensor([tokens[slot] for slot in slots]),
            torch.from_numpy(positions_R),
            torch.arange(requests + 1, dtype=torch.int32),
            torch.from_numpy((positions_R + 1).astype(np.int32)),
            torch.from_numpy(page_table_QP),
            torch.from_numpy(kv_slots[index_Q, positions_R]),
        )
