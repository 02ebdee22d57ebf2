"""Reports: tables that are current and that no name breaks, plots that say what was simulated."""

import re

import msgspec
import pytest
from result_kit import machine, result, row

from lowlat.bench import plots, readme, report
from lowlat.bench.results import METRICS, Simulated, save


def test_tables_hold_values_intervals_fractions_and_provenance():
    text = report.result_section(
        result(
            row("lowlat-nvidia", 650.0, bytes=2_505_000_000, ceiling_fraction=0.857, note="one launch"),
            row("torch-compile", 1142.0),
            row("lowlat-nvidia", 700.0, rows=8),
        )
    )
    assert "| workload | rows | lowlat-nvidia | torch-compile |" in text
    assert "650.0 (643.5–656.5), 86% of ceiling" in text
    assert "- lowlat-nvidia: one launch" in text
    for part in (
        "NVIDIA H200",
        "580.1",
        "abcdef0123",
        "random weights",
        "4.5 TB/s",
        "`lowlat bench step`",
        "2026-12-01",
    ):
        assert part in text
    assert text.count("| llama-1b | 8 | 700.0") == 1


def test_every_metric_has_a_title():
    assert set(report.UNITS) == METRICS


def test_a_growing_result_is_whole_where_writing_fails(tmp_path, monkeypatch):
    from lowlat.bench import results

    kept = save(result(row("general", 1.0)), tmp_path)
    assert save(result(row("general", 2.0)), tmp_path, over=kept) == kept
    assert results.load(kept).rows[0].median == 2.0

    def full(self, text):
        raise OSError(28, "no space")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    for over in (kept, None):
        with pytest.raises(OSError, match="no space"):
            save(result(row("general", 3.0)), tmp_path, over=over)
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert results.load(kept).rows[0].median == 2.0


def test_impossible_values_are_refused(tmp_path):
    from lowlat.bench.results import ResultError

    for bad in (
        row("general", 1.0, metric="tokens_per_s_user", concurrency=-1),
        row("general", 0.0),
        row("general", -5.0, metric="goodput", spread=-0.1),
        row("general", 1.0, ceiling_fraction=-1.0, bytes=5),
        row("general", 1.0, width=-3),
        row("general", 1.0, accept_length=-0.5),
    ):
        with pytest.raises(ResultError, match="impossible"):
            save(result(bad), tmp_path)
    no_gpus = machine()
    no_gpus.gpus = -1
    bare = result(row("general", 1.0))
    for odd, said in (
        (msgspec.structs.replace(bare, read_ceiling_tb_s=-1.0), "a read ceiling of -1.0 TB/s"),
        (msgspec.structs.replace(bare, read_ceiling_tb_s=0.0), "a read ceiling of 0.0 TB/s"),
        (msgspec.structs.replace(bare, machine=no_gpus), "-1 GPUs"),
    ):
        with pytest.raises(ResultError, match=said):
            save(odd, tmp_path)


def test_newest_result_of_a_name_and_machine_wins(tmp_path):
    old = save(result(row("general", 2.0), date="2026-11-01T00:00:00Z"), tmp_path)
    new = save(result(row("general", 1.0)), tmp_path)
    other = save(result(row("general", 3.0), name="other"), tmp_path)
    from lowlat.bench.results import load_all

    found = load_all(tmp_path)
    assert {path for path, _ in found} == {old, new, other}
    assert [r.rows[0].median for r in report.newest(found)] == [1.0, 3.0]


def test_an_older_result_stays_where_it_has_a_workload_of_its_own(tmp_path):
    alone = row("general", 4.0)
    alone.workload = "another model"
    for rows, date in (
        ([row("general", 3.0), alone], "2026-11-01T00:00:00Z"),
        ([row("general", 2.0), alone], "2026-11-02T00:00:00Z"),
        ([row("general", 1.0)], "2026-11-03T00:00:00Z"),
    ):
        save(result(*rows, date=date), tmp_path)
    from lowlat.bench.results import load_all

    kept = report.newest(load_all(tmp_path))
    assert [one.rows[0].median for one in kept] == [1.0, 2.0]
    assert len({report.result_anchor(one) for one in kept}) == 2


