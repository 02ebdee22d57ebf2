"""The number formats of GGUF tensors: block sizes, and functions from blocks to float32.

To support one more format, write its function and name it in its row of the table. Formulas: ggml's block layouts,
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Shapes in names: R rows, N blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Blocks = np.ndarray[Any, np.dtype[np.uint8]]
Values = np.ndarray[Any, np.dtype[np.float32]]


class GGMLType(NamedTuple):
    """One format: `block_values` consecutive values of a row are stored in `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int
    to_float32: Callable[[Blocks], Values] | None = None
    """uint8 [rows, bytes of a row] to float32 [rows, values of a row]; None: not supported (yet)."""


def _float32(rows: Blocks) -> Values:
    return np.ascontiguousarray(rows).view("<f4")


def _float16(rows: Blocks) -> Values:
    return np.ascontiguousarray(rows).view("<f2").astype(np.float32)


def _bfloat16(rows: Blocks) -> Values:
    # A bfloat16 is the upper half of a float32.
    return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scale(blocks_RNB: Blocks, at: int) -> Values:
    """The float16 at byte `at` of every block, as float32 [R, N, 1]."""
    return np.ascontiguousarray(blocks_RNB[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(bytes_RNB: Blocks) -> Blocks:
    """Two 4-bit numbers a byte: first the low halves of all bytes of a block, then the high halves."""
    return np.concatenate([bytes_RNB & 15, bytes_RNB >> 4], axis=-1)


def _q4_0(rows: Blocks) -> Values:
    """Block: float16 d, 32 x 4 bits q. Value = d (q - 8)."""
    blocks_RNB = rows.reshape(len(rows), -1, 18)
    values = _nibbles(blocks_RNB[..., 2:]).astype(np.float32)
    values -= 8.0
    values *= _scale(blocks_RNB, 0)
    return values.reshape(len(rows), -1)


def _q4_1(rows: Blocks) -> Values:
    """Block: float16 d, float16 m, 32 x 4 bits q. Value = d q + m."""
    blocks_RNB = rows.reshape(len(rows), -1, 20)
    values = _nibbles(blocks_RNB[..., 4:]).astype(np.float32)
    values *= _scale(blocks_RNB, 0)
    values += _scale(blocks_RNB, 2)
    return values.reshape(len(rows), -1)


def _q8_0(rows: Blocks) -> Values:
    """Block: float16 d, 32 x int8 q. Value = d q."""
    blocks_RNB = rows.reshape(len(rows), -1, 34)
    values = np.ascontiguousarray(blocks_RNB[..., 2:]).view(np.int8).astype(np.float32)
    values *= _scale(blocks_RNB, 0)
    return values.reshape(len(rows), -1)


def _fifth_bits(bytes_RN4: Blocks) -> Blocks:
    """The 32 bits of each block's 4 bytes, lowest first, as the value 16 or 0: uint8 [R, N, 32]."""
    return np.unpackbits(bytes_RN4, axis=-1, bitorder="little") * np.uint8(16)


def _q5_0(rows: Blocks) -> Values:
    """Block: float16 d, 32 high bits, 32 x 4 low bits of q. Value = d (q - 16)."""
    blocks_RNB = rows.reshape(len(rows), -1, 22)
    values = (_nibbles(blocks_RNB[..., 6:]) | _fifth_bits(blocks_RNB[..., 2:6])).astype(np.float32)
    values -= 16.0
    values *= _scale(blocks_RNB, 0)
    return values.reshape(len(rows), -1)


def _q5_1(rows: Blocks) -> Values:
    """Block: float16 d, float16 m, 32 high bits, 32 x 4 low bits of q. Value = d q + m."""
    blocks_RNB = rows.reshape(len(rows), -1, 24)
    values = (_nibbles(blocks_RNB[..., 8:]) | _fifth_bits(blocks_RNB[..., 4:8])).astype(np.float32)
    values *= _scale(blocks_RNB, 0)
    values += _scale(blocks_RNB, 2)
    return values.reshape(len(rows), -1)


def _k_scales(bytes_RN12: Blocks) -> tuple[Values, Values]:
    """Eight 6-bit scales and eight 6-bit minima, packed into 12 bytes: float32 [R, N, 8, 1] each."""
    low, middle, high = bytes_RN12[..., 0:4], bytes_RN12[..., 4:8], bytes_RN12[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales.astype(np.float32)[..., None], minima.astype(np.float32)[..., None]


def _q4_k(rows: Blocks) -> Values:
    """Block: float16 d, float16 m, 12 bytes of scales s and minima t, 256 x 4 bits q, in 8 groups of 32.

    Value = d s q - m t. Each 32 bytes hold one group in their low halves and the next in their high halves.
    """
    blocks_RNB = rows.reshape(len(rows), -1, 144)
    scales, minima = _k_scales(blocks_RNB[..., 4:16])
    quants = _nibbles(blocks_RNB[..., 16:].reshape(*blocks_RNB.shape[:2], 4, 32))
    return _k_values(blocks_RNB, quants, scales, minima)


def _q5_k(rows: Blocks) -> Values:
    """Block: as Q4_K, with 32 bytes of fifth bits before the low ones: bit g of byte i is for value i of group g."""
    blocks_RNB = rows.reshape(len(rows), -1, 176)
    scales, minima = _k_scales(blocks_RNB[..., 4:16])
    low = _nibbles(blocks_RNB[..., 48:].reshape(*blocks_RNB.shape[:2], 4, 32)).reshape(*blocks_RNB.shape[:2], 8, 32)
    high = (blocks_RNB[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _k_values(blocks_RNB, low | high * np.uint8(16), scales, minima)


def _k_values(blocks_RNB: Blocks, quants: Blocks, scales: Values, minima: Values) -> Values:
    values = quants.reshape(*blocks_RNB.shape[:2], 8, 32).astype(np.float32)
    values *= _scale(blocks_RNB, 0)[..., None] * scales
    values -= _scale(blocks_RNB, 2)[..., None] * minima
    return values.reshape(len(blocks_RNB), -1)


def _q6_k(rows: Blocks) -> Values:
    """Block: 256 x 4 low bits, 256 x 2 high bits, 16 int8 scales s, float16 d. Value = d s (q - 32), groups of 16.

    Each half of 128 values has 64 bytes of low and 32 bytes of high bits: the low halves of the first and the last
    32 bytes hold values 0-63, the high halves values 64-127; bits 2 g and 2 g + 1 of a high byte are for group g of 32.
    """
    blocks_RNB = rows.reshape(len(rows), -1, 210)
    leading = blocks_RNB.shape[:2]
    low = _nibbles(blocks_RNB[..., :128].reshape(*leading, 2, 64)).reshape(*leading, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks_RNB[..., 128:192].reshape(*leading, 2, 1, 32) >> shifts & 3
    scales = np.ascontiguousarray(blocks_RNB[..., 192:208]).view(np.int8).astype(np.float32)[..., None]
    values = (low | high * np.uint8(16)).reshape(*leading, 16, 16).astype(np.float32)
    values -= 32.0
    values *= _scale(blocks_RNB, 208)[..., None] * scales
    return values.reshape(len(rows), -1)


_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def _mxfp4(rows: Blocks) -> Values:
    """Block: exponent byte e, 32 x 4 bits of e2m1 q. Value = q 2^(e - 127) (OCP Microscaling Formats 1.0)."""
    blocks_RNB = rows.reshape(len(rows), -1, 17)
    values = _E2M1_DOUBLED[_nibbles(blocks_RNB[..., 1:])]
    # The table holds 2 q, so that its entries are whole: half of the scale makes up for it.
    with np.errstate(over="ignore"):  # the largest exponents make infinities
        values *= np.ldexp(np.float32(1), blocks_RNB[..., :1].astype(np.int32) - 128)
    return values.reshape(len(rows), -1)


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, _float32),
    1: GGMLType("F16", 1, 2, _float16),
    2: GGMLType("Q4_0", 32, 18, _q4_0),
    3: GGMLType("Q4_1", 32, 20, _q4_1),
    6: GGMLType("Q5_0", 32, 22, _q5_0),
    7: GGMLType("Q5_1", 32, 24, _q5_1),
    8: GGMLType("Q8_0", 32, 34, _q8_0),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144, _q4_k),
    13: GGMLType("Q5_K", 256, 176, _q5_k),
    14: GGMLType("Q6_K", 256, 210, _q6_k),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2, _bfloat16),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17, _mxfp4),
}
"""By the number that GGUF files use."""
