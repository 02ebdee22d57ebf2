"""From a configuration to a running engine: checkpoint, model, KV pool, ranks, a first step."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator

import msgspec
import torch

from lowlat.cache.groups import CacheGroup, pages_for, state_bytes, whole
from lowlat.cache.layout import KVPool, torch_dtype
from lowlat.cache.prefix import PrefixCache
from lowlat.cache.rules import PrefillRules
from lowlat.cache.snapshots import Snapshots
from lowlat.cache.windows import WindowPages
from lowlat.engine.batch import GREEDY, PlanLimits, PrefillChunk, StepPlan
from lowlat.engine.config import EngineConfig
from lowlat.engine.config_checks import check_guesses, check_numbers, context_of, rules_of
from lowlat.engine.core import EngineCore
from lowlat.engine.device_build import device_runner, prepare, use_kernels
from lowlat.engine.device_executor import DeviceExecutor
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.drafts import Draft, open_draft
from lowlat.engine.executor import Executor, ThreadExecutor
from lowlat.engine.grammar_gate import GrammarGate
from lowlat.engine.plugin_host import KernelsRefusedError, LowLatencyMode
from lowlat.engine.plugin_steps import KernelSteps
from lowlat.engine.pool_sizes import PoolSizes, pool_sizes
from lowlat.engine.ranks import RankGroup, TensorParallelExecutor
from lowlat.engine.runner import ModelRunner
from lowlat.engine.scheduler import Scheduler
from lowlat.engine.setup_error import SetupError as SetupError
from lowlat.engine.speculation_setup import make_device_speculation, make_speculation, spec_width
from lowlat.grammars.pool import GrammarLimits, GrammarPool
from lowlat.models.base import BuildContext, Model, make_cache
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import Checkpoint, open_checkpoint
from lowlat.models.loading.errors import CheckpointError
from lowlat.models.registry import build_model
from lowlat.parallel.group import Communicator, SingleRank
from lowlat.platform import Platform, select

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what), bytes; total 0: unknown."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What was chosen where the configuration left it open."""

    model: str
    dtype: str
    device: str
    vocab_size: int
    max_context: int
    page_size: int
    kv_tokens: int
    eos_ids: tuple[int, ...]
    kernels: str | None
    item_tokens: int
    """Most tokens of an item beside others in one sequence; 0: the model has no such sequences."""


class RankParts(msgspec.Struct):
    """What one rank has."""

    runner: ModelRunner | DeviceRunner
    kernels: LowLatencyMode
    limits: PlanLimits
    facts: EngineFacts
    platform: Platform
    threads: int
    snapshots: Snapshots | None
    windows: WindowPages | None
    width: int
    rules: PrefillRules
    chunk_tokens: int
    """Most prompt tokens of a step: the configuration's, or fewer where those would hold up running requests."""


def build_engine(config: EngineConfig, progress: Progress) -> tuple[EngineCore, EngineFacts, Checkpoint]:
    """Build everything on rank 0 (and start the other ranks); a step has run when this returns.

    Raises:
        SetupError, CheckpointError, UnsupportedModelError: the configuration or the model cannot be used.
    """
    check_numbers(config)
    check_guesses(config)
    # The last rank's, so that too few GPUs are noticed here; and ranks must not each find out what `auto` means.
    device = _platform(config, config.tensor_parallel - 1).device.type
    config = msgspec.structs.replace(config, device=device)
    checkpoint = open_checkpoint(config.model, progress=progress)
    group = RankGroup.start(config) if config.tensor_parallel > 1 else None
    try:
        communicator: Communicator = group.join() if group else SingleRank()
        parts = build_rank(config, checkpoint, communicator, progress)
        scheduler = make_scheduler(config, parts)
        executor: Executor = make_executor(parts)
        if group is not None:
            executor = TensorParallelExecutor(executor, group, parts.limits)
    except BaseException as error:
        failure = None
        if group is not None:
            own = isinstance(error, SetupError | CheckpointError | UnsupportedModelError)
            failure = None if own else group.failure(grace_s=2.0)
            group.close()
        if failure is not None:
            raise SetupError(failure) from error
        raise
    gate = _grammar_gate(config, checkpoint, parts.facts)
    core = EngineCore(scheduler, executor, run_ahead=config.run_ahead, low_latency=parts.kernels.low, grammars=gate)
    return core, parts.facts, checkpoint


