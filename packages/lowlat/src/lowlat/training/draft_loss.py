"""What a block draft learns: the target's own next tokens, from every place at once.

Legend of shape suffixes: S sequences, T tokens, A anchors of a sequence, Q = S * A blocks, B rows of a block, P
guesses of a block, H hidden, N query heads, K key-value heads, D head dimension, V tokens that can be guessed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from lowlat.speculative.device_draft import SHARPNESS
from lowlat.speculative.draft_files import DraftFileError
from lowlat.speculative.draft_heads import edge_scores
from lowlat.speculative.draft_network import Attend, DraftNetwork, capped
from lowlat.training.accepted import accepted
from lowlat.training.target import Target, Written

_FADING = 3.0
"""Guess i weighs exp(-i / this): it is of use only if those before it were right."""
_NEVER = -1e4
"""Score of what is no candidate."""
_CONFIDENCE = 0.2
"""Weight of the confidence head's loss."""
_SHARPEST = 0.4
"""Least temperature at which draft and target are compared; greedy answers too are learnt at this one."""
_GREEDY = 0.1
"""Temperature at which the target's choice counts as greedy, where acceptance is the aim."""


class Blocks(NamedTuple):
    """Scores of guesses beside the tokens that came. What is not `known` lies behind a sequence's end."""

    scores_QPV: torch.Tensor
    target_QPV: torch.Tensor
    """The target's own logits."""
    wanted_QP: torch.Tensor
    """Places of the tokens among those that can be guessed; one more than the last for others."""
    known_QP: torch.Tensor
    temperature_Q: torch.Tensor
    written_Q: torch.Tensor
    """Whether the target wrote the tokens; else they are a prompt's, which nobody drew."""
    confidence_QP: torch.Tensor | None = None
    """Before the sigmoid."""
    unary_QPV: torch.Tensor | None = None
    """Of DFlash 2, whose `scores_QPV` are those of candidates alone: the logits that candidates come from."""

    def judged(self) -> torch.Tensor:
        """[Q, P]: where it is known whether a guess is right."""
        return self.known_QP & self.written_Q[:, None]

    @torch.no_grad()
    def right(self, every: int = 1) -> torch.Tensor:
        """[Q, P]: whether each guess, made as the engine makes them, is right and those before it are too; of every so
        many-th block."""
        wanted_QP, warm_Q11 = self.wanted_QP[::every], self.temperature_Q[::every, None, None]
        heat_Q11 = warm_Q11.clamp(min=1e-3)
        scores_QPV = self.scores_QPV[::every].float() * (SHARPNESS / heat_Q11)
        noise_QPV = _noise(self.target_QPV[::every].float() / heat_Q11, wanted_QP)
        guesses_QP = (scores_QPV + noise_QPV * (warm_Q11 > 0)).argmax(-1)
        return (guesses_QP == wanted_QP).cumprod(-1).bool()


