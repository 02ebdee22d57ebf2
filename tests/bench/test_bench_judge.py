"""Compare, gate and report: verdicts only beyond noise, instruction counts that repeat, tables that are current."""

import json
import re
import shutil

import msgspec
import pytest

from lowlat.bench import gate, gate_counts, plots, readme, report
from lowlat.bench.compare import compare
from lowlat.bench.host_work import HostWork
from lowlat.bench.presets import PRESETS
from lowlat.bench.results import LOWER_IS_BETTER, METRICS, Result, Row, Simulated, save
from lowlat.bench.roofline import dense_step_bytes
from lowlat.bench.stamp import Machine


def machine(**fields):
    return Machine(gpu="NVIDIA H200", gpus=1, driver="580.1", cpu="x", torch="2.11.0", python="3.12.3", **fields)


def row(arm, median, *, spread=0.01, metric="step_us", **fields):
    defaults = {"workload": "llama-1b", "rows": 1, "context": 1024, "dtype": "bfloat16", "samples": 40}
    ends = {"low": median * (1 - spread), "high": median * (1 + spread)}
    return Row(arm=arm, metric=metric, median=median, **ends, **{**defaults, **fields})


def result(*rows, name="dense-step", date="2026-12-01T10:00:00Z", **fields):
    return Result(
        schema=1, name=name, date=date, commit="abcdef0123", command="lowlat bench step",
        machine=fields.pop("machine", machine()), simulated=Simulated(weights=True), read_ceiling_tb_s=4.5,
        rows=list(rows), **fields,
    )  # fmt: skip


def verdicts(a, b, **options):
    return {(change.arm, change.metric): change for change in compare(a, b, **options)}


def test_a_change_beyond_noise_gets_a_verdict_and_one_within_does_not():
    before = result(row("general", 1000.0), row("lowlat-nvidia", 700.0))
    after = result(row("general", 1004.0), row("lowlat-nvidia", 620.0))
    got = verdicts(before, after)
    assert got["general", "step_us"].verdict == "same"
    assert got["lowlat-nvidia", "step_us"].verdict == "better"
    assert verdicts(after, before)["lowlat-nvidia", "step_us"].verdict == "worse"


def test_drift_of_the_machine_cancels_against_a_reference_arm():
    before = result(row("torch-compile", 1000.0), row("lowlat-nvidia", 700.0))
    after = result(row("torch-compile", 1200.0), row("lowlat-nvidia", 840.0))
    change = verdicts(before, after)["lowlat-nvidia", "step_us"]
    assert change.reference == "torch-compile"
    assert change.ratio == pytest.approx(1.0)
    assert change.verdict == "same"


def test_higher_is_better_for_speeds_and_small_changes_are_none():
    before = result(row("vllm", 100.0, metric="tokens_per_s_user"), row("sglang", 100.0, metric="goodput", spread=0.0))
    after = result(row("vllm", 80.0, metric="tokens_per_s_user"), row("sglang", 101.0, metric="goodput", spread=0.0))
    got = verdicts(before, after)
    assert got["vllm", "tokens_per_s_user"].verdict == "worse"
    assert got["sglang", "goodput"].verdict == "same"
    assert verdicts(before, after, threshold=0.001)["sglang", "goodput"].verdict == "better"
    assert LOWER_IS_BETTER < METRICS


def test_times_of_other_machines_or_few_samples_get_no_verdict():
    other = result(row("vllm", 500.0), machine=machine(cores=9))
    other.machine.gpu = "NVIDIA B200"
    assert verdicts(result(row("vllm", 1000.0)), other)["vllm", "step_us"].reason == "different machines"
    few = result(row("vllm", 500.0, samples=2))
    assert verdicts(result(row("vllm", 1000.0)), few)["vllm", "step_us"].verdict == "no verdict"
    assert verdicts(result(row("vllm", 1.0)), result(row("vllm", 1.0, context=7))) == {}


# --- gate


def baseline(**fields):
    limits = {"decode-8": gate.Limit(value=100000, tolerance=0.03)}
    return gate.Baseline(python=gate.python_version(), instructions=limits, **fields)