def make_scheduler(config: EngineConfig, parts: RankParts) -> Scheduler:
    """The scheduler over a rank's pages."""
    return Scheduler(
        PrefixCache(
            parts.facts.kv_tokens // parts.facts.page_size,
            parts.facts.page_size,
            enabled=config.prefix_cache,
            snapshots=parts.snapshots,
            windows=parts.windows,
            session_budget=config.session_budget,
            replay=parts.rules.replay,
        ),
        parts.limits,
        eos_ids=frozenset(parts.facts.eos_ids),
        chunk_tokens=parts.chunk_tokens,
        seed=secrets.randbits(63) if config.seed is None else config.seed,
        width=parts.width,
        rules=parts.rules,
    )


def make_executor(parts: RankParts) -> Executor:
    """Who runs this rank's steps."""
    if isinstance(parts.runner, DeviceRunner):
        return DeviceExecutor(parts.runner)
    return ThreadExecutor(parts.runner.run, lambda: parts.platform.set_threads(parts.threads))


def _grammar_gate(config: EngineConfig, checkpoint: Checkpoint, facts: EngineFacts) -> GrammarGate | None:
    if config.spec_simulate_acceptance is not None:
        return None
    limits = GrammarLimits(
        config.grammar_seconds, config.grammar_memory_mib, config.grammar_bytes, config.grammar_depth
    )
    return GrammarGate(GrammarPool(checkpoint.tokenizer, facts.vocab_size, limits), facts.eos_ids)


def build_rank(
    config: EngineConfig, checkpoint: Checkpoint, communicator: Communicator, progress: Progress
) -> RankParts:
    """Build the part of the engine that every rank has, and run a first step through it."""
    platform = _platform(config, communicator.shard.rank)
    dtype = platform.default_dtype if config.dtype == "auto" else config.dtype
    threads = config.threads or _threads(config.tensor_parallel)
    platform.set_threads(threads)
    max_context = context_of(config, checkpoint)
    build = BuildContext(
        platform,
        communicator,
        torch_dtype(dtype),
        max_context,
        config.spec == "draft",
        page_size=config.page_size,
        replay_tail=config.replay_tail,
        replay_prefix=config.replay_prefix,
        engram_placement=config.engram_placement,
    )
    with _refusals():
        kernels = LowLatencyMode(config, checkpoint, platform, communicator, dtype)
    model = build_model(checkpoint, build, lambda done, total: progress(done, total, "loading weights"))
    draft = open_draft(config, checkpoint, model, build)
    width = spec_width(config, model, draft)
    with _refusals():
        kernels.model_built(model, width, draft.taps if draft is not None else ())
    rules = rules_of(config, model)
    # Kernels know one page table, so with them layers with a window lie in the pages of the others.
    groups = whole(model.cache_groups()) if kernels.waiting_for_pool else model.cache_groups()
    # A request holds up to three copies of its state (end of prompt, newest, the one before); the rest are prefixes'.
    kept = 4 * config.max_batch if config.prefix_cache and state_bytes(groups) else 0
    states = config.max_batch + kept
    memory = max(0, platform.memory_available() - states * state_bytes(groups))
    sizes = _agreed_sizes(config, groups, memory, communicator, max_context, width, draft)
    pages, page_size = sizes.pages, config.page_size
    limits = PlanLimits(
        max_batch=config.max_batch,
        max_rows=config.chunk_tokens + config.max_batch * width,
        max_pages=min(pages_for(max_context, page_size), pages),
        max_window_pages=sizes.window_pages_each,
    )
    kv = make_cache(model, pages, page_size, states, platform.device, width, sizes.window_pages)
    host = ModelRunner(
        model,
        kv,
        limits,
        communicator,
        min_rows=platform.min_rows,
        has_state=state_bytes(groups) > 0,
        window=sizes.window,
    )
    runner: ModelRunner | DeviceRunner = host
    if platform.keeps_state:
        runner = device_runner(model, host, limits, width=width) or host
        if isinstance(runner, DeviceRunner) and width > 1:
            make_device_speculation(config, runner, width, draft)
    progress(0, 0, "first step")
    _first_step(runner)
    chunk_tokens = config.chunk_tokens
    if isinstance(runner, DeviceRunner):
        progress(0, 0, "capturing steps")
        chunk_tokens = max(rules.last_chunk, prepare(runner, config.chunk_tokens))
    with _refusals():
        _take_over(kernels, runner, progress)
    host.kernel_steps = KernelSteps(kernels.low, page_size, platform.device, lambda: getattr(model, "taps", None))
    if width > 1 and runner is host:
        host.speculation = make_speculation(config, host, communicator, width, draft, progress)
    facts = EngineFacts(
        model=checkpoint.name,
        dtype=dtype,
        device=str(platform.device),
        vocab_size=model.config.vocab_size,
        max_context=min(max_context, pages * page_size),
        page_size=page_size,
        kv_tokens=pages * page_size,
        eos_ids=eos_ids(checkpoint),
        kernels=kernels.active,
        item_tokens=_item_tokens(model, groups, sizes, max_context),
    )
    snapshots = Snapshots(config.max_batch, kept) if kept else None
    return RankParts(
        runner, kernels, limits, facts, platform, threads, snapshots, sizes.windows(), width, rules, chunk_tokens
    )


