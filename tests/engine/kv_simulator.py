"""A device without arithmetic: it keeps, for every KV slot, a digest of the tokens that led there.

Every row checks all tokens it would attend to, so a page freed too early, a wrong page table or a bad prefix hit shows
at once; and the token it samples depends on all tokens before, so an answer equals its solo run only if every step was
right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lowlat.cache.pages import Owner
from lowlat.cache.prefix import PrefixCache
from lowlat.cache.windows import WindowPages, most_pages
from lowlat.engine.batch import GREEDY, PlanLimits, PrefillChunk, StepPlan
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import StepResult
from lowlat.engine.request import GenerateRequest, SamplingParams, TokenLogprobs
from lowlat.engine.scheduler import Scheduler

REQUEST_FIELDS = {"priority", "cache_salt", "session_id", "session_ttl"}
VOCABULARY = 50
EOS = 3


def digest_of(tokens: list[int]) -> int:
    value = 0
    for token in tokens:
        value = hash((value, token))
    return value


def next_token(digest: int) -> int:
    return digest % VOCABULARY


def label_score(digest: int, label: int) -> float:
    return float(hash((digest, label)) % 1_000_003)


def solo_scores(request: GenerateRequest) -> list[list[float]]:
    """What a scoring request alone would bring, an item at a time behind the query."""
    task = request.score
    assert task is not None
    query = len(request.prompt_ids) - sum(task.items)
    digests, begin = [digest_of(request.prompt_ids[: row + 1]) for row in range(query)], query
    for length in task.items:
        for end in range(begin, begin + length):
            digests.append(digest_of(request.prompt_ids[:query] + request.prompt_ids[begin : end + 1]))
        begin += length
    labels = task.labels * len(task.rows) if len(task.labels) == 1 else task.labels
    return [[label_score(digests[row], label) for label in ids] for row, ids in zip(task.rows, labels, strict=True)]


def hidden_from(chunk: PrefillChunk) -> list[range]:
    """For each row of a chunk, the places before it that it does not see: items other than its own."""
    if chunk.items is None:
        return [range(0)] * len(chunk.tokens)
    plain = len(chunk.tokens) - sum(chunk.items.lengths)
    hidden, begin = [range(0)] * plain, chunk.start + plain
    for number, length in enumerate(chunk.items.lengths):
        first = begin - chunk.items.done if number == 0 else begin
        hidden += [range(chunk.items.query, first)] * length
        begin += length
    return hidden


def solo_answer(request: GenerateRequest) -> list[int]:
    """What a request alone would answer."""
    tokens, answer = list(request.prompt_ids), []
    stops = set(request.sampling.stop_token_ids) | (set() if request.sampling.ignore_eos else {EOS})
    while len(answer) < request.sampling.max_tokens:
        answer.append(next_token(digest_of(tokens)))
        tokens.append(answer[-1])
        if answer[-1] in stops:
            break
    return answer


class KVSimulator:
    """An executor that runs a step when it is launched and gives its result when it is collected."""

    def __init__(self, cache: PrefixCache, limits: PlanLimits, window: int = 0) -> None:
        """`window`: tokens that a row of a layer with a window sees, its own included; 0: there are no such layers."""
        self.cache = cache
        self.window = window
        self.window_kv: dict[int, tuple[int, int]] = {}
        """Slot of a window page -> (position, digest of the tokens up to it)."""
        self.window_tables: list[dict[int, int]] = [{} for _ in range(limits.max_batch)]
        self.size = cache.page_size
        self.kv: dict[int, tuple[int, int]] = {}
        """KV slot -> (token, digest of the tokens up to it)."""
        self.tables = [[-1] * limits.max_pages for _ in range(limits.max_batch)]
        self.lengths = [0] * limits.max_batch
        self.sampling = [GREEDY] * limits.max_batch
        self.guessed = self.accepted = 0
        self.tokens = [0] * limits.max_batch
        self.results: deque[tuple[StepResult, set[int]]] = deque()
        self.rows = 0
        self.most_chunks = 0

    def slot_of(self, slot: int, position: int) -> int:
        page = self.tables[slot][position // self.size]
        assert page >= 0, "a row reads a page that its table does not have"
        return page * self.size + position % self.size

    def compute(self, slot: int, position: int, token: int, hidden: range = range(0)) -> int:
        """One row: check everything it attends to (all before it but `hidden`), write its own entry; the digest."""
        digest = 0
        for earlier in (*range(min(position, hidden.start)), *range(hidden.stop, position)):
            seen, seen_digest = self.kv[self.slot_of(slot, earlier)]
            digest = hash((digest, seen))
            assert seen_digest == digest, f"position {earlier} holds another prefix"
        digest = hash((digest, token))
        place = self.slot_of(slot, position)
        if place in self.kv and self.cache.pool.owner(place // self.size) == Owner.CACHED:
            raise AssertionError("a row writes a cached page")
        self.kv[place] = (token, digest)
        self.rows += 1
        if self.window:
            self.look_back(slot, position, digest, hidden)
        return digest

    def look_back(self, slot: int, position: int, digest: int, hidden: range) -> None:
        """Write the row's entry to its window page, and check that every token it sees through the window is there."""
        table, size = self.window_tables[slot], self.size
        self.window_kv[table[position // size] * size + position % size] = (position, digest)
        before = [*range(min(position, hidden.start)), *range(hidden.stop, position)]
        for seen in [*before, position][-self.window :]:
            entry = (seen, self.kv[self.slot_of(slot, seen)][1])
            assert self.window_kv[table[seen // size] * size + seen % size] == entry, "a window holds another token"

    def launch(self, plan: StepPlan) -> None:
        for slot, sampling in plan.begins:
            self.tables[slot] = [-1] * len(self.tables[slot])
            self.window_tables[slot] = {}
            self.sampling[slot] = sampling
        for slot, first, pages in plan.pages:
            self.tables[slot][first : first + len(pages)] = pages
        for slot, first, pages in plan.windows:
            self.window_tables[slot].update(enumerate(pages, start=first))
        sampled: list[tuple[int, int]] = []
        scores = [
            [TokenLogprobs(float(token), 1, [], []) for token in chunk.targets if token >= 0]
            for chunk in plan.chunks
            if chunk.targets
        ]
        labels: list[list[list[float]]] = []
        written: set[int] = set()
        for chunk in plan.chunks:
            digests = []
            hidden = hidden_from(chunk)
            for offset, token in enumerate(chunk.tokens):
                digest = self.compute(chunk.slot, chunk.start + offset, token, hidden[offset])
                digests.append(digest)
                written.add(self.slot_of(chunk.slot, chunk.start + offset) // self.size)
            if chunk.read_rows:
                assert len(chunk.labels) == len(chunk.read_rows)
                reads = zip(chunk.read_rows, chunk.labels, strict=True)
                labels.append([[label_score(digests[row], label) for label in ids] for row, ids in reads])
            self.lengths[chunk.slot] = chunk.start + len(chunk.tokens)
            if chunk.sample:
                sampled.append((chunk.slot, next_token(digest)))
        counts = [1] * len(sampled)
        for slot in plan.decodes:
            burst = self.decode(slot, written)
            counts.append(len(burst))
            sampled.extend((slot, token) for token in burst)
        for slot, token in sampled:
            self.tokens[slot] = token
        self.most_chunks = max(self.most_chunks, len(plan.chunks))
        result = StepResult(plan.step, [token for _, token in sampled], None, scores, counts, label_logprobs=labels)
        self.results.append((result, written))

    def decode(self, slot: int, written: set[int]) -> list[int]:
        """One row and, where the slot may have more, rows of guesses, of which the first `right` are right."""
        start, setting = self.lengths[slot], self.sampling[slot]
        rows = min(setting.width, setting.end - start)
        right = hash((start, slot, self.rows)) % rows
        token, burst = self.tokens[slot], []
        for row in range(rows):
            digest = self.compute(slot, start + row, token)
            written.add(self.slot_of(slot, start + row) // self.size)
            token = next_token(digest)
            if row <= right:
                burst.append(token)
            if row >= right:
                token = (token + 1) % VOCABULARY  # a wrong guess: its entry must never be read by a later step
        self.guessed += rows - 1
        self.accepted += right
        self.lengths[slot] = min(start + len(burst), setting.end - 1)
        return burst

    def collect(self, timeout: float | None) -> StepResult | None:
        return self.results.popleft()[0] if self.results else None

    def close(self) -> None:
        pass

    def check(self) -> None:
        """No step in flight writes a page that is free, or that another step in flight writes for someone else."""
        for _, written in self.results:
            for page in written:
                assert self.cache.pool.owner(page) != Owner.FREE, f"page {page} is free while a step may write it"


def make_core(
    *,
    pages: int = 40,
    page_size: int = 4,
    max_batch: int = 4,
    chunk_tokens: int = 8,
    run_ahead: int = 1,
    max_context: int = 64,
    prefix_cache: bool = True,
    width: int = 1,
    window: int = 0,
    window_pages: int | None = None,
    session_budget: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[EngineCore, KVSimulator]:
    """`window_pages` None: as many as all requests can need at a time, and half of that for prefixes."""
    limits = PlanLimits(
        max_batch=max_batch, max_rows=chunk_tokens + max_batch, max_pages=min(-(-max_context // page_size), pages)
    )
    windows = None
    if window:
        span = max(chunk_tokens, (run_ahead + 1) * width)
        needed = max_batch * most_pages(page_size, window, span)
        windows = WindowPages(window_pages or needed * 3 // 2, page_size, window, span)
    cache = PrefixCache(
        pages, page_size, enabled=prefix_cache, windows=windows, session_budget=session_budget, clock=clock
    )
    scheduler = Scheduler(cache, limits, eos_ids=frozenset([EOS]), chunk_tokens=chunk_tokens, seed=0, width=width)
    device = KVSimulator(cache, limits, window)
    return EngineCore(scheduler, device, run_ahead=run_ahead), device


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> GenerateRequest:
    request = {key: fields.pop(key) for key in REQUEST_FIELDS & fields.keys()}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **fields)  # type: ignore[arg-type]
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling, **request)  # type: ignore[arg-type]


def drain(
    core: EngineCore, device: KVSimulator, scores: dict[str, list[list[float]]] | None = None
) -> dict[str, list[int]]:
    """Turn until there is no work, checking the books after each turn; returns the answers, and fills `scores`."""
    answers: dict[str, list[int]] = {}
    for _ in range(10_000):
        if not core.has_work:
            return answers
        for output in core.turn():
            answers.setdefault(output.id, []).extend(output.token_ids)
            if scores is not None and output.scores:
                scores.setdefault(output.id, []).extend(output.scores)
        core.scheduler.check()
        device.check()
    raise AssertionError("the engine does not come to rest")