def test_runs_of_one_name_have_sections_links_and_plots_of_their_own(tmp_path):
    def run(workload, time, **fields):
        steps = [
            row("general", 600.0 * rows * tp, rows=rows, tp=tp, workload=workload, bytes=10**9)
            for rows in (1, 2)
            for tp in (1, 2)
        ]
        return result(*steps, name="step-presets", date=f"2026-12-01T{time}Z", **fields)

    two = machine()
    two.gpus = 2
    given = [run("llama-1b", "10:00:00"), run("smollm2", "10:00:01"), run("qwen3-8b", "09:00:00", machine=two)]
    found = [(save(one, tmp_path), one) for one in given]
    page = report.full_report(found)
    anchors = re.findall('<a id="(.+)">', page)
    assert anchors == [
        "step-presets-1x-nvidia-h200-2026-12-01t10-00-01z",
        "step-presets-1x-nvidia-h200-2026-12-01t10-00-00z",
        "step-presets-2x-nvidia-h200-2026-12-01t09-00-00z",
    ]
    assert "\n## step-presets, 2 × NVIDIA H200, 2026-12-01\n" in page
    for line in readme.performance_block(found).splitlines():
        if "](" in line:
            model, anchor = re.match(r"\| \[(.+?)\]\(docs/results.md#(.+?)\)", line).groups()
            section = page.split(f'<a id="{anchor}">')[1].split("<a id")[0]
            assert {"Llama-3.2-1B": "llama-1b", "SmolLM2-135M": "smollm2", "Qwen3-8B": "qwen3-8b"}[model] in section
    written = plots.draw_all(report.newest(found), tmp_path / "plots")
    assert len({path.name for path in written}) == len(written) == len(list((tmp_path / "plots").iterdir()))
    names = {path.stem for path in written}
    assert len(names) == 3 * 3, "a roofline and one picture for each number of GPUs that share the model"
    assert {"step-presets-roofline", f"{anchors[1]}-roofline", f"{anchors[2]}-roofline"} <= names
    assert {
        "step-presets-smollm2-context1024-against-rows",
        "step-presets-smollm2-tp2-context1024-against-rows",
    } <= names


def test_a_terminal_gets_no_marks_for_links():
    assert report.result_section(result(row("general", 1.0))).startswith("## dense-step, 1 × NVIDIA H200, 2026-12-01\n")


def test_rows_of_one_shape_are_all_shown():
    text = report.metric_table([row("general", 1000.0), row("general", 2000.0), row("other", 3000.0)])
    assert all(value in text for value in ("1000", "2000", "3000"))


def test_committed_results_are_all_quotable():
    from lowlat.bench.results import default_directory, load_all

    files = list(default_directory().glob("*.json"))
    assert len(load_all()) == len(files)


def test_plots_are_drawn_from_points_and_repeat(tmp_path):
    steps = [
        row(arm, 600.0 * rows * factor, rows=rows, context=context, bytes=rows * 10**9, ceiling_fraction=0.5)
        for arm, factor in (("general", 1.0), ("vllm", 1.3))
        for rows in (1, 2, 8)
        for context in (1024, 8192)
    ]
    speeds = [
        row("general", value, metric=metric, concurrency=users, workload="8k1k")
        for users, one, total in ((1, 100, 100), (4, 80, 320))
        for metric, value in (("tokens_per_s_user", one), ("tokens_per_s_total", total))
    ]
    written = plots.draw_all([result(*steps, *speeds)], tmp_path / "a")
    names = {path.name for path in written}
    assert {name for name in names if name.endswith(".svg")} == {
        "dense-step-llama-1b-context1024-against-rows.svg", "dense-step-llama-1b-context8192-against-rows.svg",
        "dense-step-llama-1b-rows1-against-context.svg", "dense-step-llama-1b-rows2-against-context.svg",
        "dense-step-llama-1b-rows8-against-context.svg", "dense-step-roofline.svg",
        "dense-step-8k1k-user-against-total.svg",
    }  # fmt: skip
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written if path.suffix == ".png")
    one_user = [
        row(arm, 100, metric=metric, workload="8k1k")
        for arm in ("general", "vllm")
        for metric in ("tokens_per_s_user", "tokens_per_s_total")
    ]
    assert plots.user_against_total(result(*one_user), "ab", tmp_path / "c") == [], "two arms of one user are no line"
    svg = (tmp_path / "a" / "dense-step-roofline.svg").read_bytes()
    plots.draw_all([result(*steps)], tmp_path / "b")
    assert (tmp_path / "b" / "dense-step-roofline.svg").read_bytes() == svg


