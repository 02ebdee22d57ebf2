"""DeepSeek-V4 and V4.1 text models on one rank.

Legend of shape suffixes: R rows, M sampled rows, H hidden, n streams, V vocabulary, B bytes of a table row.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.nn.functional as F

from lowlat.layers.deepseek_numerics import Numerics, rms_norm
from lowlat.layers.deepseek_rope import TailRope, frequencies, yarn_frequencies
from lowlat.layers.hyper_connections import collapse, head_weights
from lowlat.layers.step import StepInputs
from lowlat.models.base import LoadProgress
from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.attention import Attention, Rows
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig, read_deepseek_config
from lowlat.models.deepseek_v4.dspark import DSparkDraft
from lowlat.models.deepseek_v4.engram import Engram, layer_hashes, step_history
from lowlat.models.deepseek_v4.engram_tables import (
    EngramTable,
    HostTable,
    LookUp,
    PeerTable,
    Placement,
    ShardedTable,
    column_part,
    read_part,
    row_bytes,
)
from lowlat.models.deepseek_v4.layer import FeedForward, Streams, first_pre
from lowlat.models.deepseek_v4.replay import tail_of
from lowlat.models.deepseek_v4.step import StateSegment
from lowlat.models.deepseek_v4.token_map import load_token_map
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import Communicator
from lowlat.parallel.shared_parts import share_parts

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a model computes.

    `replay_tail`: bounded replay on the decoder side: prefill runs the layers from the last KV source on for so many
    last rows of each segment only (0: off, exact).
    """

    quantised: bool = True
    compute: torch.dtype | None = None
    engram: Placement = "shards"
    replay_tail: int = 0
    draft: bool = True


class DeepseekLayer:
    """Attention and feed-forward of one layer, with Engram before it where the layer has one."""

    def __init__(
        self,
        weights: Weights,
        layer: int,
        config: DeepseekConfig,
        communicator: Communicator,
        rope: TailRope,
        engram: Engram | None,
    ) -> None:
        name = f"layers.{layer}"
        self.engram = engram
        self.streams = Streams(weights, name, config)
        self.attention = Attention(weights, f"{name}.attn", layer, config, communicator, rope)
        self.feed_forward = FeedForward(
            weights,
            f"{name}.ffn",
            config,
            communicator,
            experts=config.n_routed_experts,
            count=config.num_experts_per_tok,
            hashed=layer < config.num_hash_layers,
        )


