"""`lowlat bench`: the commands. Each lives in a module under `commands`; heavy imports happen when one runs."""

from __future__ import annotations

import typer

from lowlat.bench.commands import ab, judge, make, regions, replay, serve, step

_EPILOG = """
Examples:

  lowlat bench step --model tiny     seconds, anywhere: try it out

  lowlat bench step --model smollm2 --arms general,torch-eager-graph,transformers --save

  lowlat bench serve --url http://127.0.0.1:8000 --concurrency 1,4 --weights real

  lowlat bench report                tables of what was saved

Results are JSON files of one format (docs/benchmarks.md); tables and plots are rendered from them.
"""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Measure: steps, regions, loads, the A/B of low-latency mode; compare, judge and report results.",
    epilog=_EPILOG,
)

app.command("step", epilog=step.EPILOG)(step.step)
app.command("ab", epilog=ab.EPILOG)(ab.ab)
app.command("regions", epilog=regions.EPILOG)(regions.regions)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
app.command("compare", epilog=judge.COMPARE_EPILOG)(judge.compare)
app.command("gate", epilog=judge.GATE_EPILOG)(judge.gate)
app.command("report", epilog=judge.REPORT_EPILOG)(judge.report)
app.command("make-model", epilog=make.EPILOG)(make.make_model)

if __name__ == "__main__":
    app(prog_name="lowlat bench")
