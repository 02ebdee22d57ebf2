"""A training's course: its schedule, what is refused, and that a break changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from spec_kit import save_target
from typer.testing import CliRunner

from lowlat.cli import main
from lowlat.training.clock import Clock
from lowlat.training.recipe import Progress, Recipe, RecipeError
from lowlat.training.train_draft import train


def recipe(**choices) -> Recipe:
    return Recipe(model="smollm2", data=("x",), **choices)


def in_loss(of: Recipe, steps: int = 100) -> list[float]:
    """How much of each step's loss is acceptance."""
    return [of.schedule.accepting_at(step / steps) for step in range(steps)]


def test_the_rate_rises_stays_and_falls():
    rate = recipe(learning_rate=0.01, cooling=0.4).schedule.rate
    assert rate(0.0) == pytest.approx(0.01 / 30)
    assert rate(0.0145) == pytest.approx(0.01 * 0.0155 / 0.03)
    assert rate(0.1) == rate(0.5) == rate(0.6) == 0.01
    assert rate(0.8) == pytest.approx(0.01 * 0.51)
    assert rate(1.0) == pytest.approx(0.01 * 0.02)
    falling = [rate(done / 100) for done in range(60, 101)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("cooling", [0.0, 1e-9, 0.01])
def test_acceptance_is_in_the_loss_though_hardly_anything_cools(cooling: float):
    """Its part of the training is its own: the middle of a schedule without cooling has it too."""
    rate = recipe(learning_rate=0.01, cooling=cooling).schedule.rate
    assert rate(0.5) == rate(0.98) == 0.01
    assert in_loss(recipe(cooling=cooling, accepting=0.8, accepting_part=1.0)) == [0.8] * 100
    assert in_loss(recipe(cooling=cooling, accepting=0.8, accepting_part=0.25)) == [0.0] * 75 + [0.8] * 25


def test_acceptance_comes_when_the_rate_falls_or_from_the_start_of_a_draft_that_knows():
    assert in_loss(recipe(cooling=0.3, accepting=0.8)) == [0.0] * 70 + [0.8] * 30
    assert in_loss(recipe(cooling=0.3, accepting=0.8, start="draft")) == [0.8] * 100
    assert in_loss(recipe(cooling=0.3)) == [0.0] * 100


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"cooling": 0.0, "accepting": 0.8}, "not be in the loss of any step"),
        ({"cooling": 0.001, "steps": 100, "accepting": 0.8}, "not be in the loss of any step"),
        ({"accepting_part": 0.5}, "--accepting"),
        ({"cooling": math.nan}, "--cooling nan"),
        ({"accepting": -0.1}, "--accepting -0.1"),
        ({"accepting": 0.5, "accepting_part": 1.5}, "--accepting-part 1.5"),
        ({"learning_rate": 0.0}, "--learning-rate 0"),
        ({"learning_rate": math.nan}, "--learning-rate nan"),
        ({"seconds": math.inf}, "--seconds inf"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(choices: dict[str, float], says: str):
    with pytest.raises(RecipeError, match=says):
        _ = recipe(**choices).schedule


def test_the_clock_counts_what_was_before_a_break_and_what_comes_after(monkeypatch: pytest.MonkeyPatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    by_steps = Clock(200, None, after=7.0, passed=50.0)
    by_time = Clock(200, 100.0, after=7.0, passed=50.0)
    now[0] += 30.0
    assert by_steps.passed == by_time.passed == 80.0
    assert by_steps.done(50) == 0.25
    assert by_steps.left(50) == 80.0 * 3 + 7.0
    assert by_time.done(50) == 0.8
    assert by_time.left(50) == 20.0 + 7.0
    now[0] += 100.0
    assert by_time.done(51) == 1.0
    assert by_time.left(51) == 7.0


class KilledError(Exception):
    """In place of the end of a process."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A training of seconds, with everything in it that is drawn or remembered."""
    folder = tmp_path_factory.mktemp("training")
    save_target(folder / "target", initializer_range=0.1)
    (folder / "data").mkdir()
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(33, 33 + 60, (3000,), generator=generator).tolist()
    (folder / "data" / "text.txt").write_text("".join(map(chr, letters)))
    return Recipe(
        model=str(folder / "target"), data=(str(folder / "data"),), steps=13, sequences=3, rounds=2, kept=3,
        anchors=4, text_anchors=1, prompt_tokens=12, answer_tokens=10, alone_tokens=8, block_size=4, layers=1, taps=2,
        intermediate_size=32, rank=4, derived=8, vocabulary=80, window=6, learning_rate=0.01, cooling=0.5,
        accepting=0.5, device="cpu", int8=True,
    )  # fmt: skip


def killed_at(step: int):
    def tell(progress: Progress) -> None:
        if progress.step == step:
            raise KilledError

    return tell


def test_a_training_that_is_killed_goes_on_as_if_it_had_not_been(
    small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("lowlat.training.train_draft._TELL_S", 0.0)
    told: list[Progress] = []
    train(small, tmp_path / "whole", told.append, save_s=0)
    assert [of.step for of in told] == list(range(1, 14))
    assert not (tmp_path / "whole" / "unfinished.safetensors").exists()
    again, unfinished = tmp_path / "again", tmp_path / "again" / "unfinished.safetensors"
    for step in (1, 4, 9, 13):  # before anything was kept; after an even and an odd number of steps; at the end
        with pytest.raises(KilledError):
            train(small, again, killed_at(step), resume=True, save_s=0)
        assert unfinished.exists() == (step > 1)
        assert not (again / "model.safetensors").exists()
    (again / "unfinished.partial").write_bytes(b"half of it")  # killed while it was written
    resumed: list[Progress] = []
    train(small, again, resumed.append, resume=True, save_s=0)
    assert [of.loss for of in resumed] == [told[12].loss]
    whole, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert whole.keys() == found.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, found[name]), name
    assert not unfinished.exists()


def test_what_starts_from_a_draft_accepts_what_it_did(small: Recipe, tmp_path: Path):
    generator = torch.Generator().manual_seed(3)
    for number in range(2):
        said = "".join(map(chr, torch.randint(33, 93, (400,), generator=generator).tolist()))
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"input": said, "output": "x"}))
    choices = {"data": (str(tmp_path),), "hold_out": 1, "steps": 30, "int8": False, "measured": 9, "alone_tokens": 0}
    first = msgspec.structs.replace(small, **choices)
    found = train(first, tmp_path / "first", lambda progress: None)
    reports = [json.loads((tmp_path / "first" / "training.json").read_text())]
    assert sum(of.accepted for of in found) > sum(of["accepted"] for of in reports[0]["measured_at_first"]) > 0
    second = msgspec.structs.replace(first, start=str(tmp_path / "first"), steps=1)
    train(second, tmp_path / "second", lambda progress: None)
    reports.append(json.loads((tmp_path / "second" / "training.json").read_text()))
    for was, now in zip(found, reports[1]["measured_at_first"], strict=True):
        assert now["accepted"] == pytest.approx(was.accepted, abs=0.02)
        assert now["blocks"] == pytest.approx(was.blocks, rel=0.02)


