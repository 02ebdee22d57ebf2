"""Steps that check guesses, on the device: which rows a request gets, and which of the chosen tokens count.

Every request has `W` rows in such a step, one for its newest token and one for each guess, so that a graph of a fixed
size serves all; rows without a guess are padding. These functions are what the kernels in `triton/verify.py` are
compared with, and they run where there are no kernels.

Legend of shape suffixes: B padded requests, W rows of a request, G = W - 1 guesses, R = B * W rows, T batch slots with
the padding slot last, P pages of a slot, L tokens of a slot.
"""

from __future__ import annotations

import msgspec
import torch

NO_END = 1 << 40
"""As an end: the request may grow as long as its pages go."""


class SlotTables(msgspec.Struct):
    """What a device keeps of the batch slots, as far as these steps need it. Tensors are int64 but for the pages."""

    tokens_T: torch.Tensor
    """Newest token."""
    lengths_T: torch.Tensor
    """Tokens computed so far: the newest one's position."""
    ends_T: torch.Tensor
    """Tokens of prompt and longest answer; lengths stay below."""
    widths_T: torch.Tensor
    """Rows that the request may have in a step; 0: the padding slot."""
    pages_TP: torch.Tensor
    """int32."""
    page_size: int
    padding_page: int
    history_TL: torch.Tensor | None = None
    """int32: the slots' tokens, each at its position, and places for a step's rows behind the longest context; None:
    nobody looks them up. Steps with prompt chunks leave out all that they choose but the newest token: guesses are made
    of it, nothing else."""


class VerifyRows(msgspec.Struct):
    """Rows of a step that checks guesses, [B, W] in memory one request after another."""

    tokens_R: torch.Tensor
    """int64; 0 in padding rows."""
    positions_R: torch.Tensor
    """int64; 0 in padding rows."""
    places_R: torch.Tensor
    """int64: KV slots of the rows; those of padding rows are in the padding page."""
    rows_B: torch.Tensor
    """int32: rows that are none of padding."""
    lengths_B: torch.Tensor
    """int32: tokens after the step if all guesses are right; 0 for padding."""
    slots_B: torch.Tensor
    """int32: batch slots."""
    first_B: torch.Tensor
    """int32: first rows."""
    slots_R: torch.Tensor
    """int64: each row's batch slot."""
    next_R: torch.Tensor
    """int64: the place of the token that a row chooses."""


def begin_rows(
    slots_B: torch.Tensor, tables: SlotTables, guesses_BG: torch.Tensor, counts_B: torch.Tensor | None
) -> VerifyRows:
    """Rows for the newest tokens of `slots_B` and their first `counts_B` guesses (None: all), as many as each request's
    width and end allow."""
    requests, guesses = guesses_BG.shape
    device = slots_B.device
    row_W = torch.arange(guesses + 1, device=device)
    before_B = tables.lengths_T[slots_B]
    counts_B = torch.full_like(slots_B, guesses) if counts_B is None else counts_B
    rows_B = (counts_B + 1).minimum(tables.widths_T[slots_B]).minimum(tables.ends_T[slots_B] - before_B).clamp(min=0)
    real_BW = row_W < rows_B[:, None]
    tokens_BW = torch.cat([tables.tokens_T[slots_B][:, None], guesses_BG], 1)
    positions_BW = before_B[:, None] + row_W
    if tables.history_TL is not None:
        newest_B = tables.tokens_T[slots_B].to(tables.history_TL.dtype)
        kept_B = tables.history_TL[slots_B, before_B]
        tables.history_TL[slots_B, before_B] = newest_B.where(rows_B > 0, kept_B)
    size = tables.page_size
    page_BW = (positions_BW // size).clamp(max=tables.pages_TP.shape[1] - 1)
    places_BW = tables.pages_TP[slots_B[:, None], page_BW].long() * size + positions_BW % size
    return VerifyRows(
        tokens_BW.where(real_BW, 0).flatten(),
        positions_BW.where(real_BW, 0).flatten(),
        places_BW.where(real_BW, tables.padding_page * size).flatten(),
        rows_B.int(),
        torch.where(rows_B > 0, before_B + rows_B, 0).int(),
        slots_B.int(),
        torch.arange(requests, dtype=torch.int32, device=device) * (guesses + 1),
        slots_B[:, None].expand(-1, guesses + 1).flatten(),
        (positions_BW + 1).flatten(),
    )


def accept(
    chosen_R: torch.Tensor,
    rows: VerifyRows,
    slots_B: torch.Tensor,
    tables: SlotTables,
    guesses_BG: torch.Tensor,
    forced_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens count row by row until one differs from the guess after it; that one still counts (decision 0106). The
    slots' newest tokens and lengths advance.

    `chosen_R` are the rows' tokens, -1 where a row's logits were not numbers: a request that needs such a row gets no
    token and stays where it is. With `forced_B` so many tokens count, guesses taken for right: for benchmarks.

    Returns [B, 2 + W], int64: tokens that count (-1 where a needed row was broken), rows, and the rows' tokens.
    """
    requests, guesses = guesses_BG.shape
    chosen_BW = chosen_R.view(requests, guesses + 1)
    checked_BG = torch.arange(guesses, device=slots_B.device) + 1 < rows.rows_B[:, None]
    right_BG = (chosen_BW[:, :-1] == guesses_BG) & checked_BG
    if forced_B is not None:
        right_BG = torch.arange(guesses, device=slots_B.device) + 1 < forced_B.minimum(rows.rows_B)[:, None]
        chosen_BW = torch.cat([guesses_BG.where(right_BG, chosen_BW[:, :-1]), chosen_BW[:, -1:]], 1)
    counts_B = torch.where(rows.rows_B > 0, 1 + right_BG.int().cumprod(1).sum(1), 0)
    last_B = chosen_BW.gather(1, (counts_B - 1).clamp(min=0)[:, None])[:, 0]
    moved_B = (counts_B > 0) & (last_B >= 0)
    counts_B = torch.where((counts_B > 0) & (last_B < 0), -1, counts_B)
    # Padding requests all write what their slot holds already.
    before_B = tables.lengths_T[slots_B]
    tables.tokens_T.index_copy_(0, slots_B, torch.where(moved_B, last_B, tables.tokens_T[slots_B]))
    if tables.history_TL is not None:
        place_BW = before_B[:, None] + 1 + torch.arange(guesses + 1, device=slots_B.device)
        kept_BW = tables.history_TL[slots_B[:, None], place_BW]
        newer_BW = chosen_BW.to(kept_BW.dtype).where(place_BW <= (before_B + counts_B)[:, None], kept_BW)
        tables.history_TL[slots_B[:, None], place_BW] = newer_BW
    after_B = (before_B + counts_B).minimum(tables.ends_T[slots_B] - 1)
    tables.lengths_T.index_copy_(0, slots_B, torch.where(moved_B, after_B, before_B))
    return torch.cat([counts_B[:, None], rows.rows_B.long()[:, None], chosen_BW], 1)