def blocks(network: DraftNetwork, target: Target, written: Written, anchors_SA: torch.Tensor) -> Blocks:
    """The draft's scores after each anchor (places of tokens), each guess given that those before it were right."""
    config = network.config
    sequences, anchors = anchors_SA.shape
    tokens_ST, device = written.tokens_ST, written.tokens_ST.device
    length = written.features_STX.shape[1]
    positions = torch.arange(length, device=device)
    context = network.context(written.features_STX.flatten(0, 1), positions.repeat(sequences))
    places_SAB = anchors_SA[..., None] + torch.arange(config.block_size, device=device)
    input_QB = torch.full((sequences * anchors, config.block_size), config.mask_token_id, device=device)
    input_QB[:, 0] = tokens_ST.gather(1, anchors_SA).flatten()
    x_QBH = target.embed(input_QB.flatten()).view(*input_QB.shape, -1)
    shaped = [
        (keys.view(sequences, length, *keys.shape[1:]), values.view(sequences, length, *values.shape[1:]))
        for keys, values in context
    ]
    looks = attend(shaped, anchors_SA, written.begin_S, config.sliding_window)
    h_QBH = network.block(x_QBH, places_SAB.flatten(0, 1), looks)
    h_QPH = h_QBH[:, 0 if config.kind == "dspark" else 1 :]
    wanted_SAP = anchors_SA[..., None] + 1 + torch.arange(config.proposals, device=device)
    known_QP = (wanted_SAP < tokens_ST.shape[1]).flatten(0, 1)
    wanted_SX = wanted_SAP.clamp(max=tokens_ST.shape[1] - 1).flatten(1)
    known_QP &= written.valid_ST.gather(1, wanted_SX).view_as(known_QP)
    tokens_QP = tokens_ST.gather(1, wanted_SX).view_as(known_QP)
    wanted_QP = network.places(tokens_QP)
    before_QP = torch.cat([network.places(input_QB[:, :1]), wanted_QP[:, :-1]], 1)
    normed_QPH = network.norm(h_QPH)
    flat_RH = normed_QPH.flatten(0, 1)
    confidence_QP = unary_QPV = None
    if config.kind == "dspark":
        if config.output_multiplier != 1.0 or config.final_logit_softcapping is not None:
            raise DraftFileError("a draft whose logits are capped is not trained here")
        before_QPE = network.markov_embed(before_QP)
        head_VH, bias_VE = target.head_of(network.vocabulary), network.markov_head.weight
        low = (flat_RH.to(head_VH.dtype), before_QPE.flatten(0, 1).to(head_VH.dtype), bias_VE.to(head_VH.dtype))
        scores_RV: torch.Tensor = _Biased.apply(*low, head_VH)  # type: ignore[no-untyped-call]
        logits_QPV = scores_RV.view(*wanted_QP.shape, -1)
        joined = torch.cat([h_QPH.detach(), before_QPE.detach().to(h_QPH.dtype)], -1)
        confidence_QP = network.confidence_head(joined)[..., 0]
    else:
        logits_QPV = capped(target.head(flat_RH, network.vocabulary), config).view(*wanted_QP.shape, -1)
    if config.kind == "dflash2":
        flat = (logits_QPV.flatten(0, 1), flat_RH, before_QP.flatten())
        scores, candidates = edge_scores(network, *flat)
        unary_QPV = logits_QPV
        logits_QPV = torch.full_like(flat[0], _NEVER).scatter(1, candidates, scores).view_as(logits_QPV)
    with torch.no_grad():
        last_SXH = written.last_STH.gather(1, (wanted_SX - 1)[..., None].expand(-1, -1, config.hidden_size))
        target_QPV = target.head(last_SXH, network.vocabulary).view_as(logits_QPV)
    return Blocks(
        logits_QPV,
        target_QPV,
        wanted_QP,
        known_QP,
        written.temperature_S.repeat_interleave(anchors),
        (anchors_SA >= written.prompt_S[:, None] - 1).flatten(),
        confidence_QP,
        unary_QPV,
    )


def loss_of(
    found: Blocks, right_QP: torch.Tensor, every: int = 1, accepting: float = 0.0, path: bool = False
) -> torch.Tensor:
    """How far the draft's distributions are from the target's, fading along the block, and the confidence head's loss.

    `right_QP`: `Blocks.right(every)`; it teaches confidence. `accepting`: from 0 to 1, how much of the loss is in place
    of that distance the number of tokens that a step would bring, with guesses drawn by the target's noise. `path`: see
    `accepted`.
    `found.scores_QPV` is of no use afterwards: the slope takes its place.
    """
    places = torch.arange(found.wanted_QP.shape[1], device=found.wanted_QP.device)
    guessable_QP = found.wanted_QP < found.scores_QPV.shape[-1]
    weights_QP = torch.exp(-places / _FADING) * (found.known_QP & guessable_QP)
    weights_QP = weights_QP / weights_QP.sum().clamp(min=1e-6)
    compared_QPV = found.scores_QPV if found.unary_QPV is None else found.unary_QPV
    # What stands in a prompt was not drawn.
    drawn_QP = torch.where(found.written_Q[:, None], found.wanted_QP, found.scores_QPV.shape[-1])
    aim = (drawn_QP, weights_QP, found.temperature_Q, accepting, path)
    loss: torch.Tensor = _Objective.apply(compared_QPV, found.target_QPV, *aim)  # type: ignore[no-untyped-call]
    if found.unary_QPV is not None:
        chosen_QP = found.scores_QPV.gather(2, found.wanted_QP[..., None])[..., 0] > _NEVER
        # What is no candidate counts as the worst of them, and teaches the logits alone.
        worst_QP = (found.scores_QPV > _NEVER).sum(-1).log()
        scores_RV = found.scores_QPV.flatten(0, 1).float()
        picked_QP = F.cross_entropy(scores_RV, found.wanted_QP.flatten(), reduction="none").view_as(worst_QP)
        loss = loss + (torch.where(chosen_QP, picked_QP, worst_QP) * weights_QP).sum()
    if found.confidence_QP is not None:
        # Its question is asked only where the guesses before were right.
        asked_QP = F.pad(right_QP[:, :-1], (1, 0), value=True) & found.judged()[::every]
        confidence_QP = found.confidence_QP[::every].float()
        each_QP = F.binary_cross_entropy_with_logits(confidence_QP, right_QP.float(), reduction="none")
        loss = loss + _CONFIDENCE * (each_QP * asked_QP).sum() / asked_QP.sum().clamp(min=1)
    return loss


