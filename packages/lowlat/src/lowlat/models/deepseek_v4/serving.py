"""DeepSeek models as the engine sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, get_args

import msgspec
import torch

from lowlat.cache.groups import CacheGroup
from lowlat.cache.layout import KVLayout
from lowlat.cache.rules import PrefillRules
from lowlat.layers.step import Segment, StepInputs
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig, read_deepseek_config
from lowlat.models.deepseek_v4.engram_tables import Placement, WantedPlacement, choose_placement
from lowlat.models.deepseek_v4.model import DeepseekV4, Options
from lowlat.models.deepseek_v4.step import StateSegment
from lowlat.speculative.proposer import DraftRequest, Proposal

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


class PageLayout(msgspec.Struct, frozen=True):
    """Pages of `page_size` tokens, `pages` of them, and one more that padding rows may name."""

    page_size: int
    pages: int


class ServedCaches(DeepseekCaches):
    """`DeepseekCaches` with the layout that the engine asks for."""

    layout: PageLayout


class ServedDeepseek:
    """A DeepSeek model in the engine: bfloat16 means the trained, quantised numerics, float32 the unquantised mode."""

    def __init__(self, checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> None:
        """Raises `UnsupportedModelError` where the model cannot be computed in this type or on this device."""
        if build.platform.device.type != "cpu":
            raise UnsupportedModelError(f"{checkpoint.name}: this family is computed on CPUs only; use --device cpu")
        if build.dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedModelError(f"{checkpoint.name}: dtype must be float32 or bfloat16, not {build.dtype}")
        options = Options(
            quantised=build.dtype == torch.bfloat16,
            draft=build.draft,
            engram=_placement(checkpoint, build),
            replay_tail=build.replay_tail,
        )
        self.model = DeepseekV4(checkpoint, build.communicator, options, progress)
        self.config = self.model.config
        self.engram_placement = options.engram if self.model.engrams else None
        self.draft_block = self.model.draft.block if self.model.draft is not None else 0
        self._page_size = build.page_size
        self.prefill_rules = _prefill_rules(self.config, build)

    def cache_groups(self) -> list[CacheGroup]:
        """Compressed entries in pages, and one record a request."""
        return self.make_cache(1, self._page_size, 1, 1 + self.draft_block).groups()

    def kv_layout(self, pages: int, page_size: int) -> KVLayout:
        """There is none: keys and values do not lie apart, one head a token. Raises `UnsupportedModelError`."""
        raise UnsupportedModelError("DeepSeek's caches are not keys and values apart; kernels must name its own pages")

    def make_cache(self, pages: int, page_size: int, states: int, width: int) -> ServedCaches:
        """Caches of this rank. Raises `UnsupportedModelError` when a page does not hold whole entries."""
        try:
            caches = ServedCaches(
                self.config,
                self.model.numerics,
                pages=pages + 1,
                page_size=page_size,
                states=states,
                width=width,
                draft=self.model.draft is not None,
                reach=page_size - 1,
            )
        except ValueError as error:
            raise UnsupportedModelError(f"{error}; use another --page-size") from error
        caches.layout = PageLayout(page_size, pages)
        return caches

    def forward(self, step: StepInputs, caches: DeepseekCaches) -> torch.Tensor:
        """Logits [samples, vocabulary] in float32."""
        step.segments = [_with_state(segment) for segment in step.segments]
        return self.model.compute(step, caches).float()

    def propose(self, requests: list[DraftRequest], caches: DeepseekCaches) -> list[Proposal]:
        """The draft's greedy proposals, with its confidence in them."""
        assert self.model.draft is not None
        found = self.model.draft.propose(requests, caches)
        pairs = zip(found.tokens.tolist(), found.confidence.tolist(), strict=True)
        return [Proposal(tokens, chances=confidence) for tokens, confidence in pairs]


def _prefill_rules(config: DeepseekConfig, build: BuildContext) -> PrefillRules:
    """A last chunk fills a window. A record reaches back over a page, so no chunk need end where a page does.

    Raises `UnsupportedModelError` for a replay of fewer rows than windows and records look back over.
    """
    window, reach = config.sliding_window, build.page_size - 1
    if not config.kv_source_layer_ids:
        return PrefillRules(last_chunk=window, state_reach=reach)
    if 0 < build.replay_tail < window + reach:
        raise UnsupportedModelError(
            f"--replay-tail {build.replay_tail}: windows of {window} and pages of {build.page_size} need "
            f"{window + reach} rows or more"
        )
    if 0 < build.replay_prefix < window:
        raise UnsupportedModelError(f"--replay-prefix {build.replay_prefix}: a window needs {window} tokens or more")
    return PrefillRules(
        last_chunk=window,
        state_reach=reach,
        tail=build.replay_tail,
        replay=build.replay_prefix,
        replay_history=config.engram_max_ngram_size - 1 if config.engram_layer_ids else 0,
    )


def _placement(checkpoint: Checkpoint, build: BuildContext) -> Placement:
    """Where Engram's tables lie: as wanted, or by what memory the other weights leave; rank 0 decides."""
    config, ranks = read_deepseek_config(checkpoint.config), build.communicator.shard.size
    table = sum(config.engram_num_embeddings) * (config.engram_head_dim + config.engram_head_dim // 32)
    free = build.platform.memory_available() - (checkpoint.weight_bytes() - table)
    wanted = cast(WantedPlacement, build.engram_placement)
    choice = choose_placement(wanted, table, ranks, max(0, free) // ranks)
    places: tuple[Placement, ...] = get_args(Placement)
    return places[int(build.communicator.broadcast(torch.tensor(places.index(choice))))]


def _with_state(segment: Segment) -> StateSegment:
    return StateSegment(
        first=segment.first,
        rows=segment.rows,
        length=segment.length,
        slots_L=segment.slots_L,
        run=segment.run,
        slot=segment.slot,
        floor=segment.floor,
        write_from=segment.write_from,
        state=segment.slot,
    )
