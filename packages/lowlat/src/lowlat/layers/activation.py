"""Gated activations: (gate_RI, up_RI) to [R, I]. They may overwrite their inputs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
import torch.nn.functional as F

GatedActivation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gated_silu(gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
    """SwiGLU: silu(gate) up (Shazeer 2020)."""
    return F.silu(gate_RI).mul_(up_RI)


def gated_gelu_tanh(gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
    """GeGLU with the tanh form of GELU: gelu(gate) up."""
    return F.gelu(gate_RI, approximate="tanh").mul_(up_RI)


class ClampedSwiglu(msgspec.Struct, frozen=True):
    """gate sigmoid(alpha gate) (up + 1), gate at most `limit` and up within ± `limit` (gpt-oss model card)."""

    alpha: float
    limit: float

    def __call__(self, gate_RI: torch.Tensor, up_RI: torch.Tensor) -> torch.Tensor:
        """Compute."""
        gate_RI = gate_RI.clamp(max=self.limit)
        return torch.sigmoid(gate_RI * self.alpha).mul_(gate_RI).mul_(up_RI.clamp(-self.limit, self.limit).add_(1))


GATED: dict[str, GatedActivation] = {"silu": gated_silu, "gelu_pytorch_tanh": gated_gelu_tanh}
"""By the name that config.json uses for the activation of the gate."""
