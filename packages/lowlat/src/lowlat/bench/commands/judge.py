"""`lowlat bench compare`, `lowlat bench gate` and `lowlat bench report`."""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from lowlat.bench.commands.common import Folder, check_output, finite, plain_errors
from lowlat.bench.progress import end_progress, say

if TYPE_CHECKING:
    from lowlat.bench.results import Result

COMPARE_EPILOG = """
Example:

  lowlat bench compare before.json after.json

Where both files hold a reference arm (read-floor, torch-compile, ...) of the same shape, ratios are taken to it first,
so that drift between the two runs cancels. Exit code 1 where something got worse.
"""

GATE_EPILOG = """
Examples:

  lowlat bench gate             judge; exit code 1 where something got worse

  lowlat bench gate --update    take today's counts as benchmarks/gate.json

Judged: instructions of host work a step (scripted executor under callgrind), bytes of a step, and times as a ratio to
a fixed piece of work in the same run, only beyond 1.5 times after three repeats. What is in the baseline or in today's
counts alone fails too, and so does a kind of which nothing was judged (another Python than the baseline's, say).
"""

REPORT_EPILOG = """
Examples:

  lowlat bench report                          all tables on standard output

  lowlat bench report --readme README.md       write the README's performance tables

  lowlat bench report --check                  exit code 1 where the README's table is stale or a result is refused

  lowlat bench report --plots plots            PNG and SVG of latency, roofline, per-user speed against total
"""

AsJson = Annotated[bool, typer.Option("--json", help="Print for machines.")]


def compare(
    a: Annotated[pathlib.Path, typer.Argument(help="The result before.")],
    b: Annotated[pathlib.Path, typer.Argument(help="The result after.")],
    threshold: Annotated[
        float, typer.Option("--threshold", min=0, callback=finite, help="Changes below this fraction count as none.")
    ] = 0.02,
    as_json: AsJson = False,
) -> None:
    """Compare two results; a verdict is given only beyond the noise of both."""
    from lowlat.bench.compare import compare as compare_results
    from lowlat.bench.report import number, shape_words
    from lowlat.bench.results import load

    with plain_errors():
        before, after = load(a), load(b)
        changes = compare_results(before, after, threshold=threshold)
        if not changes:
            raise ValueError(
                f"{a} and {b} share no value: nothing was compared. One holds {_held(before)}, the other {_held(after)}"
                ". Compared is what has the same workload, shape, metric and arm (`lowlat bench serve --arm` names it)"
            )
        if as_json:
            print(msgspec.json.encode(changes).decode())
        for change in changes if not as_json else []:
            against = f" against {change.reference}" if change.reference else ""
            reason = f" ({change.reason})" if change.reason else ""
            print(
                f"{change.verdict:10}  {shape_words(change.shape)}  {change.arm}  {change.metric}: "
                f"{number(change.a)} -> {number(change.b)}, "
                f"ratio{against} {change.ratio:.3f} ({change.low:.3f}–{change.high:.3f}){reason}"
            )
        if any(change.verdict == "worse" for change in changes):
            raise typer.Exit(1)


def _held(result: Result) -> str:
    """The first few workloads and arms of a result, in words."""
    names = list(dict.fromkeys(f"{row.workload} by {row.arm}" for row in result.rows))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def gate(
    baseline: Annotated[pathlib.Path | None, typer.Option("--baseline", help="Default: benchmarks/gate.json.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Write today's counts as the baseline.")] = False,
    only: Annotated[str | None, typer.Option("--only", help="instructions, bytes or times.")] = None,
    as_json: AsJson = False,
) -> None:
    """Judge host work by instructions, steps by bytes, and times only where they are far off."""
    from lowlat.bench import gate as judge
    from lowlat.bench.gate_counts import current_baseline, run_gate

    with plain_errors():
        if only not in (None, "instructions", "bytes", "times"):
            raise ValueError(f"--only {only!r} is none of instructions, bytes, times")
        place = baseline or judge.default_baseline()
        if update:
            check_output(place, "--baseline")
            judge.save_baseline(current_baseline(say), place)
            end_progress()
            print(f"wrote {place}", file=sys.stderr)
            return
        findings = run_gate(judge.load_baseline(place), only=only, say=say)
        end_progress()
        if as_json:
            print(msgspec.json.encode(findings).decode())
        for finding in findings if not as_json else []:
            figures = " against ".join(
                f"{value:,.0f}" if value >= 1000 else f"{value:g}"  # the last byte counts
                for value in (finding.value, finding.baseline)
                if value is not None
            )
            print(f"{finding.verdict:10}  {finding.kind:12}  {finding.name:28}  {figures}  {finding.reason}")
        failed = [finding.name for finding in findings if finding.verdict in judge.FAILING]
        unjudged = judge.not_judged(findings)
        if failed or unjudged:
            print(
                "error: " + "; ".join([*unjudged, *([f"failed: {', '.join(failed)}"] if failed else [])]),
                file=sys.stderr,
            )
            raise typer.Exit(1)


def report(
    results: Folder = None,
    readme: Annotated[
        pathlib.Path | None,
        typer.Option("--readme", help="Write this file's tables and docs/results.md beside it."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 1 where either is not current.")
    ] = False,
    plots: Annotated[pathlib.Path | None, typer.Option("--plots", help="Write plots into this folder.")] = None,
    output: Annotated[pathlib.Path | None, typer.Option("--output", help="Write the full report here.")] = None,
) -> None:
    """Render tables and plots from saved results; refuses results that lack what a reader needs to judge them."""
    from lowlat.bench.readme import PAGE, performance_block, replace_block
    from lowlat.bench.report import full_report, newest
    from lowlat.bench.results import default_directory, load_all
    from lowlat.bench.stamp import repository_root

    with plain_errors():
        folder = results or default_directory()
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder of results")
        found = load_all(folder)
        if check or readme is not None:
            place = readme or (repository_root() or pathlib.Path.cwd()) / "README.md"
            page = place.parent / PAGE
            text = place.read_text(encoding="utf-8")
            fresh = {place: replace_block(text, performance_block(found)), page: full_report(found)}
            for path, wanted in fresh.items():
                if check and not (path.is_file() and path.read_text(encoding="utf-8") == wanted):
                    raise ValueError(f"{path} is not current: run `lowlat bench report --readme {place}`")
                if not check:
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(wanted, encoding="utf-8")
            print(f"{place} and {page}: {len(found)} results, current", file=sys.stderr)
        if output is not None:
            output.write_text(full_report(found), encoding="utf-8")
        if plots is not None:
            from lowlat.bench.plots import draw_all

            drawn = draw_all(newest(found), plots)
            for path in drawn:
                print(path)
            if not drawn:
                print("nothing to draw: a line needs results of two rows, contexts or users", file=sys.stderr)
        if not (check or readme or output or plots):
            print(full_report(found))
