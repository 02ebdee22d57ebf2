"""`lowlat bench regions`."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import Annotated

import typer

from lowlat.bench.commands.common import AsJson, Folder, Keeper, Save, end_progress, finish, plain_errors, say
from lowlat.bench.results import Simulated, new_result, slug

EPILOG = """
Examples:

  lowlat bench regions --model smollm2 --threads 1 --perfetto smollm2.perfetto.json --timeline smollm2.png

  lowlat bench regions --model llama-1b --device cuda --arms general,lowlat-nvidia --timeline llama-1b.png

  lowlat bench regions --model deepseek-v41-tiny --spec draft --context 64     experts, hyper-connections, proposals

  lowlat bench regions --model smollm2 --model-folder smollm2 --device cuda --spec dspark

Open the trace at ui.perfetto.dev. Each arm's step is measured with and without marks (on a GPU: records of a graph's
kernels) in alternation; where the regions' sum is not within 3 % of the step without them, the command refuses.
"""


def regions(
    model: Annotated[str, typer.Option("--model", "-m", help="Preset, or a folder with a config.json.")] = "smollm2",
    model_folder: Annotated[
        str | None, typer.Option("--model-folder", help="Real weights for the general arm: a folder or `smollm2`.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Keep only so many layers.")] = None,
    arms: Annotated[str, typer.Option("--arms", help="general, torch-eager-graph, lowlat-NAME.")] = "general",
    spec: Annotated[
        str,
        typer.Option("--spec", help="Guesses as of lowlat serve; one token a step counts as right. draft: V4.1's own."),
    ] = "off",
    draft: Annotated[str | None, typer.Option("--draft", help="As of lowlat serve, for --spec.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Requests in a step, one row each.")] = 1,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in each request's cache.")] = 1024,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; default: torch's own choice.")
    ] = None,
    instances: Annotated[int, typer.Option("--instances", min=3, help="Least instances of every region.")] = 780,
    perfetto: Annotated[pathlib.Path | None, typer.Option("--perfetto", help="Write a Perfetto trace here.")] = None,
    timeline: Annotated[
        pathlib.Path | None, typer.Option("--timeline", help="Write a picture here (PNG and SVG).")
    ] = None,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """Medians of the named regions of a step, a timeline picture and a Perfetto trace."""
    from lowlat.bench import regions as measure

    with plain_errors():
        import torch

        from lowlat.bench.arms.base import StepCase
        from lowlat.bench.presets import V41_NAMES, FolderShape, any_shape
        from lowlat.bench.random_v41 import make_v41, v41_shape
        from lowlat.bench.region_arms import build_region_arm, check_region_arm
        from lowlat.bench.step import StepOptions, check_contexts, check_options

        if threads is not None:
            torch.set_num_threads(threads)
        place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        dtype = dtype or ("float32" if place == "cpu" else "bfloat16")
        names = tuple(filter(None, arms.split(",")))
        for name in names:
            check_region_arm(name)
        check_options(StepOptions(model=model, model_folder=model_folder, arms=names, dtype=dtype, device=place))
        v41 = model in V41_NAMES
        own_draft = spec == "draft"
        if own_draft and not v41:
            raise ValueError(f"--spec draft: {model} has no draft of its own; {' and '.join(V41_NAMES)} do")
        if v41 and place != "cpu":
            raise ValueError(f"{model} is computed on CPUs only: add --device cpu")
        random = model_folder is None
        kept = Keeper(save, results)
        with contextlib.ExitStack() as stack:
            if v41 and random:
                say(f"writing {model} with random weights")
                model_folder = stack.enter_context(make_v41(model, layers, 0, draft=own_draft))
            shape = v41_shape(model, layers) if v41 else any_shape(model, layers)
            if isinstance(shape, FolderShape):
                model_folder = model_folder or model
            case = StepCase(
                shape=shape, requests=rows, context=context, device=place, model=model_folder, dtype=dtype, steps=32,
                spec=spec, draft=draft,
            )  # fmt: skip
            result = new_result(
                slug("regions", case.shape.name, *((spec,) if spec != "off" else ()), *(("random",) if random else ())),
                simulated=Simulated(weights=random, acceptance=spec != "off"),
                gpus=0 if place == "cpu" else 1,
            )
            check_contexts(shape, (context,), case.steps)
            measured, refused = [], []
            for name in names:
                say(f"building {name}")
                arm = build_region_arm(name, case)
                try:
                    times = measure.measure_regions(name, arm, instances, say)
                finally:
                    arm.close()
                try:
                    measure.check_sum(times, arm.details)
                except measure.RegionsRefusedError as error:
                    refused.append(str(error))
                    continue
                measured.append(times)
                result.rows += measure.region_rows(times, case, arm.note, arm.details)
                kept(result)
        if not measured:
            raise RuntimeError("; ".join(refused))
        finish(result, as_json=as_json, kept=kept)
        if perfetto is not None:
            perfetto.write_text(measure.perfetto(measured))
            print(f"wrote {perfetto}: open it at ui.perfetto.dev", file=sys.stderr)
        if timeline is not None:
            for path in measure.timeline(measured, timeline):
                print(f"wrote {path}", file=sys.stderr)
        end_progress()
        if refused:
            raise RuntimeError("; ".join(refused))