def _agreed_sizes(
    config: EngineConfig,
    groups: list[CacheGroup],
    memory: int,
    communicator: Communicator,
    max_context: int,
    width: int,
    draft: Draft | None,
) -> PoolSizes:
    """Sizes of the pools within rank 0's `memory` bytes, which all ranks take. Raises `SetupError`."""
    draft_bytes = 0 if draft is None else draft.token_bytes
    sizes = pool_sizes(config, groups, memory, max_context=max_context, width=width, draft_token_bytes=draft_bytes)
    pages, window_pages = communicator.broadcast(torch.tensor([sizes.pages, sizes.window_pages])).tolist()
    if pages * config.page_size < 2:
        raise SetupError(
            f"the KV pool holds {pages} pages of {config.page_size} tokens, too few to serve: "
            f"raise --kv-tokens to {max(2, config.page_size)} or more, or free memory"
        )
    return msgspec.structs.replace(sizes, pages=pages, window_pages=window_pages)


def _take_over(kernels: LowLatencyMode, runner: ModelRunner | DeviceRunner, progress: Progress) -> None:
    """Bind a kernel library that was built to the pools, prove it, and let it have the steps that it covers."""
    if isinstance(runner.kv, KVPool):
        kernels.pool_made(runner.kv)
    if kernels.built:
        progress(0, 0, "checking kernels")
        kernels.prove()
    if kernels.active and isinstance(runner, DeviceRunner):
        progress(0, 0, "capturing kernels")
        use_kernels(runner, kernels.low)


def _platform(config: EngineConfig, rank: int) -> Platform:
    try:
        return select(config.device, rank)
    except ValueError as error:
        raise SetupError(str(error)) from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except KernelsRefusedError as error:
        raise SetupError(str(error)) from error


def eos_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that end an answer: of generation_config.json, else of config.json."""
    for source in (checkpoint.generation_config, checkpoint.config):
        ids = source.get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if ids:
            return tuple(ids)
    return ()


def _item_tokens(model: Model, groups: list[CacheGroup], sizes: PoolSizes, max_context: int) -> int:
    """Most tokens of an item in one sequence with others; 0: the model has no such rows."""
    if state_bytes(groups) or not getattr(model, "sees_items", False):
        return 0
    return sizes.longest_item(max_context)


def _threads(ranks: int) -> int:
    """Threads of each rank: this process's cores but one, which the front and the engine's own loop need."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (cores - 1) // ranks)


def _first_step(runner: ModelRunner | DeviceRunner) -> None:
    """A prefill and a decode step on page 0, so that the first request finds everything warm and working."""
    if runner.kv.layout.page_size * runner.max_pages < 2:
        raise SetupError("a request must be able to hold at least two tokens")
    pages = list(range(pages_for(2, runner.kv.layout.page_size)))
    chunk = PrefillChunk(0, 0, [0], True)
    runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, pages)], [chunk], [], windows=[(0, 0, pages)]))
    runner.run(StepPlan(1, [], [], [], [0]))
