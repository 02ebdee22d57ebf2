"""Gemma 3, text: norms around attention and MLP, QK-norm, GeGLU, and five layers with a sliding window for each that
sees all tokens. Layers with a window rotate by frequencies of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import count, read_config
from lowlat.models.decoder import Decoder, Family

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

_PATTERN = 6
"""Every sixth layer sees all tokens, where the configuration does not say."""
_NORMS = (
    "input_layernorm",
    "pre_feedforward_layernorm",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)


def gemma3(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A Gemma 3 text model. Raises `UnsupportedModelError` or `CheckpointError`."""
    config = read_config(_with_defaults(checkpoint.config), rope_theta=1e6)
    bias = config.attention_bias
    scale = count({"query_pre_attn_scalar": 256} | checkpoint.config, "query_pre_attn_scalar")
    family = Family(
        qkv_bias=bias,
        output_bias=bias,
        head_norms=True,
        attention_scale=1 / math.sqrt(scale),
        norm_names=_NORMS,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.hidden_size),
        logit_cap=checkpoint.config.get("final_logit_softcapping"),
    )
    return Decoder(checkpoint, build, progress, config, family)


def _with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """What published configurations leave out."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERN
    layers = range(count(config, "num_hidden_layers"))
    defaults = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 4096,
        "rope_local_base_freq": 10000.0,
        "layer_types": ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in layers],
    }
    return defaults | {name: value for name, value in config.items() if value is not None}