def _noise(target_QPV: torch.Tensor, chosen_QP: torch.Tensor) -> torch.Tensor:
    """Gumbel noise as it may have been when the chosen tokens were drawn: the largest sum of logit and noise is drawn
    first, then the others below it (Maddison et al. 2014)."""
    logits_QPV = target_QPV.log_softmax(-1)
    top_QP1 = -torch.empty_like(chosen_QP, dtype=torch.float32).exponential_().log()[..., None]
    sums_QPV = logits_QPV - torch.empty_like(logits_QPV).exponential_().log()
    sums_QPV = -torch.logaddexp(-top_QP1.expand_as(sums_QPV), -sums_QPV)
    # What the draft cannot guess is wrong whatever the noise is.
    place_QP1 = chosen_QP.clamp(max=logits_QPV.shape[-1] - 1)[..., None]
    return sums_QPV.scatter(-1, place_QP1, top_QP1) - logits_QPV


class _Objective(torch.autograd.Function):
    """Cross entropies of the target's distributions and the draft's, both at temperature tau and times tau, so that
    gradients of all temperatures are alike in size; less the logarithm of the tokens that a step would bring.

    Vocabularies are large: the slope is computed with the loss, and takes the scores' place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores_QPV: torch.Tensor,
        target_QPV: torch.Tensor,
        wanted_QP: torch.Tensor,
        weights_QP: torch.Tensor,
        temperature_Q: torch.Tensor,
        accepting: float,
        path: bool,
    ) -> torch.Tensor:
        tau_Q = temperature_Q.clamp(min=_SHARPEST)
        heats_QC = torch.stack([1 / tau_Q, SHARPNESS / tau_Q, 1 / temperature_Q.clamp(min=_GREEDY)], 1).float()
        heats_RC = heats_QC.repeat_interleave(weights_QP.shape[1], 0)
        wanted_R = wanted_QP.flatten().contiguous()
        scores_RV, target_RV = scores_QPV.detach().flatten(0, 1), target_QPV.flatten(0, 1)
        kernels, asked = _kernels(scores_QPV.device), {"cross": accepting < 1, "match": accepting > 0}
        found_RC: torch.Tensor = kernels.likeness(scores_RV, target_RV, wanted_R, heats_RC, **asked)
        distance_QP = found_RC[:, 0].view_as(weights_QP) * tau_Q[:, None]
        distance = (distance_QP * weights_QP).sum()
        loss, slopes = (1 - accepting) * distance, [(1 - accepting) * weights_QP]
        if accepting:
            of_parts = kernels.parts(found_RC, target_RV, heats_RC)
            best_QP, other_QP, chance_QP = (of.view_as(weights_QP) for of in of_parts)
            drawn_QP = (wanted_QP < scores_QPV.shape[-1]) & path
            # An answer's places are steps the less often, the more steps accept: a block counts by the logarithm of the
            # tokens that it brings.
            accepted_Q, *slopes_QP = accepted(best_QP, other_QP, chance_QP, weights_QP > 0, drawn_QP)
            tokens_Q = 1 + accepted_Q
            loss = loss - accepting * tokens_Q.log().mean()
            slopes += [accepting / len(tokens_Q) / tokens_Q[:, None] * of for of in slopes_QP]
        else:
            slopes += [torch.zeros_like(weights_QP)] * 2
        weights_RC = torch.stack(slopes, -1).flatten(0, 1).float().contiguous()
        slope_RV = kernels.slope_(scores_RV, target_RV, heats_RC, found_RC, weights_RC, wanted_R, **asked)
        ctx.save_for_backward(slope_RV.view_as(scores_QPV))
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slope_QPV,) = ctx.saved_tensors
        return (
            slope_QPV,
            None,
            None,
            None,
            None,
            None,
            None,
        )  # the loss is a sum that this is part of: the gradient is 1


def _kernels(device: torch.device) -> Any:
    if device.type == "cuda":
        from lowlat.layers.triton import overlap

        return overlap
    from lowlat.training import overlap as plain

    return plain


class _Biased(torch.autograd.Function):
    """The target's head on states and the Markov head's bias, in one product; the target does not learn."""

    @staticmethod
    def forward(
        ctx: Any, normed_RH: torch.Tensor, before_RE: torch.Tensor, bias_VE: torch.Tensor, head_VH: torch.Tensor
    ) -> torch.Tensor:
        whole_VX = torch.cat([head_VH, bias_VE], 1)
        ctx.save_for_backward(before_RE, whole_VX)
        return torch.cat([normed_RH, before_RE], 1) @ whole_VX.t()

    @staticmethod
    def backward(ctx: Any, slope_RV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        before_RE, whole_VX = ctx.saved_tensors
        inner = whole_VX.shape[1] - before_RE.shape[1]
        slope_RX = slope_RV @ whole_VX
        return slope_RX[:, :inner], slope_RX[:, inner:], slope_RV.t() @ before_RE, None


def attend(
    context: list[tuple[torch.Tensor, torch.Tensor]], anchors_SA: torch.Tensor, begins_S: torch.Tensor, window: int
) -> Attend:
    """Rows of a block see their sequence's tokens before the anchor, and their own block. `context`: keys and values
    [S, T, K, D] of every layer; `window`: so many tokens before the anchor, 0: all."""
    if anchors_SA.device.type == "cuda":
        from lowlat.layers.triton.block_attention import block_attention

        def by_kernel(layer: int, q_QBND: torch.Tensor, k_QBKD: torch.Tensor, v_QBKD: torch.Tensor) -> torch.Tensor:
            return block_attention(q_QBND, context[layer], (k_QBKD, v_QBKD), anchors_SA, begins_S, window)

        return by_kernel
    return attend_plainly(context, anchors_SA, begins_S, window)


def attend_plainly(
    context: list[tuple[torch.Tensor, torch.Tensor]], anchors_SA: torch.Tensor, begins_S: torch.Tensor, window: int
) -> Attend:
    """The same with a mask over whole sequences."""
    sequences, anchors = anchors_SA.shape
    places = torch.arange(context[0][0].shape[1], device=anchors_SA.device)
    seen_SAT = (places < anchors_SA[..., None]) & (places >= begins_S[:, None, None])
    if window:
        seen_SAT &= places >= anchors_SA[..., None] - window

    def plainly(layer: int, q_QBND: torch.Tensor, k_QBKD: torch.Tensor, v_QBKD: torch.Tensor) -> torch.Tensor:
        block = q_QBND.shape[1]
        own_AA = torch.eye(anchors, dtype=torch.bool, device=places.device)
        own_AA = own_AA.repeat_interleave(block, 0).repeat_interleave(block, 1)
        mask_SXY = torch.cat([seen_SAT.repeat_interleave(block, 1), own_AA.expand(sequences, -1, -1)], 2)

        def whole(part_STKD: torch.Tensor, own_QBKD: torch.Tensor) -> torch.Tensor:
            heads, dim = own_QBKD.shape[2:]
            parts = [part_STKD, own_QBKD.reshape(sequences, -1, heads, dim)]
            return torch.cat(parts, 1).transpose(1, 2).repeat_interleave(q_QBND.shape[2] // heads, 1)

        keys, values = context[layer]
        q_SNXD = q_QBND.reshape(sequences, anchors * block, *q_QBND.shape[2:]).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q_SNXD, whole(keys, k_QBKD), whole(values, v_QBKD), attn_mask=mask_SXY[:, None]
        )
        return mixed.transpose(1, 2).reshape(q_QBND.shape)

    return plainly
