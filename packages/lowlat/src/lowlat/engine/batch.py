"""The plan of one step, as integers in a fixed-size record.

Rank 0 writes a plan; every rank reads it, from memory of its own or from a ring in shared memory. A record holds four
lists: slots that begin (with their sampling settings), page-table entries, prefill chunks with their tokens, and the
slots that decode. Steady decode leaves all but the header as the step before.

Slots here are rows of the batch's tables (one a running request), not slots of the KV pool.
"""

from __future__ import annotations

import msgspec
import numpy as np

from lowlat.engine.score_task import ItemRows
from lowlat.grammars.matcher import GrammarLine

_HEADER = 10
_CHUNK_WORDS = 8
_SAMPLES, _SCORES = 1, 2
_LONGEST_HISTORY = 8
# Below this a temperature means greedy: dividing by it could overflow, and one token has all the mass anyway.
MIN_TEMPERATURE = 1e-5


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large a plan can be; all ranks use the same."""

    max_batch: int
    max_rows: int
    """Prefill tokens and decode rows in one step."""
    max_pages: int
    """Page-table entries of one request."""
    max_window_pages: int = 0
    """Entries of one request in its table of window pages that a plan may bring; 0: no layer has a window."""

    @property
    def page_budget(self) -> int:
        """Page-table entries that one plan can carry: a whole table, and one more entry for every request."""
        return self.max_pages + self.max_batch + self.max_rows

    @property
    def words(self) -> int:
        """32-bit words of a record."""
        begins = 2 * self.max_batch
        pages = 2 * self.max_batch * 3 + self.page_budget
        # Tokens, pieces of items and rows to read are at most one a row.
        chunks = self.max_batch * _CHUNK_WORDS + 3 * self.max_rows
        copies = 2 * 2 * self.max_batch
        windows = self.max_batch * (3 + self.max_window_pages) if self.max_window_pages else 0
        replays = self.max_batch * (4 + _LONGEST_HISTORY)
        return _HEADER + begins + pages + chunks + self.max_batch + copies + windows + replays


class SlotSampling(msgspec.Struct, frozen=True):
    """Sampling settings of a request, as rank 0 keeps them for its slot. See `SamplingParams` for their meaning.

    Other ranks have a stand-in: settings of the same `kind`, which need the same work in a step.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    """64 bits; the random number of a token depends on this and on its position alone."""
    logprobs: int
    """-1: none; 0: the chosen token's; n: and the n most likely."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    """Tokens that must not be chosen for positions before `banned_until`."""
    banned_until: int = 0
    width: int = 1
    """Rows that a decode step may have: one, and guesses of the tokens after it."""
    end: int = 0
    """Tokens of prompt and longest answer together: guesses must not go beyond."""
    prompt: tuple[int, ...] = ()
    """Tokens before the answer, and `answer`, those of it so far: given only where penalties or guesses need them."""
    answer: tuple[int, ...] = ()
    grammar: GrammarLine | None = None
    keep_going: bool = False
    """An end-of-sequence token must not be chosen while the grammar allows another one."""

    @property
    def has_rules(self) -> bool:
        """Whether something changes logits before a token is chosen."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(penalties or self.logit_bias or self.banned or self.grammar)

    @property
    def kind(self) -> int:
        """What a step must do for these settings, as one word: see `stand_in`."""
        draws = self.temperature >= MIN_TEMPERATURE
        filters = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        flags = (draws, filters, self.has_rules, self.grammar is not None)
        return sum(flag << bit for bit, flag in enumerate(flags)) | (self.logprobs + 1) << len(flags)


def stand_in(kind: int) -> SlotSampling:
    """Settings of a kind, for a rank that does not choose: only their kind means something."""
    return SlotSampling(
        temperature=float(kind & 1),
        top_k=kind >> 1 & 1,
        top_p=1.0,
        seed=0,
        logprobs=(kind >> 4) - 1,
        banned=(0,) if kind & 4 else (),
        grammar=_ELSEWHERE if kind & 8 else None,
    )


class _Elsewhere:
    """Takes the place of a grammar's process, which rank 0 alone talks to."""


_ELSEWHERE = GrammarLine(_Elsewhere(), (), ())  # type: ignore[arg-type]
GREEDY = SlotSampling(0.0, 0, 1.0, 0, -1)
_NO_ITEMS = ItemRows(0, 0, [])


class PrefillChunk(msgspec.Struct):
    """Prompt tokens of one request to compute in a step; `sample` when they reach the end of the prompt.

    With `targets`, as many as `tokens`, the log-probability of each is wanted at its row (-1: none there), and
    `logprobs` of the most likely tokens beside it. With `read_rows`, counted from the chunk's first, log-probabilities
    of `labels` (a list for each) are wanted there.
    """

    slot: int
    start: int
    tokens: list[int]
    sample: bool
    targets: list[int] = []
    logprobs: int = 0
    read_rows: list[int] = []
    labels: list[list[int]] = []
    items: ItemRows | None = None
    """Rows at the chunk's end that are items; None: every row sees all tokens before it."""


