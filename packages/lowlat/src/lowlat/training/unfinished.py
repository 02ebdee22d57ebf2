"""A training that is not finished, on disk: one file of tensors, replaced as a whole, from which it goes on.

Writings and random numbers are a matter of their numbers (`seeds`), so a step's number stands for both.
"""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lowlat.training.recipe import Measured, Recipe, RecipeError

UNFINISHED = "unfinished.safetensors"
"""Name of the file in the output folder."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a training is."""

    steps: int
    passed: float
    """Seconds of writing and learning."""
    writing: float
    """Seconds of them spent writing."""
    seconds: float | None
    """For writing and learning, all in all; None: there is a number of steps."""
    after: float
    """For what comes after."""
    at_first: list[Measured]
    """Acceptance before the first step."""


class Unfinished:
    """The file of one training in its output folder."""

    def __init__(self, output: Path, recipe: Recipe, files: list[Path]) -> None:
        """`files`: that are trained on."""
        self._path = output / UNFINISHED
        self._draft = output / "model.safetensors"
        self._in_place = recipe.start is not None and Path(recipe.start).resolve() == output.resolve()
        self._recipe = json.loads(msgspec.json.encode(recipe))
        named = [[path.name, path.stat().st_size] for path in files]
        self._files = blake2b(json.dumps(named).encode(), digest_size=8).hexdigest()

    def position(self, *, resume: bool) -> Position | None:
        """How far it is; None: it is to begin. Raises `RecipeError` where that is not what was asked for, or the file
        is of another training."""
        if not self._path.exists():
            if self._draft.exists() and (resume or not self._in_place):
                raise RecipeError(
                    f"{self._draft} is there: its training is finished; go on from it with --start, or begin anew with "
                    "another --output"
                )
            return None
        if not resume:
            raise RecipeError(
                f"{self._path} is a training that is not finished: go on with it by --resume, or remove the file"
            )
        try:
            with safe_open(self._path, "pt") as file:
                stored = json.loads(file.metadata()["training"])
            position = msgspec.convert(stored["position"], Position)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise RecipeError(f"{self._path} cannot be read ({error}): remove it to begin anew") from None
        changed = sorted(
            name
            for name in self._recipe.keys() | stored["recipe"].keys()
            if name != "device" and self._recipe.get(name) != stored["recipe"].get(name)
        )
        if changed:
            raise RecipeError(
                f"{self._path} was begun with other choices of {', '.join(changed)}: go on with the same, or remove "
                "the file to begin anew"
            )
        if stored["files"] != self._files:
            raise RecipeError(f"{self._path} was begun with other files of --data: give the same, or remove it")
        return position

    def tensors(self) -> dict[str, torch.Tensor]:
        """What `save` was given."""
        return load_file(self._path)

    def save(self, position: Position, tensors: dict[str, torch.Tensor]) -> None:
        """Take the place of what was saved before: whenever the process ends, one of both is there, whole."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        training = {"position": msgspec.to_builtins(position), "recipe": self._recipe, "files": self._files}
        partial = self._path.with_suffix(".partial")
        stored = {name: of.detach().cpu().contiguous() for name, of in tensors.items()}
        save_file(stored, partial, metadata={"training": json.dumps(training)})
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(self._path)

    def remove(self) -> None:
        """It is finished."""
        self._path.unlink(missing_ok=True)
