"""What a training of a draft is told, and what it tells."""

from __future__ import annotations

import math

import msgspec

from lowlat.training.schedule import Schedule


class RecipeError(Exception):
    """Choices that do not go together; the text says which."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of a training; written beside the draft."""

    model: str
    kind: str = "dspark"
    data: tuple[str, ...]
    hold_out: int = 3
    steps: int = 2000
    seconds: float | None = None
    """Time for all, from reading the model to writing the draft, in place of a number of steps."""
    sequences: int = 32
    """Sequences that the target writes at once, and that a step learns from."""
    writes: int = 1
    """Writings at a time: each is of so many times `sequences`."""
    rounds: int = 4
    """Steps after each writing."""
    kept: int = 1
    """Writings that steps choose their sequences from."""
    anchors: int = 16
    """Blocks of a sequence in a step."""
    text_anchors: int = 0
    """How many of these lie in the prompt, whose tokens the target has not chosen but has an opinion on."""
    sessions: float = 0.7
    """Share of prompts from sessions, where there is other text too."""
    prompt_tokens: int = 384
    """Of the longest prompts; others have a half or a third."""
    answer_tokens: int = 128
    alone_tokens: int = 0
    """Every sixth writing has no prompts: the target talks to itself, for so many tokens. 0: none has."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """The target writes with these in turn."""
    block_size: int = 6
    layers: int = 2
    taps: int = 3
    intermediate_size: int = 1024
    rank: int = 48
    """Of the Markov head or the candidate selector."""
    derived: int = 0
    """Width of a network that makes the Markov head's tokens of the target's embeddings; 0: they are a table."""
    vocabulary: int = 0
    """Tokens that the draft can guess, the most frequent of the texts; 0: all."""
    window: int = 0
    """Tokens before a block that the draft sees; 0: all."""
    learning_rate: float = 1e-3
    cooling: float = 1.0
    """Part of the training, at its end, in which the learning rate falls."""
    accepting: float = 0.0
    """How much of the loss is the number of accepted tokens itself, from 0 to 1."""
    accepting_part: float | None = None
    """Part of the training, at its end, in which it is; None: all of it with `start`, since that draft knows the
    distributions already, else the part that cools."""
    along_path: bool = False
    """Count accepted tokens along those that the target drew (`accepted.accepted`)."""
    start: str | None = None
    """Folder of an earlier draft of the same shape, from whose weights training goes on."""
    device: str = "auto"
    seed: int = 0
    int8: bool = False
    measured: int = 48
    """Held-out sequences for each temperature."""

    @property
    def schedule(self) -> Schedule:
        """Raises `RecipeError`."""
        part = self.accepting_part
        if part is None:
            part = 1.0 if self.start is not None else self.cooling
        shares = {"cooling": self.cooling, "accepting": self.accepting, "accepting-part": part}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise RecipeError(f"--{name} {share:g} is no share: it must lie between 0 and 1")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise RecipeError(f"--seconds {self.seconds:g} is no time")
        if not 0 < self.learning_rate < 1:
            raise RecipeError(f"--learning-rate {self.learning_rate:g} must lie between 0 and 1")
        if self.accepting_part is not None and not self.accepting:
            raise RecipeError("--accepting-part says when acceptance is in the loss: say how much of it: --accepting")
        if self.along_path and not self.accepting:
            raise RecipeError(
                "--along-path says how acceptance is counted in the loss: say how much of it: --accepting"
            )
        if self.accepting and (not part or (self.seconds is None and part * self.steps < 1)):
            raise RecipeError(
                f"--accepting {self.accepting:g} would not be in the loss of any step: its part of the training is "
                f"{part:g}; say it with --accepting-part (without it, it is --cooling, or with --start the whole)"
            )
        return Schedule(self.learning_rate, self.cooling, self.accepting, part)


class Progress(msgspec.Struct, frozen=True):
    """After a step: its loss, and how often guesses were right, with those before them, by place."""

    step: int
    done: float
    """Part of the whole training, from 0 to 1."""
    loss: float
    right: list[float]
    seconds: float
    """Of writing and learning."""
    writing_seconds: float
    left: float
    """Seconds until the draft is written, if it goes on so."""


class Measured(msgspec.Struct, frozen=True):
    """Acceptance on held-out text: the share of steps whose first guess, first two guesses, ... are right, and their
    sum, the tokens accepted a step beyond the one that comes anyway."""

    temperature: float
    by_position: list[float]
    accepted: float
    blocks: int
