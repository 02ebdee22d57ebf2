"""From a draft's states to tokens: each on its own (DFlash), along the likeliest path through candidates (DFlash 2), or
one after the other with a bias by the token before (DSpark).

Legend of shape suffixes: Q blocks, P proposals of a block, C candidates, H hidden, V vocabulary, E rank of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowlat.speculative.draft_network import DraftNetwork, capped

Head = Callable[[torch.Tensor], torch.Tensor]
"""The target's head for tokens that the draft can guess: normed states [R, H] to logits [R, V], float32."""
Pick = Callable[[torch.Tensor, int], torch.Tensor]
"""(logits [Q, V], place) to the chosen tokens [Q]."""


def greedy(logits_QV: torch.Tensor, place: int) -> torch.Tensor:
    """The likeliest token: NumPy's search is many times as fast as PyTorch's."""
    return torch.from_numpy(logits_QV.numpy().argmax(-1))


def walk(
    network: DraftNetwork, head: Head, h_QPH: torch.Tensor, anchor_Q: torch.Tensor, pick: Pick = greedy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Guesses [Q, P] from states before the last norm of the rows that guess; for DSpark also its confidence [Q, P]:
    the chance of each guess being right if those before it were."""
    config = network.config
    blocks, proposals = h_QPH.shape[:2]
    normed_QPH = network.norm(h_QPH)
    logits_QPV = capped(head(normed_QPH.flatten(0, 1)), config).view(blocks, proposals, -1)
    if config.kind == "dflash2":
        return _select(network, logits_QPV, normed_QPH, anchor_Q, pick), None
    if config.kind == "dspark":
        return _markov(network, logits_QPV, h_QPH, anchor_Q, pick)
    places_QP = torch.stack([pick(logits_QPV[:, place], place) for place in range(proposals)], 1)
    return _tokens(network, places_QP), None


def _tokens(network: DraftNetwork, places: torch.Tensor) -> torch.Tensor:
    known = network.vocabulary
    return places if known is None else known[places]


def _markov(
    network: DraftNetwork, logits_QPV: torch.Tensor, h_QPH: torch.Tensor, anchor_Q: torch.Tensor, pick: Pick
) -> tuple[torch.Tensor, torch.Tensor]:
    place_Q, places, befores = network.places(anchor_Q), [], []
    for row in range(h_QPH.shape[1]):
        befores.append(network.markov_embed(place_Q))
        place_Q = pick(network.markov_head(befores[row]).add_(logits_QPV[:, row]), row)
        places.append(place_Q)
    joined_QPX = torch.cat([h_QPH, torch.stack(befores, 1)], -1)
    confidence_QP = torch.sigmoid(network.confidence_head(joined_QPX)[..., 0].clamp(-60, 60))
    return _tokens(network, torch.stack(places, 1)), confidence_QP


def _select(
    network: DraftNetwork, logits_QPV: torch.Tensor, normed_QPH: torch.Tensor, anchor_Q: torch.Tensor, pick: Pick
) -> torch.Tensor:
    token_Q, tokens = anchor_Q, []
    for place in range(normed_QPH.shape[1]):
        scores_QC, candidates_QC = edge_scores(network, logits_QPV[:, place], normed_QPH[:, place], token_Q)
        scores_QV = torch.full_like(logits_QPV[:, place], float("-inf")).scatter_(1, candidates_QC, scores_QC)
        token_Q = pick(scores_QV, place)
        tokens.append(token_Q)
    return torch.stack(tokens, 1)


def edge_scores(
    network: DraftNetwork, logits_QV: torch.Tensor, normed_QH: torch.Tensor, previous_Q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and ids of the likeliest candidates after `previous_Q`: logit + <A[previous] * P(h), B[candidate]>, each
    [Q, C]."""
    unary_QC, candidates_QC = logits_QV.topk(min(network.config.selector_top_k, logits_QV.shape[-1]), dim=-1)
    edge_QE = network.selector_previous(previous_Q) * network.selector_proj(normed_QH)
    return unary_QC + (network.selector_next(candidates_QC) @ edge_QE.unsqueeze(-1)).squeeze(-1), candidates_QC
