"""Steps of learning: which weights go by which optimizer, and what each step changes.

Legend of shape suffixes: S sequences, A anchors of a sequence, Q blocks, P guesses of a block, X taps * H.
"""

from __future__ import annotations

import random

import torch

from lowlat.speculative.derived_tokens import DOWN, UP
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.anchors import draw_anchors
from lowlat.training.bank import Bank
from lowlat.training.compiled import compiled
from lowlat.training.draft_loss import blocks, loss_of
from lowlat.training.graphs import StepGraphs
from lowlat.training.muon import Muon
from lowlat.training.recipe import Recipe
from lowlat.training.seeds import begin
from lowlat.training.target import Target

_LOOKED_AT = 23
"""One in so many blocks of a step is looked at for acceptance, and teaches confidence."""

Learnt = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss; what was right and known of the blocks that were looked at, [Q, P] each."""


class Learner:
    """A draft's weights and its optimizers. What a step draws is a matter of its number alone."""

    def __init__(self, recipe: Recipe, target: Target, network: DraftNetwork, bank: Bank) -> None:
        self._recipe, self._target, self._network, self._bank = recipe, target, network, bank
        self._schedule = recipe.schedule
        # Matrices between states go by Muon, which needs far fewer steps; rows of tokens and norms by AdamW.
        inner = {name: weight for name, weight in network.named_parameters() if _inner(name, weight)}
        self._others = {name: weight for name, weight in network.named_parameters() if name not in inner}
        self._rate = torch.zeros((), device=target.device)
        self._muon = Muon(inner)
        self._muon.rate = self._rate
        on_gpu = target.device.type == "cuda"
        self._adam = torch.optim.AdamW(
            self._others.values(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True, capturable=on_gpu
        )
        self._graphs = StepGraphs(self._learn) if on_gpu else None
        self._fast = compiled(network) if on_gpu else network

    def step(self, number: int, done: float) -> Learnt:
        """Learn once. `done`: part of the training, from 0 to 1. What it returns is good until the next step."""
        recipe, written = self._recipe, self._bank.written
        assert written is not None
        self._rate.fill_(self._schedule.rate(done))
        generator = begin(recipe.seed, "step", number, self._target.device)
        rows_S = self._bank.draw(recipe.sequences, random.Random(number))
        ends = written.valid_ST[rows_S], written.prompt_S[rows_S], written.begin_S[rows_S]
        anchors_SA = draw_anchors(*ends, recipe.anchors, generator, recipe.text_anchors)
        learn = self._learn if self._graphs is None else self._graphs.run
        return learn(rows_S, anchors_SA, self._schedule.accepting_at(done))

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizers remember, by name."""
        found = {f"muon.{name}": average for name, average in self._muon.averages.items()}
        for name, weight in self._others.items():
            found |= {f"adam.{name}.{part}": of for part, of in self._adam.state[weight].items()}
        return found

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state` gave; before the first step."""
        for name, average in self._muon.averages.items():
            average.copy_(state[f"muon.{name}"])
        on_gpu = self._target.device.type == "cuda"
        for name, weight in self._others.items():
            parts = {part: state[f"adam.{name}.{part}"] for part in ("step", "exp_avg", "exp_avg_sq")}
            # A count of steps that no graph reads stays on the host.
            device = weight.device if on_gpu else torch.device("cpu")
            self._adam.state[weight] = {part: of.to(device, copy=True) for part, of in parts.items()}

    def _learn(self, rows_S: torch.Tensor, anchors_SA: torch.Tensor, accepting: float) -> Learnt:
        """The device's part of a step: it never waits for the device."""
        network, target, written = self._fast, self._target, self._bank.written
        assert written is not None
        written = written.rows(rows_S)
        low = target.dtype == torch.bfloat16
        with torch.autocast(target.device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            found = blocks(network, target, written, anchors_SA)
        every = min(_LOOKED_AT, len(found.wanted_QP))
        right_QP = found.right(every)
        loss = loss_of(found, right_QP, every, accepting, self._recipe.along_path)
        network.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        return loss.detach(), right_QP, found.judged()[::every]


def survival(right_QP: torch.Tensor, known_QP: torch.Tensor) -> list[float]:
    """How often guesses were right with those before them, by place; waits for the device."""
    found: list[float] = ((right_QP & known_QP).sum(0) / known_QP.sum(0).clamp(min=1)).tolist()
    return found


def _inner(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and (name.startswith("layers.") or name in ("fc.weight", UP, DOWN))
