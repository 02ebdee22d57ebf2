"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in upper layers where a model asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import read_config
from lowlat.models.decoder import Decoder, Family

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


def qwen2(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A Qwen2. Raises `UnsupportedModelError` or `CheckpointError`."""
    config = read_config({"use_sliding_window": False, **checkpoint.config})
    return Decoder(checkpoint, build, progress, config, Family(qkv_bias=True))
