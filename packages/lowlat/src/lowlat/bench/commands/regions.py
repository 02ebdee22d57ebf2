"""`lowlat bench regions`."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lowlat.bench.commands.common import AsJson, Folder, Save, check_output, plain_errors
from lowlat.bench.keeper import Keeper, finish
from lowlat.bench.progress import end_progress, say
from lowlat.bench.results import Result, Simulated, new_result, slug
from lowlat.bench.step_options import MOST_THREADS, StepOptions, check_contexts, check_options, check_weights

if TYPE_CHECKING:
    from lowlat.bench.arms.base import StepCase
    from lowlat.bench.regions import RegionArm, RegionTimes

EPILOG = """
Examples:

  lowlat bench regions --model smollm2 --threads 1 --perfetto smollm2.perfetto.json --timeline smollm2.png

  lowlat bench regions --model llama-1b --device cuda --arms general,lowlat-nvidia --timeline llama-1b.png

  lowlat bench regions --model deepseek-v41-tiny --spec draft --context 64     experts, hyper-connections, proposals

  lowlat bench regions --model smollm2 --model-folder smollm2 --device cuda --spec dspark

Open the trace at ui.perfetto.dev. Each arm's step is measured with and without marks (on a GPU: records of a graph's
kernels) in alternation; where the regions' sum is not within 3 % of the step without them, the command measures again,
three times at most, if other work was the cause, and then refuses with cause and cure. A quiet machine is the best one.
"""


_STEPS = 32
"""Between two rewinds of the context."""


def regions(
    model: Annotated[str, typer.Option("--model", "-m", help="Preset, or a folder with a config.json.")] = "smollm2",
    model_folder: Annotated[
        str | None, typer.Option("--model-folder", help="Real weights for the general arm: a folder or `smollm2`.")
    ] = None,
    random_folder: Annotated[
        bool, typer.Option("--random-folder", help="The folder's weights are random (`make-model`).")
    ] = False,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Keep only so many layers.")] = None,
    arms: Annotated[str, typer.Option("--arms", help="general, torch-eager-graph, lowlat-NAME.")] = "general",
    spec: Annotated[
        Literal["off", "ngram", "draft", "draft-model", "dflash", "dflash2", "dspark"],
        typer.Option("--spec", help="Guesses as of lowlat serve; one token a step counts as right. draft: V4.1's own."),
    ] = "off",
    draft: Annotated[str | None, typer.Option("--draft", help="As of lowlat serve, for --spec.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Requests in a step, one row each.")] = 1,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in each request's cache.")] = 1024,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, max=MOST_THREADS, help="CPU threads; default: torch's own choice.")
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
    from lowlat.bench import plots
    from lowlat.bench import regions as measure

    with plain_errors():
        import torch

        from lowlat.bench.arms.base import StepCase
        from lowlat.bench.local_server import ended_by_signals
        from lowlat.bench.presets import V41_NAMES, FolderShape, any_shape
        from lowlat.bench.random_v41 import make_v41, v41_shape
        from lowlat.bench.region_arms import check_region_arm

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
            raise ValueError(
                f"{model} is computed on CPUs only: add --device cpu. Its experts' kernels on a GPU: "
                "python benchmarks/expert_window.py"
            )
        check_output(perfetto, "--perfetto")
        check_output(timeline, "--timeline")
        if timeline is not None:
            plots.check_matplotlib()
        random = model_folder is None or random_folder
        with ended_by_signals(), contextlib.ExitStack() as stack:
            kept = stack.enter_context(Keeper(save, results, as_json=as_json))
            shape = v41_shape(model, layers) if v41 else any_shape(model, layers)
            check_contexts(shape, (context,), _STEPS)
            if model_folder is not None:
                check_weights(model_folder, shape, layers)
            words = (spec,) if spec != "off" else ()
            result = new_result(
                slug("regions", shape.name, *words, *(("random",) if random else ())),
                simulated=Simulated(weights=random, acceptance=spec != "off"),
                gpus=0 if place == "cpu" else 1,
            )
            kept.begin(result)
            if v41 and model_folder is None:
                say(f"writing {model} with random weights")
                model_folder = stack.enter_context(make_v41(model, layers, 0, draft=own_draft))
            if isinstance(shape, FolderShape):
                model_folder = model_folder or model
            case = StepCase(
                shape=shape, requests=rows, context=context, device=place, model=model_folder, dtype=dtype,
                steps=_STEPS, spec=spec, draft=draft,
            )  # fmt: skip
            measured: list[RegionTimes] = []
            refused = []

            def tell(times: RegionTimes, arm: RegionArm) -> None:
                measured.append(times)
                result.rows += measure.region_rows(times, case, arm.note, arm.details)
                kept(result)

            for name in names:
                try:
                    _measure(name, case, instances, tell)
                except RuntimeError as error:  # the other arms still count
                    refused.append(str(error) if str(error).startswith(name) else f"{name}: {error}")
                    say(refused[-1])
            if not measured:
                raise RuntimeError("; ".join(refused))
            finish(result, as_json=as_json, kept=kept)
        _draw(measured, result, perfetto, timeline)
        if refused:
            raise RuntimeError("; ".join(refused))


def _measure(name: str, case: StepCase, instances: int, tell: Callable[[RegionTimes, RegionArm], None]) -> None:
    """Measure one arm and tell its times; of one that is ended early what it has, where that adds up."""
    import torch

    from lowlat.bench import regions as measure
    from lowlat.bench.region_arms import build_region_arm

    say(f"building {name}")
    arm = build_region_arm(name, case)
    growing: list[RegionTimes] = []
    try:
        threads = torch.get_num_threads() if case.device == "cpu" else None
        tell(measure.measure_settled(name, arm, instances, say, threads=threads, begun=growing.append), arm)
    except (KeyboardInterrupt, SystemExit):
        if growing and growing[-1].steps:
            with contextlib.suppress(measure.RegionsRefusedError):
                measure.check_sum(growing[-1], arm.details)
                tell(growing[-1], arm)
        raise
    finally:
        arm.close()


def _draw(
    measured: list[RegionTimes], result: Result, perfetto: pathlib.Path | None, timeline: pathlib.Path | None
) -> None:
    from lowlat.bench import regions as measure

    if perfetto is not None:
        perfetto.write_text(measure.perfetto(measured))
        print(f"wrote {perfetto}: open it at ui.perfetto.dev", file=sys.stderr)
    if timeline is not None:
        for path in measure.timeline(measured, timeline, result):
            print(f"wrote {path}", file=sys.stderr)
    end_progress()
