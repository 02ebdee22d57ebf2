"""`lowlat train-draft`: train a draft for a model from the model's own text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from lowlat.training.recipe import Measured, Progress

EPILOG = """
Examples:

  lowlat train-draft --model smollm2 --kind dspark --data ./agent-sessions --output ./draft --int8

  lowlat train-draft --model ./Llama-3.2-1B --kind dflash --data notes.txt --steps 4000 --output ./draft

  lowlat serve --model smollm2 --spec dspark --draft ./draft

Data are folders or files: .jsonl with one turn of a session a line (input: the conversation so far, output), or plain
text. The model continues them, and the draft learns from what the model wrote. The last sessions of each folder are
kept from training; acceptance by position is measured on them, at each temperature, and written to training.json.

What ends before its time, by Ctrl-C or otherwise, goes on with the same command and --resume from the state that was
kept last (--save-every).
"""

_EVERY_S = 5.0


def train_draft(
    *,
    model: Annotated[str, typer.Option("--model", "-m", help="The model, as in lowlat serve.")] = "smollm2",
    kind: Annotated[Literal["dflash", "dflash2", "dspark"], typer.Option("--kind", help="Kind of draft.")] = "dspark",
    data: Annotated[list[Path], typer.Option("--data", help="Folder or file of text; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the draft.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of training.")] = 2000,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1, help="Time for all of it, measuring and storing too, in place of steps."),
    ] = None,
    hold_out: Annotated[int, typer.Option("--hold-out", min=0, help="Sessions of each folder to measure on.")] = 3,
    device: Annotated[str, typer.Option("--device", help="auto (a GPU if there is one), cpu, cuda ...")] = "auto",
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Sequences of a step.")] = 32,
    writes: Annotated[int, typer.Option("--writes", min=1, help="Written at once: so many times --sequences.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Steps after each writing.")] = 4,
    kept: Annotated[int, typer.Option("--kept", min=1, help="Writings that steps choose from.")] = 1,
    anchors: Annotated[int, typer.Option("--anchors", min=1, help="Blocks of each sequence in a step.")] = 16,
    text_anchors: Annotated[int, typer.Option("--text-anchors", min=0, help="How many of them in the prompt.")] = 0,
    sessions: Annotated[
        float, typer.Option("--sessions", min=0, max=1, help="Share of prompts from sessions, beside other text.")
    ] = 0.7,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=8, help="Length of the longest prompts.")] = 384,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", min=8, help="Length of answers.")] = 128,
    alone_tokens: Annotated[
        int, typer.Option("--alone-tokens", min=0, help="Length of what the model says to itself, unprompted. 0: none.")
    ] = 0,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            "--temperature", "-t", min=0, max=2, help="Of writing; may be repeated. Default: 0 and 0.8 in turn."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", min=2, max=64, help="Rows of a block.")] = 6,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers of the draft.")] = 2,
    taps: Annotated[int, typer.Option("--taps", min=1, help="Layers of the model that it looks at.")] = 3,
    intermediate_size: Annotated[int, typer.Option("--intermediate-size", min=1, help="Width of its MLPs.")] = 1024,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the Markov head or selector.")] = 48,
    derived: Annotated[
        int,
        typer.Option("--derived", min=0, help="Width of a network in place of the Markov head's table. 0: a table."),
    ] = 0,
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=0, help="Tokens that it can guess, the most frequent ones. 0: all.")
    ] = 0,
    window: Annotated[int, typer.Option("--window", min=0, help="Tokens before a block that it sees. 0: all.")] = 0,
    learning_rate: Annotated[float, typer.Option("--learning-rate", min=0, help="Highest learning rate.")] = 1e-3,
    cooling: Annotated[
        float, typer.Option("--cooling", min=0, max=1, help="Last part of the time, in which the rate falls.")
    ] = 1.0,
    accepting: Annotated[
        float,
        typer.Option("--accepting", min=0, max=1, help="Part of the loss that is acceptance itself, at the end."),
    ] = 0.0,
    accepting_part: Annotated[
        float | None,
        typer.Option(
            "--accepting-part",
            min=0,
            max=1,
            help="Last part of the time, in which it is. Default: the part of --cooling; with --start the whole.",
        ),
    ] = None,
    along_path: Annotated[
        bool,
        typer.Option("--along-path", help="Count acceptance along the tokens that the model drew: without bias."),
    ] = False,
    start: Annotated[
        Path | None, typer.Option("--start", help="Folder of an earlier draft of the same shape, to go on from.")
    ] = None,
    measured: Annotated[int, typer.Option("--measured", min=1, help="Held-out sequences for each temperature.")] = 48,
    int8: Annotated[bool, typer.Option("--int8", help="Store matrices as int8 with a scale a row.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Makes training repeatable.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training in --output that did not finish, if there is one.")
    ] = False,
    save_every: Annotated[
        float, typer.Option("--save-every", min=0, help="Seconds between the states from which it can go on.")
    ] = 30.0,
) -> None:
    """Train a DFlash, DFlash 2 or DSpark draft for a model, on a CPU or a GPU."""
    from lowlat.models.config import UnsupportedModelError
    from lowlat.models.loading.errors import CheckpointError
    from lowlat.speculative.draft_files import DraftFileError
    from lowlat.training.recipe import Recipe, RecipeError
    from lowlat.training.texts import TextError
    from lowlat.training.train_draft import train
    from lowlat.training.unfinished import UNFINISHED

    recipe = Recipe(
        model=model,
        kind=kind,
        data=tuple(map(str, data)),
        hold_out=hold_out,
        steps=steps,
        seconds=seconds,
        sequences=sequences,
        writes=writes,
        rounds=rounds,
        kept=kept,
        anchors=anchors,
        text_anchors=min(text_anchors, anchors),
        sessions=sessions,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        alone_tokens=alone_tokens,
        temperatures=tuple(temperature or (0.0, 0.8)),
        block_size=block_size,
        layers=layers,
        taps=taps,
        intermediate_size=intermediate_size,
        rank=rank,
        derived=derived,
        vocabulary=vocabulary,
        window=window,
        learning_rate=learning_rate,
        cooling=cooling,
        accepting=accepting,
        accepting_part=accepting_part,
        along_path=along_path,
        start=None if start is None else str(start),
        device=device,
        seed=seed,
        int8=int8,
        measured=measured,
    )
    try:
        found = train(recipe, output, _Printer(), typer.echo, resume=resume, save_s=save_every)
    except (RecipeError, TextError, CheckpointError, UnsupportedModelError, DraftFileError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(_stopped(output / UNFINISHED, save_every), err=True)
        raise typer.Exit(130) from None
    typer.echo(f"written to {output}")
    for of in found:
        typer.echo(_line(of))
    if not found:
        typer.echo("nothing was held out, so acceptance is not measured: of folders of sessions (.jsonl) the last are")


def _stopped(unfinished: Path, save_s: float) -> str:
    if unfinished.exists():
        return f"stopped: the same command with --resume goes on from {unfinished}"
    return f"stopped before anything was kept, which happens every {save_s:g} s (--save-every): start again"


class _Printer:
    """One line every few seconds, and the last."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() < self._next and progress.done < 1:
            return
        self._next = time.monotonic() + _EVERY_S
        right = " ".join(f"{part:.2f}" for part in progress.right)
        typer.echo(
            f"step {progress.step} ({progress.done:.0%})  loss {progress.loss:.3f}  right by position {right}  "
            f"{progress.seconds:.0f} s ({progress.writing_seconds:.0f} s of them writing), {progress.left:.0f} s left"
        )


def _line(of: Measured) -> str:
    by_position = " ".join(f"{part:.3f}" for part in of.by_position)
    return (
        f"temperature {of.temperature:g}: {of.accepted:.2f} tokens accepted a step beside the one that comes anyway, "
        f"by position {by_position} ({of.blocks} blocks)"
    )
