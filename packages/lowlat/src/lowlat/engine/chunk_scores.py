"""What a step with chunks tells of prompts: log-probabilities of their tokens, and of labels that were asked for.

Legend of shape suffixes: M rows to score and then rows to read, of all chunks in order; V vocabulary.
"""

from __future__ import annotations

import msgspec
import torch

from lowlat.engine.batch import StepPlan
from lowlat.engine.request import TokenLogprobs
from lowlat.engine.sampler import label_logprobs, token_logprobs


class ChunkScores(msgspec.Struct, frozen=True):
    """As `StepResult` wants them: for each chunk that asks, in order."""

    prompt: list[list[TokenLogprobs]]
    labels: list[list[list[float]]]
    bad_slots: list[int]
    """Slots of chunks of which a row is not numbers."""


def score_chunks(plan: StepPlan, logits_MV: torch.Tensor) -> ChunkScores:
    """Log-probabilities of the chunks' targets, then of their labels."""
    prompt, labels, slots = [], [], []
    row = 0
    for chunk in plan.chunks:
        if chunk.targets:
            places = enumerate(chunk.targets, start=row)
            prompt.append([token_logprobs(logits_MV[n], token, chunk.logprobs) for n, token in places if token >= 0])
            row += len(chunk.targets)
            slots += [chunk.slot] * len(chunk.targets)
    for chunk in plan.chunks:
        if chunk.read_rows:
            labels.append(label_logprobs(logits_MV[row : row + len(chunk.read_rows)], chunk.labels))
            row += len(chunk.read_rows)
            slots += [chunk.slot] * len(chunk.read_rows)
    usable = logits_MV.amax(-1).isfinite().tolist()
    return ChunkScores(prompt, labels, sorted({slot for slot, good in zip(slots, usable, strict=True) if not good}))
