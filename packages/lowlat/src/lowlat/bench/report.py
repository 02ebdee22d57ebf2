"""Markdown tables of results: the page that is generated from the files in benchmarks/results."""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from lowlat.bench.results import Result, Row, slug

UNITS = {
    "step_us": "step, us",
    "layer_us": "layer, us",
    "region_us": "region, us",
    "host_us_per_step": "host time a step, us",
    "host_instructions_per_step": "host instructions a step",
    "tokens_per_s_user": "tokens/s of one user",
    "tokens_per_s_total": "tokens/s in all",
    "ttft_ms": "time to first token, ms",
    "itl_ms_p90": "P90 time between tokens, ms",
    "latency_ms": "latency, ms",
    "ready_ms": "time to ready, ms",
    "interactivity_p90": "P90 interactivity, tokens/s",
    "e2e_interactivity_p90": "P90 end-to-end-normalised interactivity, tokens/s",
    "accept_length": "accepted length, tokens",
    "goodput": "goodput, requests/s",
    "speedup": "speedup",
}


class Shape(msgspec.Struct, frozen=True, order=True):
    """What two rows must share to stand in one line of a table."""

    workload: str
    region: str
    tp: int
    dtype: str
    concurrency: int
    rows: int
    context: int
    width: int
    draft: str


_USUAL = {"region": "", "tp": 1, "concurrency": 1, "rows": 1, "context": 0, "width": 0, "draft": "", "dtype": ""}
"""What needs no words in a shape, in the order in which a table says what its lines share."""


def shape_of(row: Row) -> Shape:
    """The shape of a row, with absent fields as 0 or empty."""
    region = str(row.details.get("region", ""))
    return Shape(
        row.workload, region, row.tp, row.dtype, row.concurrency, row.rows, row.context, row.width or 0, row.draft or ""
    )


def shape_words(shape: Shape) -> str:
    """A shape in words: its workload, and each other field that is not what is usual, in order."""
    usual = _USUAL | {"concurrency": shape.rows}
    names = [name for name in Shape.__struct_fields__ if name in usual and getattr(shape, name) != usual[name]]
    found = [f"{name} {getattr(shape, name)}" for name in names]
    return ", ".join([shape.workload, *found])


def number(value: float) -> str:
    """Three to four significant digits, thousands kept whole."""
    size = abs(value)
    if size >= 10000:
        return f"{value:,.0f}"
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:.{digits}f}"


