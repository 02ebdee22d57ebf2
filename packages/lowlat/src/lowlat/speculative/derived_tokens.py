"""The Markov head's table of tokens, made of the target's embeddings by a small network: a file then holds that alone.

Legend of shape suffixes: V tokens, H hidden, E rank of the head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lowlat.speculative.draft_files import DraftConfig

Embed = Callable[[torch.Tensor], torch.Tensor]
"""Embeddings [V, H] of tokens."""
UP, DOWN, TABLE = "markov_embed.up.weight", "markov_embed.down.weight", "markov_embed.weight"


class DerivedTokens(nn.Module):
    """In place of the table while it is trained; `embed` must be called before."""

    def __init__(self, config: DraftConfig, inner: int) -> None:
        """`inner`: width of the network."""
        super().__init__()
        self.up = nn.Linear(config.hidden_size, inner, bias=False)
        self.down = nn.Linear(inner, config.markov_rank, bias=False)
        rows = config.guessable + bool(config.draft_vocab_size)
        self.register_buffer("embedded_VH", torch.zeros(rows, config.hidden_size), persistent=False)
        self.embedded_VH: torch.Tensor

    def embed(self, config: DraftConfig, vocabulary: torch.Tensor | None, embed: Embed) -> None:
        """Take the target's embeddings."""
        self.embedded_VH.copy_(embedded(config, vocabulary, embed))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(F.silu(self.up(self.embedded_VH[places])))
        return found


def embedded(config: DraftConfig, vocabulary: torch.Tensor | None, embed: Embed) -> torch.Tensor:
    """Embeddings, all of one length, of the tokens that can be guessed, then of the mask for all others: float32."""
    tokens = torch.arange(config.vocab_size) if vocabulary is None else vocabulary
    if config.draft_vocab_size:
        tokens = torch.cat([tokens, tokens.new_tensor([config.mask_token_id])])
    rows_VH = embed(tokens).float()
    return F.rms_norm(rows_VH, rows_VH.shape[-1:], eps=1e-6)


def with_table(config: DraftConfig, weights: dict[str, torch.Tensor], embed: Embed) -> dict[str, torch.Tensor]:
    """A draft's weights with the table itself."""
    if UP not in weights:
        return weights
    rows_VH = embedded(config, weights.get("draft_tokens"), embed)
    table_VE = F.silu(rows_VH @ weights[UP].t()) @ weights[DOWN].t()
    return {name: of for name, of in weights.items() if name not in (UP, DOWN)} | {TABLE: table_VE}
