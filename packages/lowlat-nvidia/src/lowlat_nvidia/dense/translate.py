"""From the contract's step to the kernel's: which page table and first row each row has, and what padding rows do.

Suffixes: R rows, Q requests, P pages a request, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowlat_nvidia.dense.step import StepTensors
from lowlat_plugin import StepInputs


def translate(step: StepInputs, addresses_L2: Tensor, scratch_L2: Tensor) -> StepTensors:
    """All on the device, without looking at values, so that it can be recorded in a graph.

    A padding row (negative write slot) becomes a copy of the first real row: it computes the same bits and writes them
    to the same place. Where all rows are padding, the pools' addresses give way to `scratch_L2`, and position and page
    to 0: the scratch needs room for slot 0 alone.
    """
    rows = torch.arange(len(step.token_ids_R), device=step.token_ids_R.device)
    real_R = step.write_slots_R >= 0
    some = real_R.any()
    source_R = torch.where(real_R, rows, real_R.int().argmax())
    last = len(step.lengths_Q) - 1
    request_R = torch.searchsorted(step.query_start_Q1[1:], rows.int(), right=True).clamp_(max=last)[source_R]
    return StepTensors(
        tokens_R=step.token_ids_R[source_R],
        positions_R=step.positions_R[source_R] * some,
        row_request_R=request_R.int(),
        row_first_R=step.query_start_Q1[request_R],
        page_table_QP=step.page_table_QP * some,
        addresses_L2=torch.where(some, addresses_L2, scratch_L2),
        logits_RV=step.logits_RV,
    )