class DeepseekV4:
    """A whole model: `compute` runs a step over `DeepseekCaches`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        communicator: Communicator,
        options: Options | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Read this rank's weights.

        Raises:
            UnsupportedModelError: the configuration cannot be computed in this mode or on so many ranks.
            CheckpointError: weights are missing or damaged.
        """
        self.options = options = options or Options()
        self.config = config = read_deepseek_config(checkpoint.config)
        if options.quantised and not config.v41:
            raise UnsupportedModelError(
                f"{checkpoint.name}: V4 is computed unquantised only; its cache formats are not made here"
            )
        self.numerics = Numerics.make(options.quantised, config.activation_group, options.compute)
        self.communicator = communicator
        weights = Weights(checkpoint, config, self.numerics, progress)
        self._ropes = {False: TailRope(frequencies(config.qk_rope_head_dim // 2, config.rope_theta))}
        self._ropes[True] = _compressed_rope(config)
        self.embedding_VH = weights.values("embed.weight")
        self._read_engram(weights, checkpoint)
        self.layers = [
            DeepseekLayer(
                weights,
                layer,
                config,
                communicator,
                self._ropes[config.compress_ratios[layer] > 0],
                self.engrams.get(layer),
            )
            for layer in range(config.num_hidden_layers)
        ]
        self.norm_H = weights.values("norm.weight")
        self.head_mix = None if config.v41 else weights.mix("hc_head")
        self._vocabulary_part = communicator.shard.part(config.vocab_size)
        self.head_VH = weights.values("head.weight", rows=self._vocabulary_part)
        self.draft: DSparkDraft | None = None
        if config.has_draft and options.draft:
            self.draft = DSparkDraft(
                weights, config, communicator, self._ropes[False], self.embedding_VH, self.head_logits
            )

    def _read_engram(self, weights: Weights, checkpoint: Checkpoint) -> None:
        config = self.config
        self.engrams: dict[int, Engram] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engram")
        self.token_map: torch.Tensor | None = None
        if not config.engram_layer_ids:
            return
        self.token_map = load_token_map(checkpoint.folder, config.vocab_size, config.engram_compressed_vocab_size)
        for index, (layer, constants) in enumerate(layer_hashes(config).items()):
            if constants.rows != config.engram_num_embeddings[index]:
                raise UnsupportedModelError(
                    f"config.json: engram_num_embeddings[{index}] is {config.engram_num_embeddings[index]}, "
                    f"but the hash of layer {layer} needs {constants.rows} rows"
                )
            name = f"layers.{layer}.engram"
            table = self._table(weights, f"{name}.embed", layer)
            self.engrams[layer] = Engram(weights, name, config, constants, table)

    def _table(self, weights: Weights, name: str, layer: int) -> EngramTable:
        constants = layer_hashes(self.config)[layer]
        if self.options.engram == "host":
            return HostTable.open(weights, name, self._reader)
        shard = self.communicator.shard
        own = column_part(constants, shard)[1]
        if self.options.engram == "shards":
            return ShardedTable(read_part(weights, name, own), constants, self.communicator)
        size = row_bytes(weights, name)
        parts = share_parts(
            self.communicator, own.stop - own.start, size, lambda part: read_part(weights, name, own, part)
        )
        return PeerTable(parts, constants, self._reader)

    def head_logits(self, x_MH: torch.Tensor) -> torch.Tensor:
        """Logits [M, V] of normed rows, on every rank."""
        return self.communicator.gather_columns(x_MH @ self.head_VH.T, self.config.vocab_size)

    @torch.inference_mode()
    def compute(self, step: StepInputs, caches: DeepseekCaches) -> torch.Tensor:
        """Logits [M, V] in the compute type; writes what the step's rows leave in the caches.

        `step.segments` must be `StateSegment`s that cover the real rows; padding rows are ignored.
        """
        config, numerics = self.config, self.numerics
        tokens_R = step.tokens_R[: step.real_rows]
        segments = [segment for segment in step.segments if isinstance(segment, StateSegment)]
        rows = Rows(step.positions_R[: step.real_rows], segments, {}, [])
        tail = tail_of(rows, self.options.replay_tail, step.sample_rows) if self._replay_layer() is not None else None
        wanted = step.sample_rows if tail is None else tail.map(step.sample_rows)
        found = self._look_up(tokens_R, segments, caches)
        x_RH = F.embedding(tokens_R, self.embedding_VH)
        streams_RnH = x_RH.unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre_Rn = first_pre(len(x_RH), config.hc_mult, numerics)
        features: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                image_R = tokens_R == (-1 if config.image_token_id is None else config.image_token_id)
                streams_RnH = layer.engram.update(streams_RnH, found[index](), image_R)
            if index in config.dspark_target_layer_ids:
                features.append(numerics.store(streams_RnH.mean(1)))
            if tail is not None and index == self._replay_layer():
                self._write_sources(layer, streams_RnH, pre_Rn, rows, caches)
                streams_RnH, pre_Rn, tokens_R = (tail.take(x) for x in (streams_RnH, pre_Rn, tokens_R))
                features = [tail.take(x) for x in features]
                rows = tail.rows
            streams_RnH, pre_Rn = self._layer(layer, streams_RnH, pre_Rn, tokens_R, rows, caches)
            rows.entries_written = False
        if self.draft is not None:
            self.draft.extend_context(torch.cat(features, -1), rows, caches)
        return self._logits(streams_RnH.index_select(0, wanted), pre_Rn.index_select(0, wanted))

    def _layer(
        self,
        layer: DeepseekLayer,
        streams_RnH: torch.Tensor,
        pre_Rn: torch.Tensor,
        tokens_R: torch.Tensor,
        rows: Rows,
        caches: DeepseekCaches,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        streams_RnH, pre_Rn = layer.streams.sublayer(
            streams_RnH, pre_Rn, 0, lambda x_RH: layer.attention.forward(x_RH, rows, caches)
        )
        return layer.streams.sublayer(streams_RnH, pre_Rn, 1, lambda x_RH: layer.feed_forward.forward(x_RH, tokens_R))

    def _logits(self, streams_MnH: torch.Tensor, pre_Mn: torch.Tensor) -> torch.Tensor:
        config = self.config
        if self.head_mix is not None:
            pre_Mn = head_weights(streams_MnH, self.head_mix, eps=config.hc_eps, rms_eps=config.rms_norm_eps)
        y_MH = self.numerics.store(collapse(streams_MnH, pre_Mn))
        return self.head_logits(rms_norm(y_MH, self.norm_H, config.rms_norm_eps, self.numerics))

    def _look_up(
        self, tokens_R: torch.Tensor, segments: list[StateSegment], caches: DeepseekCaches
    ) -> dict[int, LookUp]:
        """Start all layers' look-ups, as soon as the step's tokens are known: nothing else is needed for them."""
        if self.token_map is None:
            return {}
        history = step_history(tokens_R, segments, caches, self.config, self.token_map)
        return {layer: engram.look_up(history) for layer, engram in self.engrams.items()}

    def _replay_layer(self) -> int | None:
        """The last KV source, from which on bounded replay drops rows; None: it is off."""
        sources = self.config.kv_source_layer_ids
        return sources[-1] if sources and self.options.replay_tail > 0 else None

    @staticmethod
    def _write_sources(
        layer: DeepseekLayer,
        streams_RnH: torch.Tensor,
        pre_Rn: torch.Tensor,
        rows: Rows,
        caches: DeepseekCaches,
    ) -> None:
        """The last source's entries of all rows, before most rows are dropped."""
        layer.attention.write_entries(layer.streams.read(streams_RnH, pre_Rn, 0), rows, caches)


def _compressed_rope(config: DeepseekConfig) -> TailRope:
    pairs, scaling = config.qk_rope_head_dim // 2, config.rope_scaling
    if scaling is None:
        return TailRope(frequencies(pairs, config.compress_rope_theta))
    return TailRope(
        yarn_frequencies(
            pairs,
            config.compress_rope_theta,
            factor=scaling.factor,
            original=scaling.original_max_position_embeddings,
            beta_fast=scaling.beta_fast,
            beta_slow=scaling.beta_slow,
        )
    )
