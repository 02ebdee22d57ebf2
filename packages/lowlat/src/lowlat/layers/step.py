"""What a model sees of a step: rows, where they stand, where they write, and what they may look at.

Legend of shape suffixes: R rows, L tokens that a request's rows may see (its length after the step).
"""

from __future__ import annotations

import msgspec
import torch


class Segment(msgspec.Struct):
    """Neighbouring rows of one request: `rows` query tokens from row `first` on, the last of its `length` tokens.

    `slots_L` are the KV slots of all its tokens in order; `run` is the first of them when they are neighbours in
    memory, -1 otherwise.
    """

    first: int
    rows: int
    length: int
    slots_L: torch.Tensor
    run: int
    slot: int = -1
    """Batch slot of the request, and row of its per-request state."""


class DecodeGroup(msgspec.Struct):
    """Requests with one row each, gathered together: rows `rows`, KV slots [requests, longest], and a mask.

    `mask` is [requests, 1, 1, longest], 0 or minus infinity, in the type of the queries; None when lengths are equal.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


class StepInputs(msgspec.Struct):
    """One step. Rows beyond `real_rows` are padding: they write no page that a request owns and are never sampled."""

    tokens_R: torch.Tensor
    positions_R: torch.Tensor
    write_slots: torch.Tensor
    """KV slots of the real rows' own tokens."""
    real_rows: int
    segments: list[Segment]
    decodes: list[DecodeGroup]
    sample_rows: torch.Tensor
    """Rows whose logits are wanted, in this order."""
