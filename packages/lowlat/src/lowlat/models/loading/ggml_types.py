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


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4, _float32),
    1: GGMLType("F16", 1, 2, _float16),
    2: GGMLType("Q4_0", 32, 18, _q4_0),
    3: GGMLType("Q4_1", 32, 20, _q4_1),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34, _q8_0),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
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
    39: GGMLType("MXFP4", 32, 17),
}
"""By the number that GGUF files use."""