@pytest.mark.parametrize(("count", "verdict"), [(100500, "ok"), (103500, "worse"), (90000, "better"), (102900, "ok")])
def test_instructions_are_judged_by_their_tolerance(count, verdict):
    asked = []

    def counter(scenario, requests):
        asked.append((scenario, requests))
        return count

    (finding,) = gate.judge_instructions(baseline(), counter)
    assert finding.verdict == verdict
    assert asked == [("decode", 8)]


def test_another_python_is_not_judged():
    old = baseline()
    old.python = "3.99"
    (finding,) = gate.judge_instructions(old, lambda *_: pytest.fail("nothing to count"))
    assert finding.verdict == "not judged"
    assert "3.99" in finding.reason


def test_bytes_may_shrink_but_not_grow():
    judged = gate.judge_bytes(baseline(bytes={"a": 100, "b": 100, "c": 100, "d": 1}), {"a": 100, "b": 101, "c": 99})
    assert [finding.verdict for finding in judged] == ["ok", "worse", "better", "not judged"]


def test_times_fail_only_after_three_repeats_beyond_one_and_a_half():
    values = iter([2.0, 1.9, 1.4])
    (finding,) = gate.judge_times(baseline(times={"decode-8": 1.0}), lambda _: next(values))
    assert finding.verdict == "ok"
    tries = []
    (finding,) = gate.judge_times(baseline(times={"decode-8": 1.0}), lambda name: tries.append(name) or 1.6)
    assert finding.verdict == "worse"
    assert len(tries) == 3


def test_the_committed_baseline_covers_what_is_counted_today():
    kept = gate.load_baseline(gate.default_baseline())
    kernels = gate.kernel_byte_counts(kept.counters)
    assert kept.counters == list(gate_counts.KERNEL_COUNTERS)
    assert set(kept.bytes) == {*gate_counts.step_byte_counts(), *kernels}
    assert {finding.verdict for finding in gate_counts.run_gate(kept, only="bytes", say=print)} <= {"ok", "better"}
    # A kernel streams the weights of the step's count, and at most a hundredth more, which is padding.
    for name, size in kernels.items():
        preset = name.removeprefix("lowlat-nvidia dense ").removesuffix(" weights")
        counted = dense_step_bytes(PRESETS[preset], requests=1, context=1, dtype="bfloat16")
        assert 0.99 * (counted.layers + counted.head) < size < 1.01 * (counted.layers + counted.head)


def test_a_library_that_is_not_installed_is_not_judged():
    kept = baseline(bytes={"kernel": 5}, counters=["no_such_library:counts"])
    (finding,) = gate_counts.run_gate(kept, only="bytes", say=print)
    assert (finding.verdict, finding.reason) == ("not judged", "nothing counts it here")


def test_host_work_of_the_baseline_is_what_is_counted():
    kept = gate.load_baseline(gate.default_baseline())
    names = {f"{scenario}-{requests}" for scenario, requests in gate_counts.HOST_WORK}
    assert set(kept.instructions) == set(kept.times) == names


def test_baselines_are_written_whole_and_bad_ones_named(tmp_path):
    path = tmp_path / "gate.json"
    gate.save_baseline(baseline(bytes={"a": 1}), path)
    assert gate.load_baseline(path).bytes == {"a": 1}
    path.write_text("{")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        gate.load_baseline(path)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_callgrind_counts_repeat_and_grow_with_the_work():
    loop = "for _ in range({}): pass"
    few, again, many = (gate._callgrind(["-S", "-c", loop.format(n)], 120) for n in (10, 10, 50000))
    assert abs(few - again) / few < 1e-3
    assert many > few + 50000


def test_host_work_does_what_it_says():
    decode = HostWork("decode", 3, 100)
    assert [decode.step() for _ in range(40)] == [3] * 40
    churn = HostWork("churn", 4, 100)
    tokens = sum(churn.step() for _ in range(200))
    assert churn._next > 30, "requests end and others take their place"
    assert tokens > 300
    churn.core.scheduler.check()
    with pytest.raises(ValueError, match="scenario"):
        HostWork("sleep", 1, 1)


# --- report


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


