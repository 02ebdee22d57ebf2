"""Plots of results as PNG and SVG: latency against batch and context, roofline, per-user speed against total.

Needs the extra `lowlat[bench]` (matplotlib), which is imported when the first plot is drawn.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from lowlat.bench.report import result_anchor, where
from lowlat.bench.results import Result, Row


def check_matplotlib() -> None:
    """Raise ImportError with the cure where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plots need matplotlib: pip install 'matplotlib>=3.9' (it is in the extra lowlat[bench])")


def _figure(title: str, x_label: str, y_label: str) -> tuple[Any, Any]:
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    # identical results give identical files
    matplotlib.rcParams["svg.hashsalt"] = "lowlat"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.4), layout="constrained")
    axes.set_title(title.replace("$", r"\$"), fontsize=11)  # a name is no formula
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, which="both", alpha=0.25)
    return figure, axes


def _save(figure: Any, folder: pathlib.Path, name: str) -> list[pathlib.Path]:
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")
    paths = [folder / f"{stem}.png", folder / f"{stem}.svg"]
    figure.savefig(paths[0], dpi=150, metadata={"Software": None})
    figure.savefig(paths[1], metadata={"Date": None})
    pyplot.close(figure)
    return paths


def _by_arm(rows: Iterable[Row]) -> dict[str, list[Row]]:
    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row.arm, []).append(row)
    return arms


def caption(result: Result) -> str:
    """The line under a plot's title: machine and date, what was simulated, and whether the run ended early."""
    said = {
        "random weights": result.simulated.weights,
        "simulated acceptance": result.simulated.acceptance,
        "incomplete": bool(result.incomplete),
    }
    return ", ".join([where(result), result.date[:10], *(words for words, true in said.items() if true)])


def _lines(result: Result, stem: str, x_field: str, x_label: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Step latency against one field, a line for each arm; one plot for each workload and value of the other fields."""
    other = "context" if x_field == "rows" else "rows"
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in result.rows:
        if row.metric == "step_us":
            groups.setdefault((row.workload, row.tp, row.dtype, getattr(row, other)), []).append(row)
    written = []
    dtypes = len({dtype for _, _, dtype, _ in groups})
    for (workload, tp, dtype, fixed), rows in sorted(groups.items()):
        if len({getattr(row, x_field) for row in rows}) < 2:
            continue
        title = f"{workload}, {dtype}, TP{tp}, {other} {fixed}\n{caption(result)}"
        figure, axes = _figure(title, x_label, "step, us")
        for arm, found in _by_arm(rows).items():
            found.sort(key=lambda row: getattr(row, x_field))
            x, y = [getattr(row, x_field) for row in found], [row.median for row in found]
            axes.fill_between(x, [row.low for row in found], [row.high for row in found], alpha=0.2)
            axes.plot(x, y, marker="o", label=arm)
        axes.set_xscale("log", base=2)
        ticks = sorted({getattr(row, x_field) for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        what = "-".join([workload, *[f"tp{tp}"] * (tp > 1), *[dtype] * (dtypes > 1), f"{other}{fixed}"])
        written += _save(figure, folder, f"{stem}-{what}-against-{x_field}")
    return written


def roofline(result: Result, stem: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Step time against the bytes that a step must move, with the read ceiling as a line."""
    rows = [row for row in result.rows if row.metric in ("step_us", "layer_us") and row.bytes]
    if not rows or not result.read_ceiling_tb_s:
        return []
    title = f"Time against bytes of a step\n{caption(result)}"
    figure, axes = _figure(title, "bytes a step must read, GB", "step, us")
    sizes = sorted({row.bytes or 0 for row in rows})
    span = [sizes[0] / 1.6, sizes[-1] * 1.6]
    ceiling = [size / (result.read_ceiling_tb_s * 1e6) for size in span]
    axes.plot([s / 1e9 for s in span], ceiling, "k--", label=f"read ceiling {result.read_ceiling_tb_s:g} TB/s")
    for arm, found in _by_arm(rows).items():
        axes.plot([(row.bytes or 0) / 1e9 for row in found], [row.median for row in found], "o", label=arm)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
    return _save(figure, folder, f"{stem}-roofline")


def user_against_total(result: Result, stem: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Speed that one user sees against the speed of all, a point for each number of users and a line for each arm."""

    def place(row: Row) -> tuple[Any, ...]:
        # loads that differ in the number of users alone are one workload
        return re.sub(r", \d+ (users|runs)$", "", row.workload), row.arm, row.concurrency

    user = {place(row): row for row in result.rows if row.metric == "tokens_per_s_user"}
    total = {place(row): row for row in result.rows if row.metric == "tokens_per_s_total"}
    both = sorted(set(user) & set(total))
    written = []
    for workload in dict.fromkeys(key[0] for key in both):
        here = [key for key in both if key[0] == workload]
        if len({users for _, _, users in here}) < 2:
            continue
        title = f"{workload}\n{caption(result)}"
        figure, axes = _figure(title, "tokens/s of one user (median)", "tokens/s in all")
        for arm in dict.fromkeys(key[1] for key in here):
            keys = [key for key in here if key[1] == arm]
            x, y = [user[key].median for key in keys], [total[key].median for key in keys]
            axes.plot(x, y, marker="o", label=arm)
            for key, at_x, at_y in zip(keys, x, y):
                axes.annotate(f"{key[2]}", (at_x, at_y), textcoords="offset points", xytext=(5, 4), fontsize=8)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, title="number of users at each point", title_fontsize=7)
        written += _save(figure, folder, f"{stem}-{workload}-user-against-total")
    return written


def draw_all(results: Sequence[Result], folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Every plot that the results have points for (two or more on a line); returns the files written, maybe none.

    Files are named after their result; where several share a name, those after the first after machine and time too.
    Raises ImportError without matplotlib.
    """
    place = pathlib.Path(folder)
    written: list[pathlib.Path] = []
    named: set[str] = set()
    for result in results:
        stem = result_anchor(result) if result.name in named else result.name
        named.add(result.name)
        written += _lines(result, stem, "rows", "rows (query tokens of a step)", place)
        written += _lines(result, stem, "context", "context, tokens", place)
        written += roofline(result, stem, place)
        written += user_against_total(result, stem, place)
    return written


def bars(tracks: dict[str, list[tuple[str, float, float, int]]], path: pathlib.Path, title: str) -> list[pathlib.Path]:
    """Timelines under each other: for each track bars of (name, start in us, length in us, depth)."""
    depths = {name: 1 + max((depth for *_, depth in spans), default=0) for name, spans in tracks.items()}
    figure, axes = _figure(title, "us from the beginning of the step", "")
    import matplotlib
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(span[0] for spans in tracks.values() for span in spans))
    colours = dict(zip(names, list(matplotlib.colormaps["tab20"].colors) * 4))  # type: ignore[attr-defined]
    top, ticks = 0, []
    for track, spans in tracks.items():
        ticks.append((top + depths[track] / 2, track))
        for name in names:
            for depth in range(depths[track]):
                pieces = [(start, length) for n, start, length, d in spans if n == name and d == depth]
                if pieces:
                    axes.broken_barh(
                        pieces, (top + depth + 0.05, 0.9), facecolors=colours[name], edgecolors="white", lw=0.3
                    )
        top += depths[track] + 1
    axes.set_yticks([at for at, _ in ticks], [track for _, track in ticks])
    axes.invert_yaxis()
    axes.grid(False)
    handles = [Patch(color=colours[name]) for name in names]
    axes.legend(handles, names, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=6)
    return _save(figure, path.parent, path.stem)
