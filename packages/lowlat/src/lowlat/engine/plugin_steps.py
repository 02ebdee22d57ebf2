"""Steps that kernels compute: the plan of a step as the contract's inputs, and the way back to the general path.

Legend of shape suffixes: R rows, Q requests, P pages a request, V vocabulary, B batch slots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from lowlat.engine.batch import StepPlan
from lowlat.layers import step as layers
from lowlat.models.decoder import Taps
from lowlat_plugin import LowLatency, Mode, State, StepFailed, StepInputs
from lowlat_plugin.routing import FAILED, SWITCHED_OFF

log = logging.getLogger("lowlat.plugins")


class KernelSteps:
    """Tries every step on the kernels and counts who computed it."""

    def __init__(
        self, low: LowLatency, page_size: int, device: torch.device, taps: Callable[[], Taps | None] = lambda: None
    ) -> None:
        """`taps`: who looks at states inside the model, if anybody."""
        self.low = low
        self._taps = taps
        self._page_size = page_size
        self._device = device

    def run(
        self,
        plan: StepPlan,
        tokens: list[int],
        guesses: list[list[int]],
        lengths: list[int],
        kv_slots: np.ndarray,
    ) -> torch.Tensor | None:
        """Logits [R, V] of a step of decodes and the guesses they check, on the host; None where the general path must
        compute it.

        `tokens` and `lengths` are by batch slot, before the step, `guesses` by decode slot of the plan; `kv_slots`
        [B, tokens] names each token's KV slot.
        Raises `StepFailed` where kernels fail beside other ranks, which cannot be asked to start the step again.
        """
        low = self.low
        requests = len(plan.decodes)
        checks = any(guesses)
        mode = Mode.PREFILL if plan.chunks else Mode.VERIFY if checks else Mode.DECODE
        route = low.route(mode, requests, plan.rows + sum(map(len, guesses)))
        if plan.general and low.state is State.ACTIVE:
            route = SWITCHED_OFF
        logits_RV = None
        if route.kernels:
            try:
                rows = [[tokens[slot], *guessed] for slot, guessed in zip(plan.decodes, guesses, strict=True)]
                inputs = self._inputs(mode, plan.decodes, rows, lengths, kv_slots)
                logits_RV = low.forward(inputs).to("cpu")
                if bool(logits_RV[:, 0].isnan().any()):
                    low.check()
                self._show(inputs)
            except StepFailed:
                if low.host.agreement.size > 1:
                    raise
                log.warning("step %d runs again on the general path", plan.step)
                route, logits_RV = FAILED, None
        low.counters.add(route)
        return logits_RV

    def _show(self, inputs: StepInputs) -> None:
        """Hand the states that the kernels kept to whoever taps the model."""
        taps = self._taps()
        if taps is not None:
            none = torch.empty(0, dtype=torch.int64)
            tokens_R, positions_R, slots_R = inputs.token_ids_R, inputs.positions_R, inputs.write_slots_R
            step = layers.StepInputs(tokens_R, positions_R, slots_R, len(tokens_R), [], [], none)
            taps.take(self.low.features(), step)

    def count(self, plan: StepPlan) -> None:
        """Count a step that was not asked for: no library is installed, or none fits."""
        self.low.counters.add(
            self.low.route(Mode.PREFILL if plan.chunks else Mode.DECODE, len(plan.decodes), plan.rows)
        )

    def _inputs(
        self, mode: Mode, slots: list[int], tokens: list[list[int]], lengths: list[int], kv_slots: np.ndarray
    ) -> StepInputs:
        counts_Q = np.array([len(rows) for rows in tokens])
        starts_Q = np.array([lengths[slot] for slot in slots], dtype=np.int64)
        index_Q = np.array(slots)
        query_start_Q1 = np.concatenate([[0], counts_Q.cumsum()])
        offsets_R = np.arange(query_start_Q1[-1]) - np.repeat(query_start_Q1[:-1], counts_Q)
        positions_R = np.repeat(starts_Q, counts_Q) + offsets_R
        lengths_Q = starts_Q + counts_Q
        starts_P = np.arange(0, int(lengths_Q.max()), self._page_size)
        page_table_QP = (kv_slots[index_Q[:, None], starts_P] // self._page_size).astype(np.int32)
        token_ids_R, query_start_tensor, totals_Q, table_QP, write_slots_R, places_R = (
            torch.from_numpy(part).to(self._device)
            for part in (
                np.array([token for rows in tokens for token in rows]),
                query_start_Q1.astype(np.int32),
                lengths_Q.astype(np.int32),
                page_table_QP,
                kv_slots[np.repeat(index_Q, counts_Q), positions_R],
                positions_R,
            )
        )
        return StepInputs(mode, token_ids_R, places_R, query_start_tensor, totals_Q, table_QP, write_slots_R)
