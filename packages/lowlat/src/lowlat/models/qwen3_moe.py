"""Qwen3-MoE: Qwen3 with a mixture of small experts in most layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.layers.moe import TopKRouter
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import DecoderConfig, count, read_config
from lowlat.models.decoder import MLP, Decoder, Family, GatedMLP
from lowlat.models.mixtral import mixture_of
from lowlat.models.weights import Weights

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


def qwen3_moe(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A Qwen3-MoE. Raises `UnsupportedModelError` or `CheckpointError`."""
    fields = checkpoint.config
    # With `use_sliding_window` all layers of this family have the window, whatever `max_window_layers` says.
    config = read_config({"use_sliding_window": False, **fields, "max_window_layers": 0})
    experts = count(fields, "num_experts", "num_local_experts")
    chosen = count({"num_experts_per_tok": 8} | fields, "num_experts_per_tok")
    intermediate = count(fields, "moe_intermediate_size")
    every = count({"decoder_sparse_step": 1} | fields, "decoder_sparse_step")
    dense = fields.get("mlp_only_layers") or []
    normalised = bool(fields.get("norm_topk_prob", False))

    def mlp(weights: Weights, build: BuildContext, config: DecoderConfig, index: int) -> MLP:
        if index in dense or (index + 1) % every:
            return GatedMLP(weights, build, config, index)
        name = f"model.layers.{index}.mlp"
        router = TopKRouter(weights.read(f"{name}.gate.weight"), None, chosen, normalised=normalised)
        each = [f"{name}.experts.{expert}" for expert in range(experts)]
        names = [(f"{expert}.gate_proj", f"{expert}.up_proj", f"{expert}.down_proj") for expert in each]
        return mixture_of(weights, build, config, intermediate, router, names)

    bias = config.attention_bias
    family = Family(qkv_bias=bias, output_bias=bias, head_norms=True, mlp=mlp)
    return Decoder(checkpoint, build, progress, config, family)
