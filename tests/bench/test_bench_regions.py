"""Regions of steps on a CPU: clocks around the parts of real steps add up, and leave the code as it was."""

import json

import pytest

from lowlat.bench import plots, random_v41, regions
from lowlat.bench.arms.base import ArmUnavailableError, StepCase
from lowlat.bench.presets import PRESETS
from lowlat.bench.region_arms import build_region_arm
from lowlat.bench.region_recorder import RegionRecorder
from lowlat.bench.results import Simulated, new_result
from lowlat.bench.stats import median_interval

TINY = PRESETS["tiny"]


pytestmark = pytest.mark.usefixtures("one_thread")


def test_time_between_marks_belongs_to_the_innermost_region(monkeypatch):
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    recorder = RegionRecorder()
    recorder.begin_step()
    with recorder.region("layer"):
        with recorder.region("attention"):
            pass
        with recorder.region("mlp"):
            pass
    recorder.end_step()
    spans = recorder.spans()
    assert [(s.name, s.start_us, s.end_us, s.depth, s.own_us) for s in spans] == [
        ("attention", 2.0, 3.0, 2, 1.0), ("mlp", 4.0, 5.0, 2, 1.0), ("layer", 1.0, 6.0, 1, 3.0),
        ("other", 0.0, 7.0, 0, 2.0),
    ]  # fmt: skip
    assert sum(s.own_us for s in spans) == 7.0


def test_wrapping_is_undone_and_silent_outside_a_step():
    class Owner:
        def work(self, x):
            return x + 1

    owner, recorder = Owner(), RegionRecorder()
    recorder.wrap(owner, "work", "work")
    assert owner.work(1) == 2, "no step has begun, so nothing is marked"
    recorder.begin_step()
    assert owner.work(2) == 3
    recorder.end_step()
    assert [span.name for span in recorder.spans()] == ["work", "other"]
    recorder.unwrap()
    recorder.begin_step()
    owner.work(3)
    recorder.end_step()
    assert [span.name for span in recorder.spans()] == ["other"]


