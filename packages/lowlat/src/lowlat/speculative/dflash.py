"""Block drafts in the engine: DFlash, DFlash 2 and DSpark over the target's features.

For every row that the target computes, the draft's keys and values of that row's features go into the draft's own pool,
at the target's slots. So whatever the target may reuse, a cached prefix too, the draft may. They are computed when the
draft is next asked, for the rows of several steps at once: where it seldom is, weights are seldom read.

Legend of shape suffixes as in `draft_network`; L tokens of the context, S KV slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F

from lowlat.cache.layout import KVLayout, KVPool
from lowlat.layers.step import StepInputs
from lowlat.speculative.draft_heads import Head, greedy, walk
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.speculative.packed_network import PackedNetwork
from lowlat.speculative.proposer import Choose, DraftRequest, Proposal, Tables

_MOST_WAITING = 64
"""Rows whose features are kept for later."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""The target's embedding: tokens [R] to [R, H]."""


def draft_layout(network: DraftNetwork, pages: int, page_size: int) -> KVLayout:
    """Where the draft's keys and values lie."""
    config = network.config
    return KVLayout(
        layers=config.num_hidden_layers,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        pages=pages,
        dtype="float32",
    )


class BlockProposer:
    """Guesses a whole block in one forward of the draft."""

    costs_time = True
    sequential = False
    needs_ranks = False
    follows = False

    def __init__(
        self,
        network: DraftNetwork,
        pool: KVPool,
        tables: Tables,
        embed: Embed,
        head: Head,
        choose: Choose | None = None,
        packed: PackedNetwork | None = None,
    ) -> None:
        """`choose` None: guesses are the likeliest tokens. `packed`: in place of the network's layers."""
        self._network, self._pool, self._tables = network, pool, tables
        self._layers = network if packed is None else packed
        self._dtype = network.fc.weight.dtype
        self._embed, self._head, self._choose = embed, head, choose
        self._waiting: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Features, positions and slots of rows that are not in the pool yet."""

    def begin(self, slot: int, tokens: Sequence[int]) -> None:
        """The context is in the pool, or comes with the target's rows."""

    def observe(self, slot: int, tokens: Iterable[int]) -> None:
        """The same."""

    def follow(self, step: StepInputs) -> None:
        """`extend` hears of it, inside the target's forward."""

    def extend(self, features_RX: torch.Tensor, step: StepInputs) -> None:
        """Let the draft have a step's rows when it is next asked. Rows of wrong guesses are overwritten later."""
        real = step.real_rows
        rows = (features_RX[:real], step.positions_R[:real], step.write_slots[:real])
        if real + sum(len(slots) for _, _, slots in self._waiting) > _MOST_WAITING:
            self._waiting.append(rows)
            self._write()
        else:  # whose memory may be used again by the next step
            self._waiting.append((rows[0].to(self._dtype, copy=True), rows[1].clone(), rows[2].clone()))

    def _write(self) -> None:
        """Write keys and values of the rows that wait to the pool; of several in one slot the last."""
        if not self._waiting:
            return
        rows = [torch.cat(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting.clear()
        last = {slot: row for row, slot in enumerate(rows[2].tolist())}
        if len(last) < len(rows[2]):
            kept = torch.tensor(sorted(last.values()))
            rows = [part.index_select(0, kept) for part in rows]
        features_RX, positions_R, slots_R = rows
        context = self._layers.context(features_RX.to(self._dtype), positions_R)
        for (keys_RKD, values_RKD), keys_SKD, values_SKD in zip(
            context, self._pool.keys, self._pool.values, strict=True
        ):
            keys_SKD.index_copy_(0, slots_R, keys_RKD)
            values_SKD.index_copy_(0, slots_R, values_RKD)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._write()
        network = self._network
        config = network.config
        masks = [config.mask_token_id] * (config.block_size - 1)
        tokens_QB = torch.tensor([[request.anchor, *masks] for request in requests])
        positions_QB = torch.tensor([[request.length] for request in requests]) + torch.arange(config.block_size)
        x_QBH = self._embed(tokens_QB.flatten()).to(self._dtype).view(*tokens_QB.shape, -1)
        h_QBH = self._layers.block(x_QBH, positions_QB, self._attend(requests))
        h_QPH = h_QBH if config.kind == "dspark" else h_QBH[:, 1:]
        pick = greedy if self._choose is None else self._picker(self._choose, requests)
        tokens_QP, confidence_QP = walk(network, self._head, h_QPH, tokens_QB[:, 0], pick)
        chances = [None] * len(requests) if confidence_QP is None else confidence_QP.tolist()
        return [Proposal(guesses, chances=of) for guesses, of in zip(tokens_QP.tolist(), chances, strict=True)]

    def _attend(self, requests: Sequence[DraftRequest]) -> Callable[..., torch.Tensor]:
        window = self._network.config.sliding_window
        contexts = [self._tables.segment(request.state, range(0), request.length) for request in requests]

        def attend(layer: int, q_QBND: torch.Tensor, k_QBKD: torch.Tensor, v_QBKD: torch.Tensor) -> torch.Tensor:
            mixed = []
            for of, q_BND, k_BKD, v_BKD in zip(contexts, q_QBND, k_QBKD, v_QBKD, strict=True):
                first = max(0, of.length - window) if window else 0
                pools = (self._pool.keys[layer], self._pool.values[layer])
                if of.run >= 0:
                    keys, values = (pool[of.run + first : of.run + of.length] for pool in pools)
                else:
                    keys, values = (pool.index_select(0, of.slots_L[first:]) for pool in pools)
                mixed.append(full_attention(q_BND, torch.cat([keys, k_BKD]), torch.cat([values, v_BKD])))
            return torch.stack(mixed)

        return attend

    def _picker(self, choose: Choose, requests: Sequence[DraftRequest]) -> Callable[[torch.Tensor, int], torch.Tensor]:
        def pick(logits_QV: torch.Tensor, place: int) -> torch.Tensor:
            pairs = zip(logits_QV, requests, strict=True)
            return torch.tensor([choose(of, request.state, request.length + 1 + place) for of, request in pairs])

        return pick


def full_attention(q_BND: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor) -> torch.Tensor:
    """Every row over all keys: [B, N, D]. The heads that share a key are laid out as rows."""
    rows, heads, dim = q_BND.shape
    kv_heads = k_LKD.shape[1]
    q_KXD = q_BND.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    o_KXD = F.scaled_dot_product_attention(q_KXD[None], k_LKD.transpose(0, 1)[None], v_LKD.transpose(0, 1)[None])[0]
    return o_KXD.view(kv_heads, heads // kv_heads, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
