"""Number formats of DeepSeek-V4.1, written from docs/models/deepseek_v41.md with tables and searches: slow and plain.

Nothing here is shared with the package under test.
"""

from __future__ import annotations

import numpy as np


def _e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


E4M3 = np.array([_e4m3_value(code) for code in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _nearest(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Index of the nearest magnitude, ties to the even index, saturating."""
    x = np.abs(np.asarray(x, dtype=np.float64))
    high = np.clip(np.searchsorted(magnitudes, x), 0, len(magnitudes) - 1)
    low = np.maximum(high - 1, 0)
    to_low, to_high = x - magnitudes[low], magnitudes[high] - x
    choose_low = (to_low < to_high) | ((to_low == to_high) & (low % 2 == 0))
    return np.where(choose_low, low, high)


def e4m3_round(x: np.ndarray) -> np.ndarray:
    """Nearest e4m3 value, ties to even, saturating at 448."""
    magnitudes = E4M3[:127]
    return np.copysign(magnitudes[_nearest(x, magnitudes)], x)


def e2m1_round(x: np.ndarray) -> np.ndarray:
    """Nearest e2m1 value, ties to the even code, saturating at 6."""
    magnitudes = E2M1[:8]
    return np.copysign(magnitudes[_nearest(x, magnitudes)], x)


def power_of_two_above(x: np.ndarray) -> np.ndarray:
    """The smallest power of two that is at least `x` (positive), without logarithms."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))


def _blocks(x: np.ndarray, size: int) -> np.ndarray:
    assert x.shape[-1] % size == 0, (x.shape, size)
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def fp8_activation(x: np.ndarray, group: int) -> np.ndarray:
    """Quantise and dequantise activations: e4m3 with a power-of-two scale for each `group` values."""
    blocks = _blocks(x, group)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-10)
    scale = power_of_two_above(np.float32(amax) / np.float32(448.0))
    return (e4m3_round(blocks / scale) * scale).reshape(x.shape)


def fp8_entry(x: np.ndarray, group: int = 32) -> np.ndarray:
    """Sliding-window KV: e4m3, a power-of-two scale for each 32 values, never below 2^-13."""
    blocks = _blocks(x, group)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = power_of_two_above(np.maximum(np.float32(amax) / np.float32(448.0), np.float32(1e-4)).astype(np.float64))
    return (e4m3_round(blocks / scale) * scale).reshape(x.shape)


def v4_entry(x: np.ndarray) -> np.ndarray:
    """V4's KV: e4m3 with a scale for each 64 values, and the last 64 values as bfloat16."""
    return np.concatenate([fp8_entry(x[..., :-64], 64), bf16(x[..., -64:])], -1)


def fp4_entry(x: np.ndarray) -> np.ndarray:
    """Compressed KV: e2m1 with an e4m3 scale for each 16 values."""
    blocks = _blocks(x, 16)
    amax = np.abs(blocks).max(-1, keepdims=True)
    scale = e4m3_round(np.clip(amax / 6.0, 2.0**-9, 448.0))
    return (e2m1_round(blocks / scale) * scale).reshape(x.shape)


def fp4_index(x: np.ndarray) -> np.ndarray:
    """Index keys and queries: e2m1 with a power-of-two scale for each 32 values."""
    blocks = _blocks(x, 32)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), 6 * 2.0**-126)
    scale = power_of_two_above(amax / 6.0)
    return (e2m1_round(blocks / scale) * scale).reshape(x.shape)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32, then bfloat16 with ties to even: how a float32 result is stored."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)