def test_nothing_is_judged_across_simulations_or_machines_or_from_single_samples():
    def speed(value, **fields):
        return row("general", value, metric="tokens_per_s_user", **fields)

    simulated = msgspec.structs.replace(result(speed(200.0)), simulated=Simulated(weights=True, acceptance=True))
    elsewhere = result(speed(200.0), machine=msgspec.structs.replace(machine(), gpu="another"))
    for before, after, verdict in (
        (result(speed(100.0)), result(speed(200.0)), "better"),
        (result(speed(100.0)), simulated, "no verdict"),
        (result(speed(100.0)), elsewhere, "no verdict"),
        (result(speed(100.0, samples=1)), result(speed(200.0)), "no verdict"),
    ):
        assert verdicts(before, after)["general", "tokens_per_s_user"].verdict == verdict


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
    ):
        with pytest.raises(ResultError, match="impossible"):
            save(result(bad), tmp_path)


def test_newest_result_of_a_name_and_machine_wins(tmp_path):
    old = save(result(row("general", 2.0), date="2026-11-01T00:00:00Z"), tmp_path)
    new = save(result(row("general", 1.0)), tmp_path)
    other = save(result(row("general", 3.0), name="other"), tmp_path)
    from lowlat.bench.results import load_all

    found = load_all(tmp_path)
    assert {path for path, _ in found} == {old, new, other}
    assert [r.rows[0].median for r in report.newest(found)] == [1.0, 3.0]


def test_the_readme_block_is_replaced_and_staleness_is_seen(tmp_path):
    found = [(tmp_path, result(row("general", 1000.0)))]
    old = f"# x\n\n{readme.BEGIN}\nold\n{readme.END}\n\nafter\n"
    fresh = readme.replace_block(old, readme.performance_block(found))
    assert fresh.startswith("# x\n\n")
    assert fresh.endswith("\n\nafter\n")
    assert "old" not in fresh
    assert readme.replace_block(fresh, readme.performance_block(found)) == fresh
    for bad in ("no marks", old + readme.END, f"{readme.END}\n{readme.BEGIN}"):
        with pytest.raises(ValueError, match="two lines"):
            readme.replace_block(bad, "x")


def test_the_readme_has_a_line_for_each_workload_of_each_run(tmp_path):
    one = result(row("general", 1000.0), row("lowlat-nvidia", 700.0), row("read-floor", 500.0), row("other", 1.0))
    two = result(row("general", 9.0), name="second")
    lines = [line for line in readme.performance_block([(tmp_path, one), (tmp_path, two)]).splitlines() if "](" in line]
    assert len(lines) == 2
    assert all(value in lines[0] for value in ("1000", "700", "500"))
    assert "other" not in lines[0]
    for line, of in zip(lines, (one, two), strict=True):
        anchor = report.result_anchor(of)
        assert f"{readme.PAGE}#{anchor})" in line
        assert f'<a id="{anchor}">' in report.full_report([(tmp_path, one), (tmp_path, two)])


def test_a_line_is_named_even_where_run_and_workload_are_one(tmp_path):
    one = result(row("general", 1000.0, workload="region"), name="region")
    assert "| [region, context 1,024](" in readme.performance_block([(tmp_path, one)])


def test_rows_of_one_shape_are_all_shown():
    text = report.metric_table([row("general", 1000.0), row("general", 2000.0), row("other", 3000.0)])
    assert all(value in text for value in ("1000", "2000", "3000"))


def test_the_readme_of_this_repository_is_current():
    from lowlat.bench.results import load_all
    from lowlat.bench.stamp import repository_root

    place = repository_root() / "README.md"
    if not place.is_file() or readme.BEGIN not in place.read_text(encoding="utf-8"):
        pytest.skip("the README has no performance table")
    text = place.read_text(encoding="utf-8")
    found = load_all()
    assert readme.replace_block(text, readme.performance_block(found)) == text, "run: lowlat bench report --readme"
    page = (place.parent / readme.PAGE).read_text(encoding="utf-8")
    assert report.full_report(found) == page, "run: lowlat bench report --readme"


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
    svg = (tmp_path / "a" / "dense-step-roofline.svg").read_bytes()
    plots.draw_all([result(*steps)], tmp_path / "b")
    assert (tmp_path / "b" / "dense-step-roofline.svg").read_bytes() == svg


def test_findings_are_json():
    (finding,) = gate.judge_bytes(baseline(bytes={"a": 1}), {"a": 1})
    assert json.loads(msgspec.json.encode(finding))["verdict"] == "ok"
