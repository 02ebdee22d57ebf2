"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from lowlat.cache.groups import CacheGroup
from lowlat.cache.layout import KVLayout, KVPool
from lowlat.layers.step import StepInputs
from lowlat.models.config import DecoderConfig
from lowlat.parallel.group import Communicator
from lowlat.platform import Platform

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

LoadProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class BuildContext(msgspec.Struct, frozen=True):
    """Where and how a model is built."""

    platform: Platform
    communicator: Communicator
    dtype: torch.dtype
    max_context: int


class Model(Protocol):
    """A causal language model on one rank."""

    config: DecoderConfig

    def cache_groups(self) -> list[CacheGroup]:
        """What this rank keeps for each token."""

    def kv_layout(self, pages: int, page_size: int) -> KVLayout:
        """Layout of this rank's keys and values."""

    def forward(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        """Compute a step: writes keys and values of its rows, returns float32 logits [samples, vocabulary]."""


ModelFactory = Callable[["Checkpoint", BuildContext, LoadProgress], Model]
