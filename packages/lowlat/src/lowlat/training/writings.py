"""What the target writes for a draft to learn from: each writing is a matter of its number alone."""

from __future__ import annotations

import torch

from lowlat.training.anchors import SPAN
from lowlat.training.bank import Bank
from lowlat.training.recipe import Recipe
from lowlat.training.seeds import begin
from lowlat.training.target import Target, Written
from lowlat.training.texts import Prompts

_ALONE_TEMPERATURE = 0.9
_ALONE_EVERY = 6
_FRAME = 256
"""More tokens than stand before a chat's first words."""


class Writings:
    """The target's writings, the latest of which are kept."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        layers: tuple[int, ...],
        ends: frozenset[int],
        factors_X: torch.Tensor | None,
    ) -> None:
        """`layers`: that are tapped. `factors_X`: of an earlier draft; None: of the first writing."""
        self._recipe, self._target, self._layers, self._ends = recipe, target, layers, ends
        self.factors_X = factors_X
        """By which features are multiplied, so that all have about the same size."""
        self.bank = Bank(recipe.kept, room(recipe))
        self._next = 0

    @property
    def least(self) -> int:
        """Writings before the first step: one at each temperature, as far as they are kept."""
        return min(len(self._recipe.temperatures), self._recipe.kept)

    def before(self, step: int) -> int:
        """Writings that step `step` and those before it have seen."""
        return self.least + step // self._recipe.rounds

    def write(self, prompts: Prompts, step: int) -> bool:
        """Write what a step needs that is not kept yet; whether there was anything."""
        wanted = self.before(step)
        if self._next == wanted:
            return False
        if wanted - self._next > self._recipe.kept:
            self._next = wanted - self._recipe.kept
            self.bank.begin(self._next)
        while self._next < wanted:
            self.bank.put(self._one(prompts, self._next))
            self._next += 1
        return True

    def held_out(self, prompts: Prompts, temperature: float) -> list[Written]:
        """What the target writes to held-out prompts."""
        recipe, parts = self._recipe, []
        prompts.begin(0)
        generator = begin(recipe.seed, "held out", 0, self._target.device)
        for first in range(0, recipe.measured, recipe.sequences):
            count = min(recipe.sequences, recipe.measured - first)
            drawn = prompts.draw(recipe.prompt_tokens, count)
            parts.append(self._written(drawn, recipe.answer_tokens, temperature, generator, self._ends))
        return parts

    def _one(self, prompts: Prompts, number: int) -> Written:
        recipe = self._recipe
        count = recipe.writes * recipe.sequences
        prompts.begin(number)
        generator = begin(recipe.seed, "writing", number, self._target.device)
        alone = (number + 1) // _ALONE_EVERY if recipe.alone_tokens else 0
        if recipe.alone_tokens and (number + 1) % _ALONE_EVERY == 0:
            opening = prompts.openings(count)
            return self._written(opening, recipe.alone_tokens, _ALONE_TEMPERATURE, generator, frozenset())
        turn = number - alone
        temperature = recipe.temperatures[turn % len(recipe.temperatures)]
        # Temperatures and lengths take turns, each with each.
        lengths = _lengths(recipe.prompt_tokens)
        length = lengths[turn // len(recipe.temperatures) % len(lengths)]
        drawn = prompts.draw(length, count, recipe.sessions)
        return self._written(drawn, recipe.answer_tokens, temperature, generator, self._ends)

    def _written(
        self,
        drawn: list[list[int]],
        tokens: int,
        temperature: float,
        generator: torch.Generator,
        ends: frozenset[int],
    ) -> Written:
        kept = _kept_tokens(self._recipe)
        written = self._target.write(drawn, tokens, temperature, self._layers, ends, generator, kept)
        if self.factors_X is None:
            self.factors_X = 1 / written.features_STX.abs().mean((0, 1), dtype=torch.float32).clamp(min=1e-6)
        written.features_STX.mul_(self.factors_X)
        return written


def room(recipe: Recipe) -> int:
    """Tokens of the longest sequence that is kept."""
    longest = min(recipe.prompt_tokens, _kept_tokens(recipe) or recipe.prompt_tokens) + recipe.answer_tokens
    return max(longest, _FRAME + recipe.alone_tokens if recipe.alone_tokens else 0)


def whole_room(recipe: Recipe) -> int:
    """Tokens of the longest sequence, with a block behind it."""
    return max(recipe.prompt_tokens + recipe.answer_tokens, _FRAME + recipe.alone_tokens) + recipe.block_size


def _kept_tokens(recipe: Recipe) -> int | None:
    """Tokens of a prompt that are of use; None: all."""
    return recipe.window + SPAN if recipe.window else None


def _lengths(longest: int) -> tuple[int, ...]:
    """Lengths of prompts: a draft shall know short ones and long ones."""
    return (longest,) if longest < SPAN else (longest // 3, longest, longest // 2)
