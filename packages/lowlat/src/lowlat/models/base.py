"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import torch

from lowlat.cache.groups import CacheGroup
from lowlat.cache.layout import KVLayout, KVPool
from lowlat.cache.rules import PrefillRules
from lowlat.layers.step import StepInputs
from lowlat.parallel.group import Communicator
from lowlat.platform import Platform
from lowlat.speculative.proposer import DraftRequest, Proposal

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
    draft: bool = False
    """Whether the model's own draft is wanted (`DraftingModel`)."""
    page_size: int = 16
    """Tokens of a page."""
    replay_tail: int = 0
    replay_prefix: int = 0
    """Bounded replay, as `PrefillRules` has it: what the user wants."""
    engram_placement: str = "auto"
    """Where Engram tables lie, for models that have them."""


class ModelConfig(Protocol):
    """What the engine needs to know of a configuration."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""


class CacheLayout(Protocol):
    """What the engine needs to know of a cache's pages."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""


class ModelCache(Protocol):
    """A model's cache: pages, and for models that keep state for a request, its rows. `KVPool` is the plain one."""

    @property
    def layout(self) -> CacheLayout:
        """Its pages."""

    def copy_state(self, source: int, target: int) -> None:
        """Copy one row of per-request state; never called for models without."""


@runtime_checkable
class ReplayingCache(Protocol):
    """A cache of which a request's state can be rebuilt by running its last cached tokens again."""

    def begin_replay(self, state: int, start: int, tokens_before: list[int]) -> None:
        """Prepare state row `state` for rows from position `start` on; see `PrefillRules.replay`."""


class Model(Protocol):
    """A causal language model on one rank."""

    @property
    def config(self) -> ModelConfig:
        """Its configuration."""

    def cache_groups(self) -> list[CacheGroup]:
        """What this rank keeps for each token."""

    def kv_layout(self, pages: int, page_size: int) -> KVLayout:
        """Layout of this rank's keys and values."""

    def forward(self, step: StepInputs, kv: Any) -> torch.Tensor:
        """Compute a step: writes keys and values of its rows, returns float32 logits [samples, vocabulary].

        `kv` is what `make_cache` gave: a `KVPool`, or the model's own.
        """


@runtime_checkable
class DraftingModel(Protocol):
    """A model with a draft of its own, which its forward feeds."""

    draft_block: int
    """Tokens that one pass proposes; 0: there is no draft."""

    def propose(self, requests: list[DraftRequest], kv: Any) -> list[Proposal]:
        """Guesses of the tokens after each request's newest one."""


def prefill_rules(model: Model) -> PrefillRules:
    """What the model asks of prefills (its `prefill_rules`); nothing where it does not say."""
    rules: PrefillRules = getattr(model, "prefill_rules", PrefillRules())
    return rules


def make_cache(
    model: Model,
    pages: int,
    page_size: int,
    states: int,
    device: torch.device,
    width: int = 1,
    window_pages: int = 0,
) -> ModelCache:
    """The model's own cache (its `make_cache(pages, page_size, states, width)`) where it has one, else keys and values.

    `width`: most rows of a request in a decode step, which rings of state must have room for. `window_pages`: pages
    for layers with a window; 0: they have none of their own.
    """
    own = getattr(model, "make_cache", None)
    if own is not None:
        cache: ModelCache = own(pages, page_size, states, width)
        return cache
    layout = msgspec.structs.replace(model.kv_layout(pages, page_size), window_pages=window_pages)
    return KVPool(layout, device)


ModelFactory = Callable[["Checkpoint", BuildContext, LoadProgress], Model]
