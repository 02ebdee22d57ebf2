"""What a model sees of a step: rows, where they stand, where they write, and what they may look at.

Legend of shape suffixes: R rows, L tokens that a request's rows may see, T rows of a group of items, P tokens of a
span, B items of a batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import torch

_T = TypeVar("_T")


class Segment(msgspec.Struct):
    """Neighbouring rows of one request: `rows` query tokens from row `first` on, the last of its `length` tokens.

    In a `windowed` step `length` counts the tokens that some of these rows see. `slots_L` are their KV slots in order;
    `run` is the first of them when they are neighbours in memory, -1 otherwise.
    """

    first: int
    rows: int
    length: int
    slots_L: torch.Tensor
    run: int
    slot: int = -1
    """Batch slot of the request, and row of its per-request state."""
    floor: int = 0
    """Positions before it are not in the state (bounded replay)."""
    write_from: int = 0
    """Rows before this position leave the pages as they are (replay of cached tokens)."""


class DecodeGroup(msgspec.Struct):
    """Requests with one row each, gathered together: rows `rows`, KV slots [requests, longest], and a mask.

    `mask` is [requests, 1, 1, longest], 0 or minus infinity, in the type of the queries; None when lengths are equal.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


class EvenGroup(msgspec.Struct):
    """All rows of a step, where its requests are alike: each has the same number of rows, the last of its `length`
    tokens, and a stretch of `room` KV slots of its own, one behind the other from slot 0 on."""

    requests: int
    length: int
    room: int
    length_1: torch.Tensor | None = None
    """On a GPU, for steps of one row each: `length` where a captured graph reads it, in place of the number."""


class KeySpan(msgspec.Struct):
    """Tokens whose keys stand in the cache: their KV slots in order; `run` as in `Segment`."""

    length: int
    slots_P: torch.Tensor
    run: int


class ItemBatch(msgspec.Struct):
    """Items of similar length: for each its rows in the group and their KV slots, both [B, L].

    Shorter ones are filled up at the end with their first row, which no row before the end sees.
    """

    rows_BL: torch.Tensor
    slots_BL: torch.Tensor


class ItemGroup(msgspec.Struct):
    """Neighbouring rows of one request that are items: `rows` from row `first` on.

    Each row sees `prefix` and the rows of its own item up to itself; rows of the first piece, which may go on with an
    item of an earlier chunk, also see `earlier`, the tokens of that item before them.
    """

    first: int
    rows: int
    prefix: KeySpan
    earlier: KeySpan
    first_rows: int
    """Rows of the first piece."""
    offsets_T: torch.Tensor
    """Place of each row in its item."""
    batches: list[ItemBatch]
    places_T: torch.Tensor
    """Where each row stands in the batches, laid out one behind the other."""


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
    items: list[ItemGroup] = []
    even: EvenGroup | None = None
    """In place of segments and decodes, where many requests are alike (training)."""
    windowed: StepInputs | None = None
    """The same rows for layers with a window: where they write there, and the tokens that some of their rows see. In
    segments of several rows `paged_attention` masks what a row does not see. None: there are no such layers, or their
    keys lie in the pages of the others."""


def moved(value: _T, device: torch.device) -> _T:
    """A step's inputs with all their tensors on `device`; the same object where that is the CPU they were made on."""
    return value if device.type == "cpu" else _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_moved(part, device) for part in value]
    if isinstance(value, msgspec.Struct):
        fields = {name: _moved(getattr(value, name), device) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value
