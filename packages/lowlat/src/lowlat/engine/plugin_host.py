"""The engine's side of the plugin contract: what kernel libraries may ask of it, and when they are asked.

Legend of shape suffixes: R rows, Q requests, P pages a request, V vocabulary.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import lowlat_plugin
from lowlat.cache.layout import KVPool
from lowlat.engine.config import EngineConfig
from lowlat.engine.plugin_facts import engine_facts
from lowlat.layers.step import Segment, StepInputs
from lowlat.models.base import Model
from lowlat.models.decoder import Decoder, Taps
from lowlat.parallel.group import Communicator
from lowlat.parallel.shard import Shard
from lowlat.platform import Platform
from lowlat_plugin import LowLatency, Policy, Refused, State

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


class KernelsRefusedError(Exception):
    """Kernels were required and cannot run; the text lists every reason."""


class Ranks:
    """The contract's all-gather over the default process group, as tensors of bytes."""

    def __init__(self, shard: Shard) -> None:
        self.rank, self.size = shard.rank, shard.size

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        if self.size == 1:
            return [payload]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]))
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [bytes(part[: int(length)].numpy()) for part, length in zip(parts, lengths, strict=True)]


class CheckpointWeights:
    """The model's weights by their Hugging Face names, as float32 or as stored, on the host.

    With several ranks they are whole; a library cuts its part itself (`BuildContext.rank` and `world_size`).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def get(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name)


class PluginHost:
    """Implements `lowlat_plugin.Host` over this engine's model and KV pool; both are set once they exist."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        platform: Platform,
        communicator: Communicator,
        dtype: str,
    ) -> None:
        self.facts = engine_facts(config, checkpoint, platform, dtype)
        self.agreement = Ranks(communicator.shard)
        self.device = str(platform.device)
        self.vocab_size = int(checkpoint.config.get("vocab_size", 0))
        self.model: Model | None = None
        self.width = 1
        """Rows that a request may have in a step."""
        self.taps: tuple[int, ...] = ()
        """Layers after which a draft wants to see the states."""
        self._config = config
        self._checkpoint = checkpoint
        self._kv: KVPool | None = None
        self._binding: lowlat_plugin.Binding | None = None

    def use_pool(self, kv: KVPool) -> None:
        """The pool that steps read and write from now on; `LowLatency.bind` must follow."""
        generation = self._binding.generation + 1 if self._binding else 1
        self._kv = kv
        layers = tuple(lowlat_plugin.LayerKV(k, v) for k, v in zip(kv.keys, kv.values, strict=True))
        self._binding = lowlat_plugin.Binding(generation, self._layout(self._pool.layout.slots), layers)

    def context(self, spec: lowlat_plugin.KernelSpec, workspace: lowlat_plugin.Workspace) -> lowlat_plugin.BuildContext:
        limits = spec.limits(self.facts.isa)
        source = self._checkpoint.source
        return lowlat_plugin.BuildContext(
            facts=self.facts,
            limits_widths=limits.widths if limits else frozenset(),
            layout=self._layout(0),
            device=self.device,
            rank=self.agreement.rank,
            world_size=self.agreement.size,
            deadline_s=lowlat_plugin.deadline_for(self.facts.watchdog_s),
            weights=CheckpointWeights(self._checkpoint),
            workspace=workspace,
            checkpoint=Path(source.path),
            max_requests=self._config.max_batch,
            tokens_per_request=self.width,
            taps=self.taps,
            model=self.model,
        )

    def binding(self) -> lowlat_plugin.Binding:
        assert self._binding is not None, "bind comes after use_pool"
        return self._binding

    def general(
        self, step: lowlat_plugin.StepInputs, forced: Mapping[str, torch.Tensor] | None = None
    ) -> lowlat_plugin.StepOutputs:
        """The model's own forward, one request after another in the order of their rows."""
        assert self.model is not None, "shadow checks come after the model is built"
        size = self._pool.layout.page_size
        starts, lengths = step.query_start_Q1.tolist(), step.lengths_Q.tolist()
        segments = []
        for request, length in enumerate(lengths):
            positions = torch.arange(length)
            slots_L = step.page_table_QP[request].cpu().long()[positions // size] * size + positions % size
            rows = starts[request + 1] - starts[request]
            segments.append(Segment(starts[request], rows, length, slots_L.to(self.device), -1))
        rows = len(step.token_ids_R)
        sample_rows = torch.arange(rows, device=self.device)
        inputs = StepInputs(step.token_ids_R, step.positions_R, step.write_slots_R, rows, segments, [], sample_rows)
        if not self.taps:
            return lowlat_plugin.StepOutputs(self.model.forward(inputs, self._pool))
        assert isinstance(self.model, Decoder), "only decoders are tapped"
        seen: list[torch.Tensor] = []
        before = self.model.taps
        self.model.taps = Taps(self.taps, lambda features_RX, step: seen.append(features_RX))
        try:
            logits_RV = self.model.forward(inputs, self._pool)
        finally:
            self.model.taps = before
        return lowlat_plugin.StepOutputs(logits_RV, state={"features": seen[0]})

    def scratch_pages(self) -> Sequence[int]:
        """All of the pool: kernels are proven before the first request is taken."""
        return range(self._pool.layout.pages)

    def memory_bytes(self) -> int | None:
        if self.device.startswith("cuda"):
            return torch.cuda.memory_allocated(self.device)
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        except OSError:
            return None

    def synchronize(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    @property
    def _pool(self) -> KVPool:
        assert self._kv is not None, "the pool is not made yet"
        return self._kv

    def _layout(self, slots: int) -> lowlat_plugin.KVLayout:
        assert self.model is not None, "the layout comes from the model"
        layout = self.model.kv_layout(1, self._config.page_size)
        return lowlat_plugin.KVLayout(
            layout.kv_heads,
            layout.head_dim,
            layout.page_size,
            layout.dtype,
            layout.slot_stride,
            layout.head_stride,
            slots,
        )


class LowLatencyMode:
    """The stages at which the engine's start passes kernels by. Each raises `KernelsRefusedError` where required."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        platform: Platform,
        communicator: Communicator,
        dtype: str,
    ) -> None:
        """Before the weights: find the libraries, and choose the first that fits."""
        policy = Policy(config.low_latency)
        self.host = PluginHost(config, checkpoint, platform, communicator, dtype)
        registry = lowlat_plugin.Registry() if policy is Policy.OFF else lowlat_plugin.discover()
        self.low = LowLatency(self.host, registry, policy, config.kernels)
        self._stage(self.low.choose)

    def model_built(self, model: Model, width: int = 1, taps: tuple[int, ...] = ()) -> None:
        """After the weights and before the KV pool is sized: kernels take all memory they will ever have. `width`: rows
        that a request may have in a step. `taps`: layers after which a draft wants to see the states."""
        self.host.model = model
        self.host.width = width
        self.host.taps = tuple(sorted(taps))
        self._stage(self.low.build)

    def pool_made(self, kv: KVPool) -> None:
        """Hand over the addresses of a new pool."""
        self.host.use_pool(kv)
        self._stage(self.low.bind)

    def prove(self) -> None:
        """Measure the kernels against the general path, while nobody owns a page."""
        self._stage(self.low.prove)

    @property
    def waiting_for_pool(self) -> bool:
        """Whether there are kernels that `pool_made` will bind."""
        return self.low.state is State.BUILT

    @property
    def built(self) -> bool:
        """Whether there are kernels to prove."""
        return self.low.state is State.BOUND

    @property
    def active(self) -> str | None:
        """Distribution and name of the kernels in use."""
        running = self.low.state is State.ACTIVE and self.low.candidate is not None
        return self.low.candidate.key if running and self.low.candidate else None

    @staticmethod
    def _stage(stage: Callable[[], None]) -> None:
        try:
            stage()
        except Refused as refusal:
            raise KernelsRefusedError(str(refusal)) from refusal
