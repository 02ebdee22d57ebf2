"""Distance between what kernels computed and what the general path computed, selections apart from values.

torch is imported where it is used, so that reading a spec stays light.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from lowlat_plugin.spec import Bound, Metric
from lowlat_plugin.steps import Selection

if TYPE_CHECKING:
    from torch import Tensor


class Measurement(msgspec.Struct, frozen=True):
    """One output held against its bound. `measured` is the worst over the tensor; infinity: NaN or a wrong shape."""

    output: str
    metric: str
    limit: float
    measured: float
    ok: bool

    def __str__(self) -> str:
        relation = "within" if self.ok else "beyond"
        return f"{self.output} {self.metric} {self.measured:.3g}, {relation} {self.limit:g}"


def measure(output: str, bound: Bound, reference: Tensor, candidate: Tensor) -> Measurement:
    """Compare a tensor of any shape, whose last dimension is a row, with the general path's.

    bitwise counts differing elements; max-abs is the largest difference; relative is, over rows, the largest difference
    divided by the row's largest reference; cosine is the smallest similarity of two rows.
    """
    if bound.metric is Metric.COSINE:
        value = _cosine(reference, candidate)
        return Measurement(output, bound.metric.value, bound.limit, value, value >= bound.limit)
    value = {Metric.BITWISE: _bitwise, Metric.MAX_ABS: _max_abs, Metric.RELATIVE: _relative}[bound.metric](
        reference, candidate
    )
    limit = 0.0 if bound.metric is Metric.BITWISE else bound.limit
    return Measurement(output, bound.metric.value, limit, value, value <= limit)


def measure_selection(output: str, tie_margin: float, general: Selection, chosen: Tensor) -> Measurement:
    """How far from a tie the kernels' different choices are, by the general path's own scores.

    For each row, every index that only the kernels chose is set against every index that only the general path chose;
    the score given up is the measure. Indices [R, k] are sets: their order does not count. Raises ValueError if the
    general path gave no scores.
    """
    if general.scores is None:
        raise ValueError(f"{output}: the general path gave no scores")
    worst = _score_given_up(general.scores.float(), general.indices, chosen)
    return Measurement(output, "tie-margin", tie_margin, worst, worst <= tie_margin)


def greedy(logits_RV: Tensor) -> Selection:
    """The greedy token of each row as a selection."""
    return Selection(logits_RV.argmax(dim=-1, keepdim=True), logits_RV)


def _score_given_up(scores_RN: Tensor, general_RK: Tensor, chosen_RK: Tensor) -> float:
    import torch

    rows, candidates = scores_RN.shape
    if chosen_RK.shape != general_RK.shape or bool(((chosen_RK < 0) | (chosen_RK >= candidates)).any()):
        return math.inf
    theirs = torch.zeros(rows, candidates, dtype=torch.bool, device=scores_RN.device)
    ours = theirs.clone()
    theirs.scatter_(1, general_RK.long(), True)
    ours.scatter_(1, chosen_RK.long(), True)
    if bool((ours.sum(1) != theirs.sum(1)).any()):
        return math.inf
    dropped = scores_RN.masked_fill(~(theirs & ~ours), -math.inf).amax(dim=1)
    added = scores_RN.masked_fill(~(ours & ~theirs), math.inf).amin(dim=1)
    differs = (ours != theirs).any(dim=1)
    gap = torch.where(differs, dropped - added, torch.zeros_like(dropped))
    return _worst(gap)


def _alike(reference: Tensor, candidate: Tensor) -> bool:
    return reference.shape == candidate.shape


def _bitwise(reference: Tensor, candidate: Tensor) -> float:
    import torch

    if not _alike(reference, candidate) or reference.dtype != candidate.dtype:
        return math.inf
    views = (reference.contiguous().view(torch.uint8), candidate.contiguous().view(torch.uint8))
    different = (views[0] != views[1]).reshape(*reference.shape, reference.element_size()).any(dim=-1)
    return float(different.sum())


def _max_abs(reference: Tensor, candidate: Tensor) -> float:
    if not _alike(reference, candidate):
        return math.inf
    return _worst((reference.double() - candidate.double()).abs())


def _relative(reference: Tensor, candidate: Tensor) -> float:
    if not _alike(reference, candidate):
        return math.inf
    difference = (reference.double() - candidate.double()).abs().amax(dim=-1)
    scale = reference.double().abs().amax(dim=-1)
    return _worst((difference / scale).masked_fill((difference == 0) & (scale == 0), 0.0))


def _cosine(reference: Tensor, candidate: Tensor) -> float:
    if not _alike(reference, candidate):
        return -1.0
    a, b = reference.double(), candidate.double()
    scale = a.norm(dim=-1) * b.norm(dim=-1)
    similarity = ((a * b).sum(dim=-1) / scale).masked_fill((scale == 0) & (a.norm(dim=-1) == b.norm(dim=-1)), 1.0)
    lowest = similarity.min() if similarity.numel() else similarity.new_ones(())
    return -1.0 if bool(similarity.isnan().any()) else float(lowest)


def _worst(distances: Tensor) -> float:
    if distances.numel() == 0:
        return 0.0
    return math.inf if bool(distances.isnan().any()) else float(distances.max())
