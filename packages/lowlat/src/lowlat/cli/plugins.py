"""`lowlat plugins`: which kernel libraries are here, which fit a model, whether they keep their promises, a new one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lowlat.cli.options import engine_options
from lowlat.cli.progress import LoadProgress
from lowlat.engine.config import EngineConfig

if TYPE_CHECKING:
    from lowlat_plugin import Candidate, Report
    from lowlat_plugin.conformance import CheckResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Kernel libraries replace a model's decode steps with kernels made for one model, device and width.",
    epilog="""
Examples:

  lowlat plugins list

  lowlat plugins doctor --model smollm2

  lowlat plugins check lowlat-cpu

  lowlat plugins new my-kernels
""",
)

_WHERE = """
lowlat's own are in its repository: packages/lowlat-nvidia for an H100 or H200, examples/lowlat-cpu for GGUF models on
CPUs. `lowlat plugins new NAME` begins one of yours.""".strip()

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.command("list")
def list_plugins(json: Json = False) -> None:
    """List the installed kernel libraries, and those that could not be loaded with the reason."""
    from lowlat_plugin import discover

    registry = discover()
    if json:
        _print_json({"libraries": [_described(c) for c in registry.candidates], "failures": registry.failures})
    elif not registry.candidates and not registry.failures:
        print(f"no kernel libraries are installed (entry-point group lowlat.kernels)\n{_WHERE}")
    else:
        for candidate in registry.candidates:
            spec = candidate.spec
            print(f"{candidate.key} {candidate.version}: {spec.vendor} {', '.join(sorted(spec.devices))};", end=" ")
            print(f"{', '.join(sorted(spec.architectures))}; {', '.join(sorted(spec.modes))}. {spec.description}")
    for failure in registry.failures:
        print(f"{failure.distribution}: could not be loaded\n  - {failure.reason}", file=sys.stderr)
    if registry.failures:
        raise typer.Exit(1)


@app.command()
@engine_options
def doctor(config: EngineConfig, json: Json = False) -> None:
    """Why is my kernel library not running? Loads the model as `serve` would and shows every reason.

    Exit code 0: kernels are active; 1: they are not.
    """
    report = _diagnose(config)
    if json:
        _print_json(report)
    else:
        print("\n".join(report.lines()))
        if not report.candidates and not report.failures:
            print(_WHERE)
    if report.state != "active":
        raise typer.Exit(1)


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A distribution, a spec's name, or distribution/spec.")],
    only: Annotated[list[str] | None, typer.Option("--only", help="Run this check only; may be repeated.")] = None,
    json: Json = False,
) -> None:
    """Run the conformance kit on an installed kernel library, with the small model that the library brings."""
    from lowlat_plugin import discover
    from lowlat_plugin.conformance import CHECKS, run_check

    unknown = sorted(set(only or ()) - set(CHECKS))
    if unknown:
        raise typer.BadParameter(f"no check is called {', '.join(unknown)}; known: {', '.join(CHECKS)}")
    # The kit makes kernels fail to see what follows: that is no news, and would stand inside the kit's own lines.
    logging.getLogger("lowlat.plugins").addHandler(logging.NullHandler())
    failed, results = False, []
    for candidate in discover().named(name):
        for one in only or CHECKS:
            if not json:
                print(f"{candidate.key} {one} ...", end=" ", flush=True, file=sys.stderr)
            result = run_check(candidate, one)
            results.append((candidate.key, result))
            failed = failed or result.status == "failed"
            if not json:
                print(f"{result.seconds:.1f} s", file=sys.stderr)
                _print_result(result)
    if json:
        _print_json([{"kernels": key} | msgspec.to_builtins(result) for key, result in results])
    if failed:
        raise typer.Exit(1)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as my-kernels.")],
    folder: Annotated[Path | None, typer.Option("--folder", help="Where to write it; default: ./NAME.")] = None,
    json: Json = False,
) -> None:
    """Write a small kernel library that works: a spec, a plain kernel, tests with the conformance kit, and its CI."""
    from lowlat_plugin.scaffold import write_project

    written = write_project(name, folder or Path(name))
    if json:
        _print_json({"folder": str(folder or Path(name)), "files": [str(path) for path in written]})
        return
    for path in written:
        print(path)
    print(f"\nNext: pip install -e {folder or name} && lowlat plugins check {name}")


def _diagnose(config: EngineConfig) -> Report:
    from lowlat.engine.build import build_engine

    if config.kv_tokens is None:  # nothing is served: a small pool does, and starts sooner
        config = msgspec.structs.replace(config, kv_tokens=16_384)
    with LoadProgress() as progress:
        core, _, _ = build_engine(msgspec.structs.replace(config, low_latency="diagnose"), progress)
    try:
        assert core.low_latency is not None
        return core.low_latency.report()
    finally:
        core.close()


def _described(candidate: Candidate) -> dict[str, Any]:
    spec = msgspec.to_builtins(candidate.spec, order="sorted")
    return {"key": candidate.key, "version": candidate.version, "spec": spec}


def _print_result(result: CheckResult) -> None:
    print(f"{result.status:8}{result.check}: {result.promise}")
    print(f"        {result.detail}")


def _print_json(value: object) -> None:
    print(msgspec.json.encode(value, order="sorted").decode())
