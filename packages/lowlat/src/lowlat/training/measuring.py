"""Acceptance on held-out text, counted as the engine makes its steps.

Legend of shape suffixes: S sequences, T tokens, A anchors of a sequence, P guesses of a block, X steps.
"""

from __future__ import annotations

import torch

from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.draft_loss import blocks
from lowlat.training.recipe import Measured
from lowlat.training.seeds import begin
from lowlat.training.target import Target, Written

_ANCHORS = 16
"""Of each sequence at a time."""


@torch.no_grad()
def measure(network: DraftNetwork, target: Target, parts: list[Written], temperature: float) -> Measured:
    """Acceptance in steps through what the target has written: each begins behind the tokens that the one before
    brought. The same at every call."""
    begin(0, "measure", 0, target.device)
    steps = []
    for written in parts:
        sequences = len(written.tokens_ST)
        every = torch.arange(int(written.prompt_S[0]), written.tokens_ST.shape[1] - network.config.proposals)
        rights, wholes = [], []
        for part in torch.split(every, _ANCHORS):
            anchors_SA = part.to(target.device).expand(sequences, -1)
            with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
                found = blocks(network, target, written, anchors_SA)
            rights.append(found.right().view(sequences, len(part), -1).cpu())
            # A block counts where its whole length was written before the end.
            wholes.append(found.known_QP.all(1).view(sequences, -1).cpu())
        right_SAP = torch.cat(rights, 1)
        steps.append(right_SAP[walked(right_SAP.sum(2)) & torch.cat(wholes, 1)])
    right_XP = torch.cat(steps)
    by_position = right_XP.float().mean(0).tolist()
    return Measured(temperature, by_position, sum(by_position), len(right_XP))


def walked(accepted_SA: torch.Tensor) -> torch.Tensor:
    """[S, A]: at which places steps begin, if the step at each place accepts so many tokens."""
    begins_SA = torch.zeros_like(accepted_SA, dtype=torch.bool)
    for row_A, begins_A in zip(accepted_SA.tolist(), begins_SA, strict=True):
        place = 0
        while place < len(row_A):
            begins_A[place] = True
            place += 1 + row_A[place]
    return begins_SA
