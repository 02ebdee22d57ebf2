"""Mixtral: Llama with a mixture of experts in every layer; the chosen experts' weights sum to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.layers.activation import GATED
from lowlat.layers.linear import split_inputs, split_outputs
from lowlat.layers.moe import Experts, MixtureOfExperts, TopKRouter
from lowlat.models.base import BuildContext, LoadProgress
from lowlat.models.config import DecoderConfig, count, read_config
from lowlat.models.decoder import MLP, Decoder, Family
from lowlat.models.weights import Weights

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint


def mixtral(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Decoder:
    """A Mixtral. Raises `UnsupportedModelError` or `CheckpointError`."""
    config = read_config(checkpoint.config, rope_theta=1e6)
    experts = count(checkpoint.config, "num_local_experts")
    chosen = count({"num_experts_per_tok": 2} | checkpoint.config, "num_experts_per_tok")

    def mixture(weights: Weights, build: BuildContext, config: DecoderConfig, index: int) -> MLP:
        name = f"model.layers.{index}.block_sparse_moe"
        router = TopKRouter(weights.read(f"{name}.gate.weight"), None, chosen, normalised=True)
        names = [
            (f"{name}.experts.{expert}.w1", f"{name}.experts.{expert}.w3", f"{name}.experts.{expert}.w2")
            for expert in range(experts)
        ]
        return mixture_of(weights, build, config, config.intermediate_size, router, names)

    return Decoder(checkpoint, build, progress, config, Family(mlp=mixture))


def mixture_of(
    weights: Weights,
    build: BuildContext,
    config: DecoderConfig,
    intermediate: int,
    router: TopKRouter,
    names: list[tuple[str, str, str]],
) -> MixtureOfExperts:
    """A mixture whose experts are stored one by one: `names` are those of gate, up and down, without `.weight`.

    A rank holds the same part of every expert's `intermediate` features.
    """
    platform, communicator = build.platform, build.communicator
    part = communicator.shard.part(intermediate)
    gate_up, down = [], []
    for gate_name, up_name, down_name in names:
        parts = [(gate_name, part), (up_name, part)]
        gate_up.append(split_outputs(weights.read, platform, parts, bias=False))
        down.append(split_inputs(weights.read, platform, communicator.shard, down_name, part, bias=False))
    experts = Experts(gate_up, down, GATED[config.activation], min_rows=platform.min_rows)
    return MixtureOfExperts(router, experts, communicator.all_reduce)
