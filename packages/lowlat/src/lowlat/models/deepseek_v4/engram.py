"""Engram in the model: look-ups for the rows of a step, started before their layer is reached.

Legend of shape suffixes: R rows, C columns, B bytes of a table row, n streams, H hidden.
"""

from __future__ import annotations

import torch

from lowlat.layers import engram as ops
from lowlat.layers import fp8
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.engram_tables import EngramTable, LookUp
from lowlat.models.deepseek_v4.step import StateSegment
from lowlat.models.deepseek_v4.weights import Weights


def layer_hashes(config: DeepseekConfig) -> dict[int, ops.EngramHash]:
    """The hash of each Engram layer."""
    hashes = ops.make_hashes(
        config.engram_layer_ids,
        base_vocabulary=config.engram_vocab_size,
        compressed_vocabulary=config.engram_compressed_vocab_size,
        max_ngram=config.engram_max_ngram_size,
        heads=config.engram_n_heads,
    )
    return dict(zip(config.engram_layer_ids, hashes, strict=True))


class Engram:
    """One layer's table, projection and gate."""

    def __init__(
        self, weights: Weights, name: str, config: DeepseekConfig, constants: ops.EngramHash, table: EngramTable
    ) -> None:
        gain = weights.values(f"{name}.q_weight") * weights.values(f"{name}.k_weight")
        self.config, self.numerics = config, weights.numerics
        self.constants, self.table = constants, table
        self.weights = ops.EngramWeights(weights.fp8(f"{name}.wkv"), gain)

    def look_up(self, ids_RS: torch.Tensor) -> LookUp:
        """Start the look-up for compressed ids of each row's last tokens; it needs nothing but tokens."""
        return self.table.start(ops.hash_rows(ids_RS, self.constants))

    def update(self, streams_RnH: torch.Tensor, found_RCB: torch.Tensor, image_R: torch.Tensor) -> torch.Tensor:
        """The streams with this layer's memory added; rows of image tokens keep theirs."""
        dim = self.config.engram_head_dim
        values = fp8.dequantise_groups(found_RCB[..., :dim].contiguous(), found_RCB[..., dim:])
        e_RX = values.flatten(1).to(self.numerics.compute)
        updated = ops.update(streams_RnH, e_RX, self.weights, self.config.rms_norm_eps, self.numerics)
        return torch.where(image_R.view(-1, 1, 1), streams_RnH, updated)


def step_history(
    tokens_R: torch.Tensor,
    segments: list[StateSegment],
    caches: DeepseekCaches,
    config: DeepseekConfig,
    token_map: torch.Tensor,
) -> torch.Tensor:
    """Compressed ids [R, n-gram size] of each row's last tokens, newest first; the history advances."""
    size = config.engram_max_ngram_size
    parts = []
    for segment in segments:
        first = max(0, segment.start - size + 1)
        past = caches.history.read(segment.state, first, segment.start).squeeze(-1)
        own = tokens_R[segment.span]
        parts.append(
            ops.lookback(
                torch.cat([past, own]),
                first,
                segment.rows,
                token_map,
                size=size,
                pad=config.engram_pad_token_id,
                image=config.image_token_id,
            )
        )
        caches.history.write(segment.state, segment.start, own.unsqueeze(1))
    return torch.cat(parts)