@pytest.mark.parametrize("name", ["general", "torch-eager-graph"])
def test_regions_of_a_real_step(name, tmp_path, monkeypatch):
    case = StepCase(shape=TINY, requests=2, context=16, dtype="float32", steps=4)
    arm = build_region_arm(name, case)
    times = regions.measure_regions(name, arm, 12)
    arm.close()
    counts = {region: len(spans) for region, spans in times.instances().items()}
    expected = {"layer": 24, "head": 12, "attention": 24, "mlp": 24, "other": 12}
    if name == "general":
        expected |= {"qkv": 24, "attention output": 24, "gate and up": 24, "down": 24, "sample": 12}
    assert counts == expected
    rows = {row.details["region"]: row for row in regions.region_rows(times, case, arm.note, {"kernels": 3})}
    assert rows["layer"].instances == 24
    assert rows["layer"].median > rows["attention"].median
    assert sum(row.details["share_of_step"] for row in rows.values()) == pytest.approx(1.0, abs=1e-3)
    trace = json.loads(regions.perfetto([times]))["traceEvents"]
    drawn = [event for event in trace if event["ph"] == "X"]
    assert sum(event["name"] == "layer" for event in drawn) == 2 * regions.TIMELINE_STEPS
    starts = [event["ts"] for event in drawn if event["name"].startswith("step ")]
    assert starts == sorted(starts)
    result = new_result("regions-tiny", simulated=Simulated(weights=True, acceptance=True), gpus=0)
    result.rows = list(rows.values())
    titles = []
    draw = plots._figure
    monkeypatch.setattr(plots, "_figure", lambda title, *rest: (titles.append(title), draw(title, *rest))[1])
    paths = regions.timeline([times], tmp_path / "t.png", result)
    assert titles == [f"Regions of the step of median length: tiny\n{plots.caption(result)}"]
    assert titles[0].endswith("random weights, simulated acceptance")
    assert [path.name for path in paths] == ["t.png", "t.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_regions_of_a_deepseek_with_its_draft():
    with random_v41.make_v41("deepseek-v41-tiny", None, 0, draft=True) as folder:
        shape = random_v41.v41_shape("deepseek-v41-tiny", None)
        case = StepCase(shape=shape, context=20, dtype="float32", steps=8, model=folder, spec="draft")
        arm = build_region_arm("general", case)
    assert "5 tokens of the model's draft checked in each step, one counted as right" in arm.note
    times = regions.measure_regions("general", arm, 2)
    counts = {region: len(spans) / 2 for region, spans in times.instances().items()}
    assert counts == {
        "layer": 6, "attention": 6, "experts": 6, "hyper-connections": 12, "engram": 2, "head": 1, "proposals": 1,
        "other": 1,
    }  # fmt: skip
    assert arm._arm.runner._lengths == [20 + 8], "one token a step, and the second rewind is still to come"
    arm.close()
    with pytest.raises(ValueError, match="draft of deepseek-v41-tiny needs all of its 6 layers"):
        random_v41.first_layers("deepseek-v41-tiny", 3, draft=True)


def test_regions_that_do_not_add_up_are_refused():
    span = regions.Span("other", 0.0, 100.0, 0, 100.0)
    regions.check_sum(regions.RegionTimes("x", [98.0], [[span]]))
    with pytest.raises(regions.RegionsRefusedError, match=r"\+11\.1%"):
        regions.check_sum(regions.RegionTimes("x", [90.0], [[span]]))


class Scripted:
    """A step whose bare and marked times are written down; every part takes its share of the marked one."""

    note, batch, details = "", 1, {}

    def __init__(self, bare, marked):
        self._bare, self._marked = iter(bare), iter(marked)

    def bare(self):
        return [next(self._bare)]

    def marked(self):
        parts = next(self._marked)
        whole = sum(parts)
        spans = [regions.Span(f"part {i}", 0.0, part, 1, part) for i, part in enumerate(parts)]
        return [[*spans, regions.Span("other", 0.0, whole, 0, 0.0)]]

    def close(self):
        pass


WARM = [100.0] * 2


def measured(bare, marked):
    """Both as attempts of four steps, each after two that do not count."""
    warm = [[50.0, 50.0]] * 2
    return Scripted(
        [t for attempt in bare for t in WARM + attempt], [parts for attempt in marked for parts in warm + attempt]
    )


STEADY = [100.0] * 4
HALVES = [[50.0, 50.0]] * 4


def test_a_step_that_moved_is_measured_again_and_the_first_that_adds_up_counts():
    said = []
    moving = [100.0, 100.0, 130.0, 130.0]
    arm = measured([moving, STEADY], [HALVES, HALVES])
    times = regions.measure_settled("x", arm, 4, said.append)
    assert (times.attempts, times.error, times.bare_us) == (2, 0.0, STEADY)
    (again,) = (text for text in said if "Measuring again" in text)
    assert "moved by 30.0% between quarters of the run" in again
    assert again.endswith("Measuring again, 2 of 3")
    case = StepCase(shape=TINY, context=16, dtype="float32")
    assert {row.details["attempts"] for row in regions.region_rows(times, case, "")} == {2}


def test_a_step_that_moves_three_times_is_refused_with_cause_and_cure(monkeypatch):
    monkeypatch.setattr(regions, "load_average", lambda: (5.25, 2))
    moving = [100.0, 100.0, 130.0, 130.0]
    with pytest.raises(regions.RegionsRefusedError) as refused:
        regions.measure_settled("x", measured([moving] * 3, [HALVES] * 3), 4)
    text = str(refused.value)
    for part in (
        "x: the regions sum to -13.0% of the step without marks (115.0 us, 3 times measured)",
        "more than 3% is refused", "the step without marks itself moved by 30.0%", "load average 5.2 on 2 cores",
        "--threads 1", "run this again", "Where a quiet machine refuses too, it is the marks",
    ):  # fmt: skip
        assert part in text


def test_marks_that_cost_too_much_are_not_measured_again():
    slow = [[55.0, 55.0]] * 4
    with pytest.raises(regions.RegionsRefusedError, match=r"\+10\.0%.*the marks did it. Use larger regions"):
        regions.measure_settled("x", measured([STEADY], [slow]), 4)


def test_parts_that_vary_while_wholes_do_not_are_told():
    # each step has one slow part, never the same: medians of parts do not see it, wholes do
    vary = [[40.0, 40.0, 20.0], [20.0, 40.0, 40.0], [40.0, 20.0, 40.0], [40.0, 40.0, 20.0]]
    times = regions.measure_regions("x", Scripted(WARM + STEADY, [[50.0] * 2] * 2 + vary), 4)
    assert times.marked_error == 0.0
    assert times.error == pytest.approx(0.1)
    assert regions.disturbances(times) == ["steps with marks took +0.0% as wholes, but their parts vary between steps"]


def test_marks_are_not_blamed_where_the_sum_is_within_what_is_known_of_the_step():
    span = regions.Span("other", 0.0, 104.0, 0, 104.0)
    times = regions.RegionTimes("x", [99.0, 106.0, 100.0, 100.0] * 2, [[span]] * 8)
    assert (median_interval(times.bare_us).low, median_interval(times.bare_us).high) == (99.0, 106.0)
    (why,) = regions.disturbances(times)
    assert why.startswith("the sum lies inside the interval of the 8 steps without marks (99.0 to 106.0 us; more ")
    with pytest.raises(regions.RegionsRefusedError, match=r"\+4\.0%.*Other work on this machine"):
        regions.check_sum(times)


def test_a_busy_machine_stands_in_every_note():
    span = regions.Span("other", 0.0, 100.0, 0, 100.0)
    case = StepCase(shape=TINY, context=16, dtype="float32")
    for share, note in (
        (0.61, "runner; busy machine: this process ran 61% of the time"),
        (0.9, "runner"),
        (None, "runner"),
    ):
        times = regions.RegionTimes("x", [100.0] * 4, [[span]] * 4, cpu_share=share)
        assert {row.note for row in regions.region_rows(times, case, "runner")} == {note}


def test_a_process_that_seldom_ran_is_told():
    span = regions.Span("other", 0.0, 120.0, 0, 120.0)
    times = regions.RegionTimes("x", [100.0] * 4, [[span]] * 4, cpu_share=0.61)
    assert regions.disturbances(times) == ["this process ran 61% of the time"]


@pytest.mark.parametrize("fields", [{"model": "smollm2"}, {"spec": "ngram"}])
def test_the_plain_step_is_no_stand_in_for_real_weights_or_guesses(fields):
    with pytest.raises(ArmUnavailableError, match="random weights and no guesses"):
        build_region_arm("torch-eager-graph", StepCase(shape=TINY, **fields))
