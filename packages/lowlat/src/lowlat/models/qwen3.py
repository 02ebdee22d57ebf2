"""Qwen3: Llama with RMSNorm over each query and key head (QK-norm)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import read_config
from lowlat.models.decoder import Decoder, Family

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


def qwen3(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A dense Qwen3. Raises `UnsupportedModelError` or `CheckpointError`."""
    config = read_config({"use_sliding_window": False, **checkpoint.config})
    bias = config.attention_bias
    return Decoder(checkpoint, build, progress, config, Family(qkv_bias=bias, output_bias=bias, head_norms=True))