def test_an_unfinished_training_is_not_lost_by_mistake(small: Recipe, tmp_path: Path):
    with pytest.raises(KilledError):
        train(small, tmp_path, killed_at(13), save_s=0)
    kept = (tmp_path / "unfinished.safetensors").read_bytes()
    with pytest.raises(RecipeError, match="--resume"):
        train(small, tmp_path, print)
    with pytest.raises(RecipeError, match="other choices of anchors, rank"):
        train(msgspec.structs.replace(small, rank=5, anchors=5), tmp_path, print, resume=True)
    assert (tmp_path / "unfinished.safetensors").read_bytes() == kept
    (tmp_path / "unfinished.safetensors").write_bytes(kept[: len(kept) // 2])
    with pytest.raises(RecipeError, match="cannot be read"):
        train(small, tmp_path, print, resume=True)
    (tmp_path / "unfinished.safetensors").write_bytes(kept)
    train(small, tmp_path, lambda progress: None, resume=True)
    finished = (tmp_path / "model.safetensors").read_bytes()
    for resume in (True, False):
        with pytest.raises(RecipeError, match="--start, or begin anew with another --output"):
            train(small, tmp_path, print, resume=resume)
    assert (tmp_path / "model.safetensors").read_bytes() == finished


def test_a_time_for_all_leaves_time_to_measure(small: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves on whenever it is looked at."""
    looks = [0]

    def monotonic() -> float:
        looks[0] += 1
        return 0.25 * looks[0]

    for module in ("clock", "train_draft"):
        monkeypatch.setattr(f"lowlat.training.{module}.time", SimpleNamespace(monotonic=monotonic))
    told: list[Progress] = []
    train(msgspec.structs.replace(small, seconds=60.0), tmp_path, told.append)
    assert told[-1].done == 1.0
    assert told[-1].step > 5
    assert 55 < 0.25 * looks[0] < 63, "the last step begins in time"
    with pytest.raises(RecipeError, match="leaves no time to learn"):
        train(msgspec.structs.replace(small, seconds=1e-3), tmp_path / "other", print)


def test_an_output_that_cannot_be_is_found_out_before_anything_is_written(small: Recipe, tmp_path: Path):
    (tmp_path / "file").touch()
    said: list[str] = []
    with pytest.raises(OSError, match="file"):
        train(small, tmp_path / "file" / "draft", print, said.append)
    assert said
    assert not any("writes" in text for text in said)


def test_the_command_refuses_what_would_not_be_learnt(small: Recipe, tmp_path: Path):
    command = ["train-draft", "--model", small.model, "--data", small.data[0], "--output", str(tmp_path / "x")]
    result = CliRunner().invoke(main.app, [*command, "--cooling", "0", "--accepting", "0.8"])
    assert result.exit_code == 2
    assert "--accepting-part" in result.output
    assert not (tmp_path / "x").exists()
