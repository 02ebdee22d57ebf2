"""Drawing tokens on the device, by the law of `engine/host_drawing.py` (decision 0105): every token of the vocabulary
has a random number of its own, a hash of seed, place and token, and the one with the largest sum of logit over
temperature and Gumbel noise is drawn. That is a draw from their softmax (Gumbel 1954; Maddison et al. 2014), and two
distributions that are alike draw the same token often, since they see the same noise.

The kernel is in `triton/drawing.py`.

Legend of shape suffixes: M samples of a step, V vocabulary, T batch slots.
"""

from __future__ import annotations

import torch

# As `engine.batch` has it: below this a temperature means greedy.
MIN_TEMPERATURE = 1e-5
_GAMMA = 0x9E3779B97F4A7C15


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None = None,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """A place in the vocabulary for each row, int64; -1 where the logits hold NaN or no finite number.

    Args:
        logits_MV: float32 or bfloat16.
        slots_M: the rows' batch slots.
        positions_M: places of the tokens in their sequences.
        settings: temperatures (float32) and seeds by slot, [T]; None: the likeliest tokens.
        ids_V: tokens that the columns stand for; None: themselves.
        sharpness: factor on the logits where a row is drawn.
    """
    best_M, tokens_M = logits_MV.max(dim=-1)
    if settings is not None:
        temperature_T, seed_T = settings
        temperature_M = temperature_T[slots_M]
        greedy_M = temperature_M < MIN_TEMPERATURE
        ids_V = torch.arange(logits_MV.shape[-1], device=logits_MV.device) if ids_V is None else ids_V
        noise_MV = gumbel(seed_T[slots_M], positions_M, ids_V)
        scores_MV = logits_MV.double() * sharpness / torch.where(greedy_M, 1.0, temperature_M).double()[:, None]
        tokens_M = torch.where(greedy_M, tokens_M, (scores_MV + noise_MV).argmax(dim=-1))
    return torch.where(best_M.isfinite(), tokens_M, -1)


def gumbel(seed_M: torch.Tensor, position_M: torch.Tensor, ids_V: torch.Tensor) -> torch.Tensor:
    """`host_drawing.gumbel` of many, float64 [M, V]; seeds are 64-bit numbers as int64."""
    return -(-uniforms(seed_M, position_M, ids_V).log()).log()


def uniforms(seed_M: torch.Tensor, position_M: torch.Tensor, ids_V: torch.Tensor) -> torch.Tensor:
    """`host_drawing.uniforms` of many, float64 [M, V], bit for bit."""
    gamma = _signed(_GAMMA)
    stream_M = _mix(seed_M ^ _mix(position_M + gamma))
    value_MV = _mix(stream_M[:, None] + (ids_V + 1) * gamma)
    return (_shift(value_MV, 12).double() + 0.5) * 2.0**-52


def _mix(value: torch.Tensor) -> torch.Tensor:
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def walk(
    logits_GBV: torch.Tensor,
    first_B: torch.Tensor,
    embed_XE: torch.Tensor,
    head_VE: torch.Tensor,
    slots_B: torch.Tensor,
    positions_GB: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None,
    sharpness: float,
) -> torch.Tensor:
    """Draws G columns one after the other, each with a bias by the one before it: head_VE @ embed_XE[before].

    `first_B`: what comes before the first one. Returns columns [B, G]; 0 where a row is broken.
    """
    before_B, columns = first_B, []
    for logits_BV, positions_B in zip(logits_GBV, positions_GB, strict=True):
        bias_BV = torch.nn.functional.embedding(before_B, embed_XE).float() @ head_VE.float().t()
        scores_BV = logits_BV.float() + bias_BV
        before_B = draw(scores_BV, slots_B, positions_B, settings, ids_V, sharpness).clamp(min=0)
        columns.append(before_B)
    return torch.stack(columns, 1)
