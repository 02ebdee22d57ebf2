"""`lowlat bench ab`."""

from __future__ import annotations

import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lowlat.bench.busy import load_note
from lowlat.bench.commands.common import AsJson, Folder, Save, Weights, finite, numbers, plain_errors, random_weights
from lowlat.bench.commands.load import reachable
from lowlat.bench.keeper import Keeper, finish
from lowlat.bench.progress import say
from lowlat.bench.results import ARMS, Result, Simulated, known_arm, library_arm, new_result, slug

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lowlat.bench.ab import Load

EPILOG = """
Examples:

  lowlat bench make-model llama-1b /tmp/llama-1b

  lowlat bench ab --model /tmp/llama-1b --kernels lowlat-nvidia

  lowlat bench ab --preset agent --users 1,4 --kernels lowlat-cpu

Starts the same server twice, with --low-latency off and on, and loads them in
the order off, on, on, off. Refuses where the kernels computed less than
--least-covered of the steps, and where a request failed. The preset agent
needs recorded runs: --traces, or LOWLAT_DATA, the folder that holds traces/.
"""


def _loads(
    preset: str, users: Sequence[int], path: pathlib.Path | None, input_tokens: int, output_tokens: int, requests: int,
    time_scale: float, max_turns: int | None,
) -> list[Load]:  # fmt: skip
    from lowlat.bench import ab as measure
    from lowlat.bench.load.traces import data_folder

    if preset == "8k1k":
        return measure.long_prompt_loads(
            users, input_tokens=input_tokens, output_tokens=output_tokens, requests=requests
        )
    if preset != "agent":
        raise ValueError(f"--preset {preset!r} is neither 8k1k nor agent")
    place = path or data_folder() / "traces" / "agent" / "miniswe"
    agents = measure.data_agents(place, 0, max(users))
    levels = reachable(users, len(agents), "runs")
    return measure.agent_loads(agents, levels, time_scale=time_scale, max_turns=max_turns)


def ab(
    model: Annotated[str, typer.Option("--model", "-m", help="What both servers serve.")] = "smollm2",
    preset: Annotated[str, typer.Option("--preset", help="8k1k (single requests) or agent (replay).")] = "8k1k",
    users: Annotated[str | None, typer.Option("--users", help="Default: 1,2,4,8 for 8k1k; 1,4,8 for agent.")] = None,
    kernels: Annotated[str | None, typer.Option("--kernels", help="Kernel library of the low-latency server.")] = None,
    arm: Annotated[
        str | None, typer.Option("--arm", help="Its name in results; default: the kernel library's.")
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="8k1k: prompt tokens.")] = 8192,
    output_tokens: Annotated[int, typer.Option("--output", min=2, help="8k1k: answer tokens.")] = 1024,
    requests: Annotated[int, typer.Option("--requests", min=1, help="8k1k: requests of each user in a block.")] = 1,
    path: Annotated[pathlib.Path | None, typer.Option("--traces", help="agent: runs; default: LOWLAT_DATA.")] = None,
    time_scale: Annotated[
        float, typer.Option("--time-scale", min=0, callback=finite, help="agent: factor on recorded pauses.")
    ] = 0.0,
    max_turns: Annotated[int | None, typer.Option("--max-turns", min=1, help="agent: most turns of a run.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds of off, on, on, off.")] = 3,
    serve_args: Annotated[str, typer.Option("--serve-args", help="Further arguments of both servers, quoted.")] = "",
    one_at_a_time: Annotated[bool, typer.Option("--one-at-a-time", help="Start a server for each block.")] = False,
    together: Annotated[bool, typer.Option("--together", help="Start both servers at the same time.")] = False,
    least_covered: Annotated[
        float,
        typer.Option("--least-covered", min=0, max=1, callback=finite, help="Least fraction of steps by kernels."),
    ] = 0.5,
    acceptance: Annotated[
        bool,
        typer.Option(
            "--simulated-acceptance",
            help="Say that drafts were accepted by force; known where --serve-args has --spec-simulate-acceptance.",
        ),
    ] = False,
    weights: Weights = None,
    as_json: AsJson = False,
    save: Save = False,
    results: Folder = None,
) -> None:
    """The A/B of low-latency mode: per-user decode speed and P90 interactivity, and their ratios with intervals."""
    from lowlat.bench import ab as measure

    with plain_errors():
        simulated = random_weights(weights, needed=as_json or save)
        extra = shlex.split(serve_args)
        acceptance = acceptance or any(word.startswith("--spec-simulate-acceptance") for word in extra)
        counts = numbers(users or ("1,2,4,8" if preset == "8k1k" else "1,4,8"), "--users")
        loads = _loads(preset, counts, path, input_tokens, output_tokens, requests, time_scale, max_turns)
        if not (arm or kernels):
            raise ValueError(
                "say which library low-latency mode uses: --kernels NAME (`lowlat plugins list` names them)"
            )
        name = arm or library_arm(str(kernels))
        if name == "general":
            raise ValueError("--arm general is the server without low-latency mode: name the other one differently")
        if not known_arm(name):
            raise ValueError(f"--arm {name!r} is none of {', '.join(sorted(ARMS))} or plugin:NAME in lower case")
        on = ("--low-latency", "require", "--kernels", kernels) if kernels else ("--low-latency", "auto")
        shared = ("--model", model, *extra)
        sides = measure.Sides(shared=shared, on=on, on_arm=name, one_at_a_time=one_at_a_time, together=together)
        subject = "requests" if preset == "8k1k" and (input_tokens, output_tokens) != (8192, 1024) else preset
        simulation = Simulated(weights=simulated, acceptance=acceptance)
        forced = ("simulated-acceptance",) if acceptance else ()
        empty = new_result(slug("ab", subject, pathlib.Path(model).name, *forced), simulated=simulation)

        def result_of(outcome: measure.AbOutcome, done: Sequence[Load]) -> Result:
            return msgspec.structs.replace(empty, rows=measure.ab_rows(outcome, sides, done, load_note()))

        with Keeper(save, results, as_json=as_json, weights_said=weights is not None) as kept:
            kept.begin(empty)

            def keep(outcome: measure.AbOutcome, done: Sequence[Load]) -> None:
                if any(whose == name for _, whose in outcome.totals):  # the low-latency server has computed something
                    measure.check_covered(outcome, least_covered)
                kept(result_of(outcome, done))

            outcome = measure.run_ab(sides, loads, rounds=rounds, say=say, measured=keep)
            measure.check_covered(outcome, least_covered)
            print(f"kernels computed {outcome.covered.share:.1%} of the low-latency server's steps", file=sys.stderr)
            finish(result_of(outcome, loads), as_json=as_json, kept=kept, weights_said=weights is not None)
