"""The whole engine but the processes, on the runner of GPUs, beside the same engine on the runner of CPUs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from family_kit import make_cache, most_pages, random_tokens, window_of

from lowlat.cache.layout import KVPool
from lowlat.cache.prefix import PrefixCache
from lowlat.cache.windows import WindowPages
from lowlat.engine.batch import PlanLimits, PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.core import EngineCore
from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.executor import Executor, ThreadExecutor
from lowlat.engine.graphs import Body, EagerBodies, StepBodies
from lowlat.engine.request import GenerateRequest, RequestOutput, SamplingParams
from lowlat.engine.runner import ModelRunner
from lowlat.engine.scheduler import Scheduler
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.device_step import DeviceOps
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.parallel.group import SingleRank

CPU = torch.device("cpu")


class EngineSize:
    """A small engine: few pages, so that requests preempt each other."""

    def __init__(self, *, pages: int = 60, page_size: int = 2, chunk_tokens: int = 16, max_batch: int = 4) -> None:
        self.pages, self.page_size, self.chunk_tokens, self.max_batch = pages, page_size, chunk_tokens, max_batch


def make_runner(
    model: Any,
    size: EngineSize,
    ops: DeviceOps | None,
    *,
    bodies: StepBodies | None = None,
    device: torch.device = CPU,
) -> tuple[Scheduler, ModelRunner | DeviceRunner]:
    """`ops` None: the runner of CPUs."""
    window, _ = window_of(model.cache_groups())
    each = most_pages(size.page_size, window, size.chunk_tokens) if window else 0
    window_pages = each * size.max_batch
    limits = PlanLimits(
        max_batch=size.max_batch,
        max_rows=size.chunk_tokens + size.max_batch,
        max_pages=size.pages,
        max_window_pages=each,
    )
    kv = make_cache(model, size.pages, size.page_size, 0, device, window_pages=window_pages)
    assert isinstance(kv, KVPool)
    for layer, tensor in enumerate([*kv.keys, *kv.values]):
        # Whatever was never written must not matter, but for the padding page, which is written all the time.
        tensor[: kv.layout.pages_of(layer % kv.layout.layers) * size.page_size] = float("nan")
    windows = WindowPages(window_pages, size.page_size, window, size.chunk_tokens) if window else None
    cache = PrefixCache(size.pages, size.page_size, windows=windows)
    scheduler = Scheduler(cache, limits, eos_ids=frozenset(), chunk_tokens=size.chunk_tokens, seed=0)
    host = ModelRunner(model, kv, limits, SingleRank(), min_rows=4, window=window)
    if ops is None:
        return scheduler, host
    return scheduler, DeviceRunner(DeviceDecoder(model, ops), host, limits, bodies or EagerBodies())


def begin(runner: ModelRunner | DeviceRunner, settings: list[SlotSampling]) -> None:
    """Run a prompt of ten and more tokens for each of `settings`, and sample once. Every slot has twelve pages, and as
    many window pages where layers have a window: in tests that never tell, all would write to the padding page."""
    for slot, setting in enumerate(settings):
        pages = list(range(slot * 12, slot * 12 + 12))[::-1]
        windows = [(slot, 0, pages)] if runner.kv.layout.window_layers else []
        chunk = PrefillChunk(slot, 0, random_tokens(10 + slot, slot), True)
        runner.run(StepPlan(slot, [(slot, setting)], [(slot, 0, pages)], [chunk], [], windows=windows))


class RehearsedBodies(EagerBodies):
    """Runs bodies as they are, but first, as graphs are made, a few times on padding."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def knows(self, key: Hashable) -> bool:
        return key in self._known

    def prepare(self, key: Hashable, body: Body) -> None:
        body()
        body()
        self._known.add(key)


def make_engine(model: Any, size: EngineSize, run_ahead: int, *, ops: DeviceOps | None, **options: Any) -> EngineCore:
    scheduler, runner = make_runner(model, size, ops, **options)
    executor: Executor
    if isinstance(runner, DeviceRunner):
        executor = DeviceExecutor(runner)
    else:
        executor = ThreadExecutor(runner.run, lambda: torch.set_num_threads(1))
    return EngineCore(scheduler, executor, run_ahead=run_ahead)


class Answer:
    """All that an engine said of a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] = []
        self.cached = 0
        self.finish: Any = None

    def add(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.cached = max(self.cached, output.cached_tokens)
        self.finish = output.finish_reason


def answer(core: EngineCore, rounds: list[list[tuple[list[int], SamplingParams]]]) -> list[Answer]:
    """Answers of requests, which come in rounds: the next one when the one before has three answers' tokens."""
    answers: list[Answer] = []
    for requests in rounds:
        for prompt, sampling in requests:
            core.submit(GenerateRequest(id=str(len(answers)), prompt_ids=prompt, sampling=sampling))
            answers.append(Answer())
        wanted = sum(len(one.tokens) for one in answers) + (0 if requests is rounds[-1] else 3)
        while core.has_work and (requests is rounds[-1] or sum(len(one.tokens) for one in answers) < wanted):
            for output in core.turn():
                answers[int(output.id)].add(output)
            core.scheduler.check()
    core.close()
    return answers


def reference_ops() -> DeviceOps:
    return ReferenceOps()
