"""DSpark: a draft of three layers that proposes a block of tokens in one pass, then walks a Markov head over them.

Legend of shape suffixes: R rows, Q requests, L block rows, H hidden, V vocabulary, D head dimension, K keys, X
features.

Formulas: docs/models/deepseek_v41.md, section "DSpark".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import torch
import torch.nn.functional as F

from lowlat.layers import deepseek_attention as ops
from lowlat.layers.deepseek_numerics import linear, rms_norm
from lowlat.layers.deepseek_rope import TailRope
from lowlat.layers.hyper_connections import collapse
from lowlat.models.deepseek_v4.attention import AttentionBase, Rows
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.layer import FeedForward, Streams, first_pre
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import Communicator
from lowlat.speculative.proposer import DraftRequest

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""Picks a token for every request: (logits [Q, V], place in the block) -> ids [Q]."""


class Proposals(msgspec.Struct):
    """`tokens` [Q, L], `logits` [Q, L, V] that they were chosen from, `confidence` [Q, L] of acceptance, each given
    that those before are accepted."""

    tokens: torch.Tensor
    logits: torch.Tensor
    confidence: torch.Tensor


class DraftAttention(AttentionBase):
    """Attention of block rows: all see the window before the block and the whole block."""

    def forward(
        self,
        x_RH: torch.Tensor,
        requests: Sequence[DraftRequest],
        positions_R: torch.Tensor,
        caches: DeepseekCaches,
        layer: int,
    ) -> torch.Tensor:
        """`layer` is the draft layer's place in `caches.windows`; the block's own entries are not kept."""
        _, q_RND = self.query(x_RH, positions_R)
        window = caches.windows[layer]
        own_RD = window.entries.round(self.window_values(x_RH, positions_R))
        block = len(x_RH) // len(requests)
        o_RND = torch.empty_like(q_RND)
        for index, request in enumerate(requests):
            span = slice(index * block, (index + 1) * block)
            first = max(0, request.length - self.config.sliding_window, int(caches.draft_floor_S[request.state]))
            past = window.read(request.state, min(first, request.length), request.length).to(own_RD.dtype)
            keys_1KD = torch.cat([past, own_RD[span]]).unsqueeze(0)
            seen = torch.ones(block, keys_1KD.shape[1], dtype=torch.bool)
            o_RND[span] = ops.attend(q_RND[span], keys_1KD.expand(block, -1, -1), seen, self.sinks_N)
        return self.output(o_RND, positions_R)