class Replay(msgspec.Struct):
    """A request begins on a cached prefix without state: tokens from `start` on run again to rebuild it, and what pages
    hold before `write_from` stays as it is. `before`: tokens before `start`, the newest last, at most 8."""

    slot: int
    start: int
    write_from: int
    before: list[int]


class StepPlan(msgspec.Struct):
    """What one step does. Rows are the chunks' tokens in order, then those of each decode slot.

    A decode row's token and position are the slot's own state: the token sampled last and the tokens computed so far.
    Where a slot's `width` allows, rows for guessed tokens follow it; how many tokens come out, the result tells.
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
    restores: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(state row, slot): copies of per-request state to make before the step."""
    saves: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """(slot, state row): copies to make after it, of slots whose sequence has grown past the end of a page."""
    windows: list[tuple[int, int, list[int]]] = msgspec.field(default_factory=list)
    """As `pages`, for the tables of window pages; entries that the window has passed are never taken back."""
    replays: list[Replay] = msgspec.field(default_factory=list)
    """Among the slots that begin, those that rebuild their state."""

    @property
    def rows(self) -> int:
        """Query tokens of the step."""
        return sum(len(chunk.tokens) for chunk in self.chunks) + len(self.decodes)


def encode_plan(plan: StepPlan, record: np.ndarray, previous_decodes: list[int] | None) -> None:
    """Write what ranks other than 0 need of `plan` into `record` (int32 words of one `PlanLimits`).

    Rank 0 samples and scores for all, so sampling settings but their kind, targets and labels stay with it.
    `previous_decodes` are the decode slots of the plan written before: when they are the same they are not repeated.
    """
    same = previous_decodes == plan.decodes
    words = [word for slot, sampling in plan.begins for word in (slot, sampling.kind)]
    for slot, first, pages in plan.pages + plan.windows if plan.windows else plan.pages:
        words += (slot, first, len(pages))
        words += pages
    for chunk in plan.chunks:
        wants = (_SAMPLES if chunk.sample else 0) | (_SCORES if chunk.targets else 0)
        items = chunk.items or _NO_ITEMS
        words += (chunk.slot, chunk.start, wants, items.query, items.done)
        words += (len(chunk.tokens), len(chunk.read_rows), len(items.lengths))
        words += chunk.tokens
        words += chunk.read_rows
        words += items.lengths
    if not same:
        words += plan.decodes
    for source, target in plan.restores + plan.saves if plan.restores or plan.saves else ():
        words += (source, target)
    for replay in plan.replays:
        words += (replay.slot, replay.start, replay.write_from, len(replay.before))
        words += replay.before
    if words:
        record[_HEADER : _HEADER + len(words)] = words
    record[:_HEADER] = (
        plan.step,
        len(plan.begins),
        len(plan.pages),
        len(plan.chunks),
        len(plan.decodes),
        same,
        plan.general,
        len(plan.restores) << 16 | len(plan.saves),
        len(plan.windows),
        len(plan.replays),
    )


def decode_plan(record: np.ndarray, previous_decodes: list[int] | None) -> StepPlan:
    """Read what `encode_plan` wrote; `previous_decodes` as there. Settings are stand-ins, targets are -1."""
    header = record[:_HEADER].tolist()
    step, begin_count, page_count, chunk_count, decode_count, same, general, copies = header[:8]
    window_count, replay_count = header[8:]
    position = _HEADER
    begins = []
    for _ in range(begin_count):
        slot, kind = record[position : position + 2].tolist()
        begins.append((slot, stand_in(kind)))
        position += 2
    pages = []
    for _ in range(page_count + window_count):
        slot, first, count = record[position : position + 3].tolist()
        pages.append((slot, first, record[position + 3 : position + 3 + count].tolist()))
        position += 3 + count
    chunks = []
    for _ in range(chunk_count):
        slot, start, wants, query, done, *counts = record[position : position + _CHUNK_WORDS].tolist()
        position += _CHUNK_WORDS
        tokens, read_rows, lengths = (part.tolist() for part in np.split(record[position:], np.cumsum(counts))[:3])
        position += sum(counts)
        targets = [-1] * len(tokens) if wants & _SCORES else []
        items = ItemRows(query, done, lengths) if lengths else None
        chunks.append(
            PrefillChunk(slot, start, tokens, bool(wants & _SAMPLES), targets, read_rows=read_rows, items=items)
        )
    if same:
        assert previous_decodes is not None
        decodes = previous_decodes
    else:
        decodes = record[position : position + decode_count].tolist()
        position += decode_count
    restore_count, save_count = copies >> 16, copies & 0xFFFF
    pairs = [tuple(pair) for pair in record[position:][: 2 * (restore_count + save_count)].reshape(-1, 2).tolist()]
    restores, saves = pairs[:restore_count], pairs[restore_count:]
    position += 2 * len(pairs)
    replays = []
    for _ in range(replay_count):
        slot, start, write_from, count = record[position : position + 4].tolist()
        replays.append(Replay(slot, start, write_from, record[position + 4 : position + 4 + count].tolist()))
        position += 4 + count
    windows, pages = pages[page_count:], pages[:page_count]
    return StepPlan(step, begins, pages, chunks, decodes, bool(general), restores, saves, windows, replays)
