"""The network of DFlash, DFlash 2 and DSpark drafts: a few dense layers over a block of masks, which look back at
features of the target (DFlash as in SGLang 0.5.23; DSpark's heads as in DeepSeek-V4.1).

The same code trains and serves: who calls says how rows attend.

Legend of shape suffixes: R rows, Q blocks, B rows of a block, H hidden, X taps * H, N query heads, K key-value heads, D
head dimension, I intermediate, W filter taps, V vocabulary, E rank of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lowlat.layers.rope import Rope, rotate
from lowlat.speculative.draft_files import DraftConfig

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [Q, B, N, D], k and v [Q, B, K, D] of the blocks' own rows) to mixed values [Q, B, N, D]. Every row sees
the context before its block and all rows of the block."""


class Norm(nn.Module):
    """RMSNorm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class GroupedMixing(nn.Module):
    """A causal filter within the block whose coefficients depend on the token.

    coefficient[side, tap, channel] = base[side, tap, channel] + projection(x)[side, tap, group of the channel]; the
    result at row t is the sum over taps of coefficient * value at row t - tap, as far as the block reaches back. Side 0
    filters what goes into a sublayer, side 1 what comes out of it.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, self._taps, self._size = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self._groups = hidden // self._size
        base = torch.zeros(2, self._taps, hidden)
        base[:, 0] = 1
        self.base = nn.Parameter(base)
        self.proj = nn.Linear(hidden, 2 * self._taps * self._groups, bias=False)
        nn.init.zeros_(self.proj.weight)

    def coefficients(self, x_QBH: torch.Tensor) -> torch.Tensor:
        """[Q, B, 2, W, H] from the sublayer's input."""
        parts: torch.Tensor = self.proj(x_QBH).view(*x_QBH.shape[:2], 2, self._taps, self._groups)
        return parts.repeat_interleave(self._size, dim=-1) + self.base

    def mix(self, x_QBH: torch.Tensor, coefficients: torch.Tensor, side: int) -> torch.Tensor:
        """Filter one side."""
        mixed = x_QBH * coefficients[:, :, side, 0]
        for tap in range(1, min(self._taps, x_QBH.shape[1])):
            earlier = F.pad(x_QBH[:, :-tap], (0, 0, tap, 0))
            mixed = mixed + earlier * coefficients[:, :, side, tap]
        return mixed