NASTY = "a|b `c` [d](e) <b>f</b> *g* _h_ i_j &amp; \\| $k$\nl"
SAFE = r"a\|b \`c\` \[d\](e) \<b\>f\</b\> \*g\* \_h\_ i_j \&amp; \\\| $k$ l"


def test_no_name_breaks_a_table_a_link_or_the_page(tmp_path):
    odd = result(
        row("general", 1000.0, workload=NASTY, note=NASTY), row("general", 2.0, workload=NASTY, rows=8),
        row("general", 3.0, workload="plain"), machine=machine(triton="x"),
    )  # fmt: skip
    odd.machine.gpu, odd.command, odd.incomplete = "GPU | <i>", "lowlat bench step --model '`x`'", NASTY
    page = report.full_report([(tmp_path, odd)])
    assert f"| {SAFE} | 1 | 1000 (990.0–1010) |" in page
    assert f"- general: {SAFE}" in page
    assert f"**Incomplete**: {SAFE}." in page
    assert r"1 × GPU \| \<i\>, driver" in page
    assert "`` lowlat bench step --model '`x`' ``" in page
    odd.name = "step-odd"
    (line,) = (line for line in readme.performance_block([(tmp_path, odd)]).splitlines() if r"a\|" in line)
    where = "docs/results.md#step-odd-1x-gpu-i-2026-12-01t10-00-00z"
    assert line.startswith(f"| [{SAFE}]({where}) | 1,024 | 1 × GPU \\| \\<i\\> | random, incomplete run |")
    # cells are told apart by bars that no backslash precedes
    cells = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", text)) for text in page.splitlines() if text.startswith("|")]
    assert len(set(cells[:4])) == 1, "every line of the table has as many cells as its head"


def test_what_needs_no_care_is_left_alone():
    for text in ("8192 in, 1024 out, 1 users: tokens_per_s_user", "1 × NVIDIA H200 (R) #1 ~", "torch.compile, fp8+fp4"):
        assert report.escaped(text).replace("\\~", "~") == text
    assert report.code("lowlat bench step") == "`lowlat bench step`"


def drawn_titles(monkeypatch, *results, folder):
    titles = []
    draw = plots._figure

    def figure(title, *labels):
        titles.append(title)
        return draw(title, *labels)

    monkeypatch.setattr(plots, "_figure", figure)
    plots.draw_all(results, folder)
    return titles


@pytest.mark.parametrize(
    ("simulated", "said"),
    [
        (Simulated(weights=True, acceptance=True), "1 × NVIDIA H200, 2026-12-01, random weights, simulated acceptance"),
        (Simulated(weights=True), "1 × NVIDIA H200, 2026-12-01, random weights"),
        (Simulated(weights=False, acceptance=True), "1 × NVIDIA H200, 2026-12-01, simulated acceptance"),
        (Simulated(weights=False), "1 × NVIDIA H200, 2026-12-01"),
    ],
)
def test_every_plot_says_what_was_simulated(monkeypatch, tmp_path, simulated, said):
    steps = [row("general", 600.0 * n, rows=n, context=c, bytes=n * 10**9) for n in (1, 2) for c in (1, 2)]
    speeds = [
        row("general", 10.0, metric=metric, concurrency=users, workload="8k1k costs $5")
        for users in (1, 4)
        for metric in ("tokens_per_s_user", "tokens_per_s_total")
    ]
    one = msgspec.structs.replace(result(*steps, *speeds), simulated=simulated)
    titles = drawn_titles(monkeypatch, one, folder=tmp_path)
    assert len(titles) == 6, "rows, contexts (two each), roofline, users"
    assert {title.partition("\n")[2] for title in titles} == {said}
    early = msgspec.structs.replace(one, incomplete="interrupted")
    assert plots.caption(early) == f"{said}, incomplete"
