"""Engram: tables looked up by hashes of the last few tokens, gated into the residual streams.

Legend of shape suffixes: R rows, T tokens, C table columns, D values of a table row, n streams, H hidden.

Formulas: docs/models/deepseek_v41.md, section "Engram".
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch

from lowlat.layers.deepseek_numerics import Numerics, Weight, linear


class EngramHash(msgspec.Struct, frozen=True):
    """Constants of one layer's hash: odd `multipliers` for each lookback, a prime modulus for each column."""

    multipliers: tuple[int, ...]
    primes: tuple[int, ...]
    heads: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """First table row of each column."""
        return tuple(np.concatenate([[0], np.cumsum(self.primes)[:-1]]).tolist())

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return sum(self.primes)


def make_hashes(
    layers: tuple[int, ...], *, base_vocabulary: int, compressed_vocabulary: int, max_ngram: int, heads: int
) -> list[EngramHash]:
    """The constants of every Engram layer.

    Moduli are the next unused primes from `base_vocabulary` on, for layers, n-gram sizes and heads in order;
    multipliers are odd draws of numpy's default generator seeded by the layer.
    """
    used: set[int] = set()
    result = []
    high = (2**63 - 1) // compressed_vocabulary // 2
    for layer in layers:
        primes = []
        for _ in range(max_ngram - 1):
            value = base_vocabulary - 1
            for _ in range(heads):
                value = _next_prime(value, used)
                primes.append(value)
        draws = np.random.default_rng(10007 * layer).integers(0, high, max_ngram, dtype=np.int64)
        result.append(EngramHash(tuple(int(draw) * 2 + 1 for draw in draws), tuple(primes), heads))
    return result


def hash_rows(ids_RS: torch.Tensor, constants: EngramHash) -> torch.Tensor:
    """Table rows int64 [R, C]: `ids_RS` are compressed ids of the token and those before it, newest first."""
    columns = []
    mixed = ids_RS[:, 0] * constants.multipliers[0]
    offsets = constants.offsets
    for back in range(1, ids_RS.shape[1]):
        mixed = mixed ^ (ids_RS[:, back] * constants.multipliers[back])
        for head in range(constants.heads):
            column = (back - 1) * constants.heads + head
            columns.append(mixed % constants.primes[column] + offsets[column])
    return torch.stack(columns, 1)


def lookback(
    tokens_T: torch.Tensor, first: int, rows: int, token_map: torch.Tensor, *, size: int, pad: int, image: int | None
) -> torch.Tensor:
    """Compressed ids [rows, size], newest first, of the last `rows` tokens of `tokens_T`, which begin at position
    `first`.

    Before position 0, and from an image token on backwards, ids are the padding token's. At least
    min(size - 1, position) tokens must come before each row.
    """
    ids = token_map[tokens_T]
    if image is not None:
        ids = ids.masked_fill(tokens_T == image, -1)
    ids = torch.nn.functional.pad(ids, (size - 1, 0), value=-1)
    windows = ids.unfold(0, size, 1).flip(1)[-rows:]
    if first > 0 and len(tokens_T) < rows + min(size - 1, first):
        raise ValueError(f"{len(tokens_T)} tokens from position {first} are too few for {rows} rows")
    blocked = (windows < 0).cumsum(1) > 0
    return windows.masked_fill(blocked, int(token_map[pad]))


class EngramWeights(msgspec.Struct):
    """`wkv` [(n + 1) H, C D]; `gain_nH`: q_weight times k_weight, in the compute type."""

    wkv: Weight
    gain_nH: torch.Tensor


def update(
    streams_RnH: torch.Tensor, e_RX: torch.Tensor, weights: EngramWeights, eps: float, numerics: Numerics
) -> torch.Tensor:
    """Streams plus the gated value of the looked-up rows `e_RX` [R, C D], as stored."""
    n, hidden = streams_RnH.shape[1:]
    kv = linear(e_RX, weights.wkv, numerics).view(-1, n + 1, hidden)
    keys_RnH, value_R1H = kv[:, :n], kv[:, n:]
    dots = (streams_RnH * weights.gain_nH * keys_RnH).sum(-1)
    norms = (streams_RnH.square().mean(-1) + eps) * (keys_RnH.square().mean(-1) + eps)
    d_Rn = dots / norms.sqrt() / math.sqrt(hidden)
    gate_Rn = torch.sigmoid(d_Rn.sign() * d_Rn.abs().clamp_min(1e-6).sqrt())
    return numerics.store(streams_RnH + gate_Rn.unsqueeze(-1) * value_R1H)


def _next_prime(value: int, used: set[int]) -> int:
    value += 1
    while value in used or not _is_prime(value):
        value += 1
    used.add(value)
    return value


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % divisor for divisor in range(2, math.isqrt(value) + 1))