class DraftLayer(nn.Module):
    """Attention with normed heads and rotary positions, then a gated MLP."""

    def __init__(self, config: DraftConfig, index: int) -> None:
        super().__init__()
        self._index, self._dim = index, config.head_dim
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.input_layernorm = Norm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(hidden, config.rms_norm_eps)
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim, config.rms_norm_eps), Norm(dim, config.rms_norm_eps)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        mixes = config.kind == "dflash2"
        self.attention_mixing = GroupedMixing(config) if mixes else None
        self.mlp_mixing = GroupedMixing(config) if mixes else None

    def qkv_weight(self) -> torch.Tensor:
        """Projections of queries, keys and values [(N + 2K) * D, H], as one product."""
        return torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])

    def gate_up_weight(self) -> torch.Tensor:
        """Projections of gate and up [2I, H], as one product."""
        return torch.cat([self.gate_proj.weight, self.up_proj.weight])

    def keys(self, x_RH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotated keys [R, K, D] of features or of block rows."""
        return rotate(self.k_norm(self._heads(self.k_proj(x_RH))), *rotation)

    def values(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Values [R, K, D]."""
        return self._heads(self.v_proj(x_RH))

    def _heads(self, x_RY: torch.Tensor) -> torch.Tensor:
        return x_RY.view(len(x_RY), -1, self._dim)

    def forward(self, x_QBH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        if self.attention_mixing is None or self.mlp_mixing is None:
            return self.after(x_QBH, attend(self._index, *self.before(x_QBH, rotation)))

        def attention(y_QBH: torch.Tensor) -> torch.Tensor:
            added: torch.Tensor = self.o_proj(attend(self._index, *self._looks(y_QBH, rotation)).flatten(2))
            return added

        x_QBH = x_QBH + _mixed(self.attention_mixing, self.input_layernorm(x_QBH), attention)
        return x_QBH + _mixed(self.mlp_mixing, self.post_attention_layernorm(x_QBH), self._mlp)

    def before(self, x_QBH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What a layer without mixing attends with: q, k and v of its rows."""
        return self._looks(self.input_layernorm(x_QBH), rotation)

    def after(self, x_QBH: torch.Tensor, mixed_QBND: torch.Tensor) -> torch.Tensor:
        """The rest of such a layer."""
        x_QBH = x_QBH + self.o_proj(mixed_QBND.flatten(2))
        return x_QBH + self._mlp(self.post_attention_layernorm(x_QBH))

    def _looks(self, y_QBH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        y_RH = y_QBH.flatten(0, 1)
        q_RND = rotate(self.q_norm(self._heads(self.q_proj(y_RH))), *rotation)
        parts = q_RND, self.keys(y_RH, rotation), self.values(y_RH)
        return tuple(part.view(*y_QBH.shape[:2], *part.shape[1:]) for part in parts)

    def _mlp(self, y_QBH: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down_proj(F.silu(self.gate_proj(y_QBH)) * self.up_proj(y_QBH))
        return added


def _mixed(
    mixing: GroupedMixing | None, x_QBH: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if mixing is None:
        return sublayer(x_QBH)
    coefficients = mixing.coefficients(x_QBH)
    return mixing.mix(sublayer(mixing.mix(x_QBH, coefficients, 0)), coefficients, 1)


class DraftNetwork(nn.Module):
    """The whole draft, without embedding and head."""

    def __init__(self, config: DraftConfig, positions: int) -> None:
        """`positions`: the longest context and a block."""
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.kind == "dflash2":
            self.selector_previous = nn.Embedding(config.vocab_size, config.selector_rank)
            self.selector_next = nn.Embedding(config.vocab_size, config.selector_rank)
            self.selector_proj = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
            nn.init.normal_(self.selector_previous.weight, std=0.02)
            nn.init.zeros_(self.selector_next.weight)
        if config.draft_vocab_size:
            self.register_buffer("draft_tokens", torch.arange(config.draft_vocab_size))
        if config.kind == "dspark":
            # Tokens that it cannot guess share one row behind the others.
            self.markov_embed: nn.Module = nn.Embedding(
                config.guessable + bool(config.draft_vocab_size), config.markov_rank
            )
            self.markov_head = nn.Linear(config.markov_rank, config.guessable, bias=False)
            self.confidence_head = nn.Linear(config.hidden_size + config.markov_rank, 1, bias=False)
            nn.init.normal_(self.get_parameter("markov_embed.weight"), std=0.02)
            nn.init.zeros_(self.markov_head.weight)
            nn.init.zeros_(self.confidence_head.weight)
        self.draft_tokens: torch.Tensor
        self._cos_PD: torch.Tensor
        self._sin_PD: torch.Tensor
        rope = Rope(config.head_dim, config.rope_theta, positions, None, torch.device("cpu"))
        self.register_buffer("_cos_PD", rope.tables[0], persistent=False)
        self.register_buffer("_sin_PD", rope.tables[1], persistent=False)

    def rotation(self, positions_R: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rows."""
        cos_RD, sin_RD = self._cos_PD.index_select(0, positions_R), self._sin_PD.index_select(0, positions_R)
        return cos_RD[:, None].to(dtype), sin_RD[:, None].to(dtype)

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """Tokens that it can guess, in rising order; None: all."""
        return self.draft_tokens if self.config.draft_vocab_size else None

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Place of each token among those that the draft can guess; the one behind them for others."""
        known = self.vocabulary
        if known is None:
            return tokens
        found = torch.searchsorted(known, tokens.contiguous())
        return torch.where(known[found.clamp(max=len(known) - 1)] == tokens, found, len(known))

    def context(self, features_RX: torch.Tensor, positions_R: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [R, K, D] of every layer for rows of the target, from its features."""
        u_RH = self.hidden_norm(self.fc(features_RX))
        rotation = self.rotation(positions_R, u_RH.dtype)
        return [(layer.keys(u_RH, rotation), layer.values(u_RH)) for layer in self._each()]

    def block(self, x_QBH: torch.Tensor, positions_QB: torch.Tensor, attend: Attend) -> torch.Tensor:
        """States of block rows before the last norm, from their embeddings."""
        rotation = self.rotation(positions_QB.flatten(), x_QBH.dtype)
        for layer in self._each():
            x_QBH = layer(x_QBH, rotation, attend)
        return x_QBH

    def _each(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def capped(logits: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    """Logits of the target's head as a draft uses them: multiplied, then softly capped."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap
