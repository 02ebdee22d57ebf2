"""Drawing a token on the host (decision 0105): every token has a random number of its own for every place, and the one
with the largest sum of logit over temperature and Gumbel noise is drawn.

Few tokens can be it: all noise but that of a few is too small for what their logits lack. So the random numbers' bits,
which are cheap, are computed for all, and logarithms for those few alone; the token is the same.

Legend of shape suffixes: V tokens to draw from.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_SPARE = 1e-3
"""By so much, and a part of themselves, sums in float32 may be wrong."""
_SPARE_PART = 1e-6
_SURE = np.float32(1.0)
"""A sum so much larger can always be reached: 1 - u is less than 1."""


def draw(
    logits_V: torch.Tensor, factor: float, temperature: float, seed: int, position: int, keys_V: np.ndarray | None
) -> int:
    """The place of the largest sum of logit times factor over temperature, and noise; the first of equal ones.

    Args:
        logits_V: float32, of which one at least is finite and none NaN.
        keys_V: `token_keys` of what the logits stand for; None: of all tokens.
    """
    logits = logits_V.numpy()
    keys_V = _every(len(logits)) if keys_V is None else keys_V
    bits_V = _bits(seed, position, keys_V)
    best = int(logits.argmax())
    candidates = _candidates(logits, factor / temperature, best, bits_V)
    scores = torch.from_numpy(logits[candidates]).double().mul_(factor).div_(temperature)
    return int(candidates[int(scores.add_(_noise(bits_V[candidates])).argmax())])


def gumbel(seed: int, position: int, tokens: np.ndarray) -> torch.Tensor:
    """Gumbel noise of tokens at a place, float64: with it, the largest logit is a draw from their softmax."""
    return _noise(_bits(seed, position, token_keys(tokens)))


def uniforms(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Numbers in (0, 1), float64, for each of these tokens: hashes of a 64-bit seed, a place and the token, by the
    finaliser of splitmix64 (Steele et al. 2014)."""
    return _numbers(_bits(seed, position, token_keys(tokens)))


def token_keys(tokens: np.ndarray) -> np.ndarray:
    """What of the hashes is the tokens' alone, uint64."""
    keys: np.ndarray = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA)
    return keys


@lru_cache(maxsize=8)
def _every(vocabulary: int) -> np.ndarray:
    return token_keys(np.arange(vocabulary))


def _candidates(logits: np.ndarray, heat: float, best: int, bits_V: np.ndarray) -> np.ndarray:
    """Places of all tokens whose sum may be as large as that of `best`, in rising order.

    A token with uniform number u reaches a sum s if -log u < exp(logit - s), and 1 - u is less than that.
    """
    least = float(logits[best]) * heat + float(_noise(bits_V[best : best + 1]))
    spare = _SPARE + _SPARE_PART * heat * max(abs(float(logits[best])), abs(least))
    with np.errstate(over="ignore", invalid="ignore"):
        reach_V = logits * np.float32(heat)
        reach_V -= np.float32(least - spare)
    if not np.isfinite(reach_V[best]):  # float32 cannot hold the sums: a tiny temperature, a huge logit
        return np.arange(len(logits))
    np.exp(np.minimum(reach_V, _SURE, out=reach_V), out=reach_V)
    # 1 - u, short of half a step, as float32: numbers near 0 keep their digits.
    rest_V = (~bits_V >> np.uint64(12)).view(np.int64).astype(np.float32)
    rest_V *= np.float32(2.0**-52)
    return np.flatnonzero(rest_V <= reach_V)


def _noise(bits_V: np.ndarray) -> torch.Tensor:
    return -(-torch.from_numpy(_numbers(bits_V)).log_()).log_()


def _numbers(bits_V: np.ndarray) -> np.ndarray:
    numbers: np.ndarray = (bits_V >> np.uint64(12)).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-52
    return numbers


def _bits(seed: int, position: int, keys_V: np.ndarray) -> np.ndarray:
    value_V = keys_V + np.uint64(_mix((seed & _MASK) ^ _mix((position + _GAMMA) & _MASK)))
    shifted_V = np.empty_like(value_V)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value_V ^= np.right_shift(value_V, np.uint64(shift), out=shifted_V)
        value_V *= np.uint64(factor)
    value_V ^= np.right_shift(value_V, np.uint64(31), out=shifted_V)
    return value_V


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
