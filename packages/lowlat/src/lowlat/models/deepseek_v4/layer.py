"""The feed-forward sublayer, and one layer of two sublayers on the residual streams.

Legend of shape suffixes: R rows, H hidden, n streams, E experts, K experts a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowlat.layers.deepseek_moe import mixture, route
from lowlat.layers.deepseek_numerics import Numerics, project, rms_norm
from lowlat.layers.hyper_connections import Mix, collapse, mix, rebuild
from lowlat.models.deepseek_v4.config import DeepseekConfig
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import Communicator

Sublayer = Callable[[torch.Tensor], torch.Tensor]


class FeedForward:
    """Router and experts. `experts` and `count`: how many there are, and how many a row takes."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: DeepseekConfig,
        communicator: Communicator,
        *,
        experts: int,
        count: int,
        hashed: bool = False,
        draft: bool = False,
    ) -> None:
        # Parts of 32 keep FP4 groups, FP8 scales and quantised activations whole.
        inner = communicator.shard.part(config.moe_intermediate_size, 32)
        self.config, self.numerics, self.count = config, weights.numerics, count
        self.all_reduce = communicator.all_reduce
        self.gate = weights.plain(f"{name}.gate")
        self.table = weights.raw(f"{name}.gate.tid2eid").to(torch.int64) if hashed else None
        self.bias = None if hashed else weights.values(f"{name}.gate.bias")
        self.image_bias = weights.values(f"{name}.gate.bias_vl") if config.v41 and not draft else None
        self.experts = [weights.expert(f"{name}.experts.{index}", inner, routed=True) for index in range(experts)]
        self.shared = weights.expert(f"{name}.shared_experts", inner, routed=False)

    def forward(self, x_RH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        """[R, H], summed over ranks."""
        config, numerics = self.config, self.numerics
        bias_RE, chosen_RK = self.bias, None
        if self.table is not None:
            chosen_RK = self.table[tokens_R]
        elif self.bias is not None and self.image_bias is not None and config.image_token_id is not None:
            image_R1 = (tokens_R == config.image_token_id).unsqueeze(1)
            bias_RE = torch.where(image_R1, self.image_bias, self.bias)
        ids, shares = route(
            project(x_RH, self.gate, numerics),
            self.count,
            config.routed_scaling_factor,
            bias_RE=bias_RE,
            chosen_RK=chosen_RK,
        )
        out_RH = mixture(x_RH, ids, shares, self.experts, self.shared, config.swiglu_limit, numerics)
        return numerics.store(self.all_reduce(out_RH))


class Streams:
    """Reads and writes the residual streams around the sublayers of one layer."""

    def __init__(self, weights: Weights, name: str, config: DeepseekConfig) -> None:
        self.config = config
        self.numerics: Numerics = weights.numerics
        self.mixes = [weights.mix(f"{name}.hc_{kind}") for kind in ("attn", "ffn")]
        self.norms = [weights.values(f"{name}.{kind}_norm.weight") for kind in ("attn", "ffn")]

    def mix(self, streams_RnH: torch.Tensor, which: int) -> Mix:
        """The mix of sublayer `which` (0 attention, 1 feed-forward)."""
        config = self.config
        return mix(
            streams_RnH,
            self.mixes[which],
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            rms_eps=config.rms_norm_eps,
        )

    def read(self, streams_RnH: torch.Tensor, pre_Rn: torch.Tensor, which: int) -> torch.Tensor:
        """A sublayer's input: collapsed and normed, [R, H]."""
        x_RH = self.numerics.store(collapse(streams_RnH, pre_Rn))
        return rms_norm(x_RH, self.norms[which], self.config.rms_norm_eps, self.numerics)

    def write(self, streams_RnH: torch.Tensor, out_RH: torch.Tensor, mixed: Mix) -> torch.Tensor:
        """The streams after a sublayer."""
        return self.numerics.store(rebuild(streams_RnH, out_RH, mixed))

    def sublayer(
        self, streams_RnH: torch.Tensor, pre_Rn: torch.Tensor, which: int, compute: Sublayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One sublayer: the new streams, and the `pre` for whoever reads them next in V4.1's wiring.

        V4.1 reads with `pre_Rn`, of the sublayer before, so its mix can run beside the sublayer; V4 reads with its own.
        """
        mixed = self.mix(streams_RnH, which)
        x_RH = self.read(streams_RnH, pre_Rn if self.config.v41 else mixed.pre, which)
        return self.write(streams_RnH, compute(x_RH), mixed), mixed.pre


def first_pre(rows: int, n: int, numerics: Numerics) -> torch.Tensor:
    """What the first sublayer of V4.1's wiring reads with: stream 0 alone."""
    pre = torch.zeros(rows, n, dtype=numerics.compute)
    pre[:, 0] = 1
    return pre