class DSparkDraft:
    """The draft layers and heads of one rank. Embedding and head are the target's."""

    def __init__(
        self,
        weights: Weights,
        config: DeepseekConfig,
        communicator: Communicator,
        rope: TailRope,
        embedding_VH: torch.Tensor,
        head_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.config, self.numerics = config, weights.numerics
        self._communicator = communicator
        self._embedding_VH, self._head_logits = embedding_VH, head_logits
        self.main_proj = weights.fp8("mtp.0.main_proj")
        self.main_norm_H = weights.values("mtp.0.main_norm.weight")
        names = [f"mtp.{index}" for index in range(config.num_nextn_predict_layers)]
        self.streams = [Streams(weights, name, config) for name in names]
        self.attention = [DraftAttention(weights, f"{name}.attn", config, communicator, rope) for name in names]
        experts, count = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        self.feed_forward = [
            FeedForward(weights, f"{name}.ffn", config, communicator, experts=experts, count=count, draft=True)
            for name in names
        ]
        self.norm_H = weights.values(f"{names[-1]}.norm.weight")
        part = communicator.shard.part(config.vocab_size)
        self.markov_embed_VX = weights.values(f"{names[-1]}.markov_head.embed.weight")
        self.markov_head_VX = weights.values(f"{names[-1]}.markov_head.head.weight", rows=part)
        self.confidence_1X = weights.values(f"{names[-1]}.confidence_head.proj.weight")

    @property
    def block(self) -> int:
        """Tokens that one pass proposes."""
        return self.config.dspark_block_size

    def extend_context(self, features_RX: torch.Tensor, rows: Rows, caches: DeepseekCaches) -> None:
        """Write the draft layers' window entries of target rows, from the target's features.

        Rows of drafts that are rejected later are written too: the tokens that replace them overwrite them.
        """
        config, numerics = self.config, self.numerics
        u_RH = rms_norm(linear(features_RX, self.main_proj, numerics), self.main_norm_H, config.rms_norm_eps, numerics)
        for segment in rows.segments:
            # Positions that were replayed or dropped have no features; the draft must not look there.
            floor = max(segment.floor, segment.write_from)
            if floor > 0 and segment.start <= floor:
                caches.draft_floor_S[segment.state] = floor
            elif segment.start == 0:
                caches.draft_floor_S[segment.state] = 0
        for index, attention in enumerate(self.attention):
            values_RD = attention.window_values(u_RH, rows.positions_R)
            for segment in rows.segments:
                window = caches.windows[config.num_hidden_layers + index]
                window.write(segment.state, segment.start, values_RD[segment.span])

    @torch.inference_mode()
    def hidden(self, requests: Sequence[DraftRequest], caches: DeepseekCaches) -> torch.Tensor:
        """Block states before the last norm [Q, L, H]: the anchor and noise tokens through the draft layers."""
        config, numerics = self.config, self.numerics
        noise = [config.dspark_noise_token_id] * (self.block - 1)
        tokens_R = torch.tensor([token for request in requests for token in [request.anchor, *noise]])
        positions_R = torch.tensor([request.length + i for request in requests for i in range(self.block)])
        x_RH = F.embedding(tokens_R, self._embedding_VH)
        streams_RnH = x_RH.unsqueeze(1).repeat(1, config.hc_mult, 1)
        pre_Rn = first_pre(len(x_RH), config.hc_mult, numerics)
        for index, streams in enumerate(self.streams):
            streams_RnH, pre_Rn = streams.sublayer(
                streams_RnH, pre_Rn, 0, self._attend(index, requests, positions_R, caches)
            )
            streams_RnH, pre_Rn = streams.sublayer(streams_RnH, pre_Rn, 1, self._feed(index, tokens_R))
        return numerics.store(collapse(streams_RnH, pre_Rn)).view(len(requests), self.block, -1)

    def _attend(
        self, index: int, requests: Sequence[DraftRequest], positions_R: torch.Tensor, caches: DeepseekCaches
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = self.config.num_hidden_layers + index
        return lambda x_RH: self.attention[index].forward(x_RH, requests, positions_R, caches, layer)

    def _feed(self, index: int, tokens_R: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x_RH: self.feed_forward[index].forward(x_RH, tokens_R)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], caches: DeepseekCaches, choose: Choose | None = None
    ) -> Proposals:
        """Propose a block for every request; `choose` None: greedily."""
        h_QLH = self.hidden(requests, caches)
        normed = rms_norm(h_QLH, self.norm_H, self.config.rms_norm_eps, self.numerics)
        base_QLV = self._head_logits(normed.flatten(0, 1)).view(len(requests), self.block, -1)
        token_Q = torch.tensor([request.anchor for request in requests])
        tokens, logits, confidence = [], [], []
        for place in range(self.block):
            previous_QX = self.markov_embed_VX[token_Q]
            bias = self._communicator.gather_columns(previous_QX @ self.markov_head_VX.T, self.config.vocab_size)
            logits.append(base_QLV[:, place] + bias)
            joined = torch.cat([h_QLH[:, place], previous_QX], -1)
            confidence.append(torch.sigmoid(joined @ self.confidence_1X[0]))
            token_Q = logits[-1].argmax(-1) if choose is None else choose(logits[-1], place)
            tokens.append(token_Q)
        return Proposals(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1))
