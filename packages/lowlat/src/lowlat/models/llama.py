"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU. SmolLM2 and Mistral are Llamas too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import read_config
from lowlat.models.decoder import Decoder, Family

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


def llama(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A Llama. Raises `UnsupportedModelError` or `CheckpointError`."""
    config = read_config(checkpoint.config)
    family = Family(qkv_bias=config.attention_bias, output_bias=config.attention_bias)
    return Decoder(checkpoint, build, progress, config, family)
