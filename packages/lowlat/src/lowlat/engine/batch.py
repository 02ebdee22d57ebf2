"""The plan of one step, as integers in a fixed-size record.

Rank 0 writes a plan; every rank reads it, from memory of its own or from a ring in shared memory. A record holds four
lists: slots that begin (with their sampling settings), page-table entries, prefill chunks with their tokens, and the
slots that decode. Steady decode leaves all but the header as the step before.

Slots here are rows of the batch's tables (one a running request), not slots of the KV pool.
"""

from __future__ import annotations

import msgspec
import numpy as np

_HEADER = 8
_SAMPLING = 8


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large a plan can be; all ranks use the same."""

    max_batch: int
    max_rows: int
    """Prefill tokens and decode rows in one step."""
    max_pages: int
    """Page-table entries of one request."""

    @property
    def page_budget(self) -> int:
        """Page-table entries that one plan can carry: a whole table, and one more entry for every request."""
        return self.max_pages + self.max_batch + self.max_rows

    @property
    def words(self) -> int:
        """32-bit words of a record."""
        begins = self.max_batch * _SAMPLING
        pages = 2 * self.max_batch * 3 + self.page_budget
        chunks = self.max_batch * 4 + self.max_rows
        return _HEADER + begins + pages + chunks + self.max_batch


class SlotSampling(msgspec.Struct, frozen=True):
    """Sampling settings of a request, as the device keeps them for its slot."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    """64 bits; the random number of a token depends on this and on its position alone."""
    logprobs: int
    """-1: none; 0: the chosen token's; n: and the n most likely."""


class PrefillChunk(msgspec.Struct):
    """Prompt tokens of one request to compute in a step; `sample` when they reach the end of the prompt."""

    slot: int
    start: int
    tokens: list[int]
    sample: bool


class StepPlan(msgspec.Struct):
    """What one step does. Rows are the chunks' tokens in order, then one row for each decode slot.

    A decode row's token and position are the slot's own state: the token sampled last and the tokens computed so far.
    """

    step: int
    begins: list[tuple[int, SlotSampling]]
    pages: list[tuple[int, int, list[int]]]
    """(slot, first index in its page table, pages)."""
    chunks: list[PrefillChunk]
    decodes: list[int]
    """Slots."""
    general: bool = False
    """Kernels are switched off: all ranks take the general path."""

    @property
    def rows(self) -> int:
        """Query tokens of the step."""
        return sum(len(chunk.tokens) for chunk in self.chunks) + len(self.decodes)

    @property
    def samples(self) -> int:
        """Tokens that the step samples: one for every chunk that ends a prompt, then one for every decode slot."""
        return sum(chunk.sample for chunk in self.chunks) + len(self.decodes)


def encode_plan(plan: StepPlan, record: np.ndarray, previous_decodes: list[int] | None) -> None:
    """Write `plan` into `record` (int32 words of one `PlanLimits`).

    `previous_decodes` are the decode slots of the plan written before: when they are the same they are not repeated.
    """
    same = previous_decodes == plan.decodes
    position = _HEADER
    for slot, sampling in plan.begins:
        record[position] = slot
        record[position + 1 : position + 3].view(np.float32)[:] = (sampling.temperature, sampling.top_p)
        record[position + 3] = sampling.top_k
        record[position + 4] = sampling.logprobs
        record[position + 5 : position + 7].view(np.uint32)[:] = (sampling.seed & 0xFFFFFFFF, sampling.seed >> 32)
        position += _SAMPLING
    for slot, first, pages in plan.pages:
        record[position : position + 3] = (slot, first, len(pages))
        record[position + 3 : position + 3 + len(pages)] = pages
        position += 3 + len(pages)
    for chunk in plan.chunks:
        record[position : position + 4] = (chunk.slot, chunk.start, len(chunk.tokens), chunk.sample)
        record[position + 4 : position + 4 + len(chunk.tokens)] = chunk.tokens
        position += 4 + len(chunk.tokens)
    if not same:
        record[position : position + len(plan.decodes)] = plan.decodes
    record[:_HEADER] = (
        plan.step,
        len(plan.begins),
        len(plan.pages),
        len(plan.chunks),
        len(plan.decodes),
        same,
        plan.general,
        0,
    )


def decode_plan(record: np.ndarray, previous_decodes: list[int] | None) -> StepPlan:
    """Read what `encode_plan` wrote; `previous_decodes` as there."""
    step, begin_count, page_count, chunk_count, decode_count, same, general, _ = record[:_HEADER].tolist()
    position = _HEADER
    begins = []
    for _ in range(begin_count):
        temperature, top_p = record[position + 1 : position + 3].view(np.float32).tolist()
        low, high = record[position + 5 : position + 7].view(np.uint32).tolist()
        sampling = SlotSampling(
            temperature, int(record[position + 3]), top_p, low | high << 32, int(record[position + 4])
        )
        begins.append((int(record[position]), sampling))
        position += _SAMPLING
    pages = []
    for _ in range(page_count):
        slot, first, count = record[position : position + 3].tolist()
        pages.append((slot, first, record[position + 3 : position + 3 + count].tolist()))
        position += 3 + count
    chunks = []
    for _ in range(chunk_count):
        slot, start, count, sample = record[position : position + 4].tolist()
        chunks.append(PrefillChunk(slot, start, record[position + 4 : position + 4 + count].tolist(), bool(sample)))
        position += 4 + count
    if same:
        assert previous_decodes is not None
        decodes = previous_decodes
    else:
        decodes = record[position : position + decode_count].tolist()
    return StepPlan(step, begins, pages, chunks, decodes, bool(general))
