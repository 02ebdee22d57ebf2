"""Random values for every kind of weight, generated in pieces: a tensor depends on the seed and its own name alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch

from lowlat.layers import fp4, fp8
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.names import TensorSpec, WeightSpec

_PIECE = 1 << 22
_CODE_SPREAD = 64.0
"""Standard deviation of e4m3 codes' values: well inside 448."""


def tensor_pieces(weight: WeightSpec, tensor: TensorSpec, config: DeepseekConfig, seed: int) -> Iterator[bytes]:
    """The bytes of one stored tensor, a few megabytes at a time."""
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    count = int(np.prod(tensor.shape))
    for start in range(0, count, _PIECE):
        size = min(_PIECE, count - start)
        yield _piece(weight, tensor, config, random, start, size)


def _piece(
    weight: WeightSpec, tensor: TensorSpec, config: DeepseekConfig, random: np.random.Generator, start: int, size: int
) -> bytes:
    if tensor.dtype == "F8_E4M3":
        values = torch.from_numpy(random.standard_normal(size, dtype=np.float32)) * _CODE_SPREAD
        return fp8.e4m3_encode(values).numpy().tobytes()
    if tensor.dtype == "I8":
        values = torch.from_numpy(random.standard_normal(2 * size, dtype=np.float32)) * 2
        return fp4.pack(fp4.e2m1_encode(values)).numpy().tobytes()
    if tensor.dtype == "F8_E8M0":
        return _scales(weight, random, size).tobytes()
    if tensor.dtype == "I64":
        return _hash_experts(config, random, tensor, start, size).tobytes()
    values32 = _plain(weight.name, weight.shape, config, random, start, size)
    if tensor.dtype == "F32":
        return values32.tobytes()
    return torch.from_numpy(values32).to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def _scales(weight: WeightSpec, random: np.random.Generator, size: int) -> np.ndarray:
    """Powers of two that bring a weight to about 1 / sqrt(inputs), with a little variety."""
    inputs = weight.shape[1] if weight.kind != "table" else 1
    spread = 2.0 if weight.kind == "fp4" else _CODE_SPREAD
    exponent = int(np.round(np.log2(1 / (np.sqrt(inputs) * spread))))
    return (127 + exponent + random.integers(-1, 2, size)).astype(np.uint8)


def _hash_experts(
    config: DeepseekConfig, random: np.random.Generator, tensor: TensorSpec, start: int, size: int
) -> np.ndarray:
    """Different experts for each token."""
    count = tensor.shape[1]
    first = np.arange(start, start + size) // count
    offset = np.arange(start, start + size) % count
    base = (first * 2654435761 + int(random.integers(1 << 20))) % config.n_routed_experts
    return ((base + offset * 3) % config.n_routed_experts if config.n_routed_experts % 3 else base + offset) % (
        config.n_routed_experts
    )


def _plain(
    name: str, shape: tuple[int, ...], config: DeepseekConfig, random: np.random.Generator, start: int, size: int
) -> np.ndarray:
    normal = random.standard_normal(size, dtype=np.float32)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in leaf or leaf in ("q_weight", "k_weight"):
        return 1 + 0.1 * normal
    if leaf.endswith("_base"):
        return _mix_base(name, config, normal)
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return 0.5 + 0.1 * normal
    if leaf == "attn_sink":
        return normal
    if leaf in ("bias", "bias_vl"):
        return 0.1 * normal
    if leaf == "ape":
        return 0.5 * normal
    if leaf == "embed" and not name.startswith("mtp."):
        return normal
    if leaf == "head" and not name.startswith("mtp."):
        return normal * np.float32(3 / np.sqrt(shape[1]))
    if leaf == "proj":  # the confidence head reads streams before their norm, which grow
        return normal * np.float32(0.2 / np.sqrt(shape[-1]))
    return normal * np.float32(1 / np.sqrt(shape[-1]))


def _mix_base(name: str, config: DeepseekConfig, normal: np.ndarray) -> np.ndarray:
    """Each layer reads mostly one stream and keeps the streams mostly apart, as trained models begin."""
    n = config.hc_mult
    if len(normal) == n:
        return normal
    layer = int(name.split(".")[1])
    base = np.zeros(n * (2 + n), dtype=np.float32)
    base[:n] = -3
    base[layer % n] = 3
    base[2 * n :] = (3 * (2 * np.eye(n) - 1)).reshape(-1)
    return base * np.float32(0.3) + 0.3 * normal