def escaped(text: str) -> str:
    """Text on one line of Markdown, in a table or a link too, with nothing in it taken for markup."""
    return re.sub(r"[\\`*\[\]<>|~&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """Text as code on one line, whatever backticks are in it."""
    flat = " ".join(text.splitlines())
    fence = "`" * (1 + max(map(len, re.findall("`+", flat)), default=0))
    return f"{fence} {flat} {fence}" if "`" in flat else f"`{flat}`"


def cell(row: Row) -> str:
    """A value with its interval and the fraction of the read ceiling."""
    text = f"{number(row.median)} ({number(row.low)}–{number(row.high)})" if row.low < row.high else number(row.median)
    if row.ceiling_fraction is not None:
        text += f", {row.ceiling_fraction:.0%} of ceiling"
    return text


def _varying(shapes: Sequence[Shape]) -> list[str]:
    """Columns that tell the lines of a table apart; the workload always."""
    names = [name for name in Shape.__struct_fields__ if len({getattr(s, name) for s in shapes}) > 1]
    if all(s.concurrency == s.rows for s in shapes) and "rows" in names:
        names.remove("concurrency")
    return names if "workload" in names else ["workload", *names]


def _constant(shapes: Sequence[Shape]) -> str:
    """What all lines share, in words, leaving out what is usual."""
    usual = dict(_USUAL)
    if shapes[0].concurrency == 0:  # an open loop, as its workload says
        del usual["concurrency"]
    first = shapes[0]
    shared = [
        f"{name} {escaped(str(getattr(first, name)))}"
        for name in usual
        if len({getattr(s, name) for s in shapes}) == 1 and getattr(first, name) != usual[name]
    ]
    return ", ".join(shared)


def metric_table(rows: Sequence[Row]) -> str:
    """One Markdown table of rows of one metric: a line for each shape, a column for each arm."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    by_place: dict[tuple[Shape, str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((shape_of(row), row.arm), []).append(row)
    shapes = sorted({shape for shape, _ in by_place})
    columns = _varying(shapes)
    lines = [
        "| " + " | ".join([*columns, *map(escaped, arms)]) + " |",
        "| " + " | ".join(["---"] * len(columns) + ["---:"] * len(arms)) + " |",
    ]
    for shape in shapes:
        # Rows that differ in nothing but their notes (a temperature, say) each get a line.
        for found in itertools.zip_longest(*(by_place.get((shape, arm), []) for arm in arms)):
            cells = [escaped(str(getattr(shape, name))) for name in columns] + [
                cell(row) if row else "" for row in found
            ]
            lines.append("| " + " | ".join(cells) + " |")
    constant = _constant(shapes)
    title = UNITS.get(rows[0].metric, rows[0].metric)
    notes = list(dict.fromkeys(escaped(f"{row.arm}: {row.note}") for row in rows if row.note))
    text = [f"**{title}**" + (f" ({constant})" if constant else ""), "", *lines]
    if notes:
        text += ["", *(f"- {note}" for note in notes)]
    return "\n".join(text)


def provenance(result: Result, *, weights_said: bool = True) -> str:
    """One paragraph that says what, where, when and how: all that a reader needs to repeat the run."""
    machine = result.machine
    place = f"{where(result)}, driver {machine.driver}, {machine.cpu}" if machine.gpus else where(result)
    triton = f", Triton {machine.triton}" if machine.gpus and machine.triton else ""
    versions = f"torch {machine.torch}, Python {machine.python}{triton}"
    weights = ("random weights" if result.simulated.weights else "real weights") if weights_said else "weights not said"
    acceptance = " and simulated acceptance" if result.simulated.acceptance else ""
    ceiling = f" Read ceiling in this run: {result.read_ceiling_tb_s:g} TB/s." if result.read_ceiling_tb_s else ""
    tree = f", tree {code(result.tree)}" if result.dirty else ""
    return (
        f"{escaped(place)}; {escaped(versions)}; {result.date[:10]}, commit {code(result.commit[:10])}{tree}; "
        f"{weights}{acceptance}.{ceiling} {code(result.command)}"
    )


def where(result: Result) -> str:
    """The machine in words: its GPUs and how many of them, or its CPU."""
    machine = result.machine
    return f"{machine.gpus} × {machine.gpu}" if machine.gpus else machine.cpu


def result_anchor(result: Result) -> str:
    """The name of a result's section in a link: its name, its machine's, and the second in which it began."""
    return slug(result.name, where(result).replace(" × ", "x "), result.date)


def result_section(result: Result, *, weights_said: bool = True) -> str:
    """Tables of one result under a heading, a table for each metric; `weights_said`: somebody told which they were."""
    tables = [
        metric_table(found) for metric in UNITS if (found := [row for row in result.rows if row.metric == metric])
    ]
    if not tables:
        return ""
    heading = f"## {result.name}, {escaped(where(result))}, {result.date[:10]}"
    said = provenance(result, weights_said=weights_said)
    early = [f"**Incomplete**: {escaped(result.incomplete)}."] if result.incomplete else []
    return "\n\n".join([heading, *early, *tables, f"Medians with bootstrap 95 % intervals. {said}"])


def newest(results: Iterable[tuple[pathlib.Path, Result]]) -> list[Result]:
    """The newest result of each name and machine, and older ones that have a workload which no newer one has: GPU runs
    first, then by name and machine, the newest first."""
    found: dict[tuple[str, str, int], list[Result]] = {}
    for _, result in sorted(results, key=lambda one: one[1].date, reverse=True):
        kept = found.setdefault((result.name, result.machine.gpu or result.machine.cpu, result.machine.gpus), [])
        if not kept or _workloads([result]) - _workloads(kept):
            kept.append(result)
    return [result for key in sorted(found, key=lambda key: (key[2] == 0, key)) for result in found[key]]


def _workloads(results: Iterable[Result]) -> set[str]:
    return {row.workload for result in results for row in result.rows}


def full_report(results: Iterable[tuple[pathlib.Path, Result]]) -> str:
    """Every metric of the newest results, as Markdown."""
    sections = [
        f'<a id="{result_anchor(one)}"></a>\n\n{text}' for one in newest(results) if (text := result_section(one))
    ]
    opening = "Generated by `lowlat bench report` from the files in `benchmarks/results`; do not edit by hand."
    return "\n\n".join(["# Benchmark results", opening, *sections]) + "\n"
