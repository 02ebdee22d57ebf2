"""gpt-oss, text: biases everywhere, attention sinks, windows in every other layer, YaRN, experts in MXFP4.

Legend of shape suffixes: E experts, O output features, I input features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lowlat.layers.activation import ClampedSwiglu
from lowlat.layers.fp4 import dequantise_groups
from lowlat.layers.moe import Experts, MixtureOfExperts, TopKRouter
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import DecoderConfig, count, read_config
from lowlat.models.decoder import MLP, Decoder, Family
from lowlat.models.weights import Weights

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A gpt-oss. Raises `UnsupportedModelError` or `CheckpointError`."""
    given = {name: value for name, value in checkpoint.config.items() if value is not None}
    layers = range(count(given, "num_hidden_layers"))
    defaults: dict[str, Any] = {
        "attention_bias": True,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["full_attention" if index % 2 else "sliding_attention" for index in layers],
        "num_experts_per_tok": 4,
    }
    if "rope_parameters" not in given and "rope_scaling" not in given:
        defaults["rope_scaling"] = _YARN
    fields = defaults | given
    config = read_config(fields, rope_theta=150000.0)
    experts = count(fields, "num_local_experts", "num_experts")
    chosen = count(fields, "num_experts_per_tok", "experts_per_token")
    activation = ClampedSwiglu(float(fields.get("swiglu_alpha", 1.702)), float(fields.get("swiglu_limit", 7.0)))

    def mixture(weights: Weights, build: BuildContext, config: DecoderConfig, index: int) -> MLP:
        name = f"model.layers.{index}.mlp"
        shard, pack = build.communicator.shard, build.platform.pack
        part = shard.part(config.intermediate_size)
        router = TopKRouter(
            weights.read(f"{name}.router.weight"), weights.read(f"{name}.router.bias"), chosen, normalised=True
        )
        gate_up, down = [], []
        for expert in range(experts):
            weight_OI, bias_O = _expert(weights, f"{name}.experts.gate_up_proj", expert, build.dtype)
            # Rows of gate and up alternate in the checkpoint; here each is one block.
            rows = torch.cat([weight_OI[0::2][part], weight_OI[1::2][part]])
            gate_up.append(pack(rows, torch.cat([bias_O[0::2][part], bias_O[1::2][part]])))
            weight_OI, bias_O = _expert(weights, f"{name}.experts.down_proj", expert, build.dtype)
            # Ranks' results are summed, so one alone adds the bias.
            down.append(pack(weight_OI[:, part].contiguous(), bias_O if shard.rank == 0 else None))
        experts_of_layer = Experts(gate_up, down, activation, min_rows=build.platform.min_rows)
        return MixtureOfExperts(router, experts_of_layer, build.communicator.all_reduce)

    bias = config.attention_bias
    family = Family(qkv_bias=bias, output_bias=bias, sinks=True, mlp=mixture)
    return Decoder(checkpoint, build, progress, config, family)


def _expert(weights: Weights, name: str, expert: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One expert's weight [out, in] and bias [out]: of MXFP4 blocks, or of plain numbers stored [E, in, out]."""
    rows = slice(expert, expert + 1)
    bias_O = weights.read(f"{name}_bias", rows=rows)[0]
    if f"{name}_blocks" not in weights:
        return weights.read(name, rows=rows)[0].t(), bias_O
    packed = weights.stored(f"{name}_blocks", rows=rows)[0].flatten(1)
    scales = weights.stored(f"{name}_scales", rows=rows)[0]
    return dequantise_groups(packed, scales).to(dtype), bias_O
