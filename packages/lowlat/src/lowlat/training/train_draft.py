"""Training a draft: the target writes, the draft learns to foresee it; then acceptance is measured on held-out text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowlat.engine.build import eos_ids
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.speculative.draft_files import save_draft
from lowlat.training.clock import Clock
from lowlat.training.learner import Learner, survival
from lowlat.training.measuring import measure
from lowlat.training.new_draft import choose_tokens, embed_tokens, new_network, place_tokens, shape_of, take_weights
from lowlat.training.recipe import Measured, Progress, Recipe, RecipeError
from lowlat.training.target import Target, Written
from lowlat.training.texts import Prompts, Texts
from lowlat.training.unfinished import Position, Unfinished
from lowlat.training.writings import Writings, whole_room

_TELL_S = 2.0
"""Least seconds between reports: each waits for the device."""
_WRITTEN = 20
"""Tokens of the target count so many times those of the texts, in the choice of what can be guessed."""
_SPARE = 1.2
"""What comes after the steps may take so many times what the same took before them."""

Tell = Callable[[Progress], None]
Say = Callable[[str], None]


def train(
    recipe: Recipe, output: Path, tell: Tell, say: Say = lambda text: None, *, resume: bool = False, save_s: float = 30
) -> list[Measured]:
    """Train, measure, and write the draft with training.json into `output`.

    Args:
        tell: hears of steps.
        say: hears of what else is done.
        resume: go on with a training that did not finish, if `output` has one.
        save_s: seconds between the states that are kept there, from which it can go on.

    Raises `RecipeError`, `TextError`, `CheckpointError`, `UnsupportedModelError`, `DraftFileError`, `OSError`.
    """
    return _Training(recipe, output, say, resume=resume).run(tell, save_s)


class _Training:
    """One training, from reading the model to writing the draft."""

    def __init__(self, recipe: Recipe, output: Path, say: Say, *, resume: bool) -> None:
        self._began = time.monotonic()
        self._recipe, self._output, self._say = recipe, output, say
        _ = recipe.schedule  # what does not go together is said before anything is read
        device = _device(recipe.device)
        self._files = Texts([Path(path) for path in recipe.data], recipe.hold_out)
        self._unfinished = Unfinished(output, recipe, self._files.training)
        position = self._unfinished.position(resume=resume)
        say(f"reads {recipe.model}")
        checkpoint = open_checkpoint(recipe.model)
        tokenizer = checkpoint.tokenizer()
        chat = checkpoint.chat(tokenizer)
        room = whole_room(recipe)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._target = Target(checkpoint, device, dtype, room)
        self._config = shape_of(recipe, self._target)
        torch.manual_seed(recipe.seed)
        self._network = new_network(recipe, self._config, room).to(device)
        factors_X = None if recipe.start is None else take_weights(self._network, Path(recipe.start))
        say(f"reads {len(self._files.training)} files to train on and {len(self._files.held_out)} to measure on")
        longest, seed = recipe.prompt_tokens, recipe.seed
        self._prompts = Prompts(self._files.training, tokenizer, chat, longest, seed, anywhere=True)
        self._held_out = None
        if self._files.held_out:
            self._held_out = Prompts(self._files.held_out, tokenizer, chat, longest, seed + 1)
        layers = self._config.target_layer_ids
        self._writings = Writings(recipe, self._target, layers, frozenset(eos_ids(checkpoint)), factors_X)
        self._learner = Learner(recipe, self._target, self._network, self._writings.bank)
        output.mkdir(parents=True, exist_ok=True)  # what cannot be written is found out before the long part
        self._position = self._begin() if position is None else self._go_on(position)

    def _begin(self) -> Position:
        network, recipe = self._network, self._recipe
        self._say(f"{recipe.model} writes for the first time")
        writing = time.monotonic()
        self._writings.write(self._prompts, 0)
        writing = time.monotonic() - writing
        if recipe.start is None and network.vocabulary is not None:
            counts_V = self._prompts.counts(network.config.vocab_size)
            written_V = self._writings.bank.tokens().cpu().bincount(minlength=network.config.vocab_size)
            choose_tokens(network, counts_V + _WRITTEN * written_V)
        embed_tokens(network, self._target)
        if recipe.start is None:
            place_tokens(network, self._target)
        self._say("measures the draft as it is" if self._held_out is not None else "nothing is held out to measure on")
        measuring = time.monotonic()
        self._tests = self._written_tests()
        measured = self._measure()
        after = _SPARE * (time.monotonic() - measuring)
        seconds = None
        if recipe.seconds is not None:
            before = time.monotonic() - self._began
            seconds = recipe.seconds - before - after
            if seconds <= 0:
                raise RecipeError(
                    f"--seconds {recipe.seconds:g} leaves no time to learn: reading and writing took {before:.0f} s, "
                    f"and {after:.0f} s are kept for measuring; give more, or fewer --measured"
                )
        return Position(steps=0, passed=0.0, writing=writing, seconds=seconds, after=after, at_first=measured)

    def _go_on(self, position: Position) -> Position:
        self._say(f"goes on after {position.steps} steps: {self._recipe.model} writes again what is learnt from")
        stored = self._unfinished.tensors()
        parts: dict[str, dict[str, torch.Tensor]] = {"draft": {}, "learner": {}, "writings": {}}
        for name, of in stored.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = of
        self._network.load_state_dict(parts["draft"])
        self._learner.load_state(parts["learner"])
        self._writings.factors_X = parts["writings"]["factors"].to(self._target.device)
        embed_tokens(self._network, self._target)
        self._tests = self._written_tests()
        return position

    def run(self, tell: Tell, save_s: float) -> list[Measured]:
        """Write and learn until steps or seconds are over; then measure, and store the draft."""
        position, told = self._position, -_TELL_S
        clock = Clock(self._recipe.steps, position.seconds, position.after, position.passed)
        steps, writing, saved = position.steps, position.writing, clock.passed
        while clock.done(steps) < 1.0:
            self._wait()
            begun = time.monotonic()
            if self._writings.write(self._prompts, steps):
                self._wait()
                writing += time.monotonic() - begun
            loss, right_QP, known_QP = self._learner.step(steps, clock.done(steps))
            steps += 1
            last = clock.done(steps) == 1.0
            if last or clock.passed - told > _TELL_S:
                right = survival(right_QP, known_QP)
                told = clock.passed
                tell(Progress(steps, clock.done(steps), float(loss), right, told, writing, clock.left(steps)))
            if last or clock.passed - saved >= save_s:
                here = {"steps": steps, "passed": clock.passed, "writing": writing}
                self._unfinished.save(msgspec.structs.replace(position, **here), self._state())
                saved = clock.passed
        if self._held_out is not None:
            self._say("measures the draft")
        return self._finish(steps, self._measure())

    def _state(self) -> dict[str, torch.Tensor]:
        factors_X = self._writings.factors_X
        assert factors_X is not None
        of: dict[str, torch.Tensor] = {"writings.factors": factors_X}
        of |= {f"draft.{name}": weight for name, weight in self._network.state_dict().items()}
        return of | {f"learner.{name}": part for name, part in self._learner.state().items()}

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)

    def _written_tests(self) -> list[tuple[float, list[Written]]]:
        if self._held_out is None:
            return []
        return [
            (heat, self._writings.held_out(self._held_out, heat)) for heat in sorted(set(self._recipe.temperatures))
        ]

    def _measure(self) -> list[Measured]:
        return [measure(self._network, self._target, parts, heat) for heat, parts in self._tests]

    def _finish(self, steps: int, measured: list[Measured]) -> list[Measured]:
        weights = self._network.state_dict() | {"fc.weight_columns": self._writings.factors_X}
        save_draft(self._output, self._config, weights, int8=self._recipe.int8)
        device = self._target.device
        report: dict[str, Any] = {
            "recipe": msgspec.to_builtins(self._recipe),
            "steps": steps,
            "training_files": [path.name for path in self._files.training],
            "held_out_files": [path.name for path in self._files.held_out],
            "measured_at_first": msgspec.to_builtins(self._position.at_first),
            "measured": msgspec.to_builtins(measured),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "torch": torch.__version__,
        }
        (self._output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        self._unfinished.remove()
        return measured


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"--device {name} cannot be used here: {error}") from None
    return device
