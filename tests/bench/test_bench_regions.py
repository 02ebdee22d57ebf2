"""Regions of steps on a CPU: clocks around the parts of real steps add up, and leave the code as it was."""

import json

import pytest

from lowlat.bench import random_v41, regions
from lowlat.bench.arms.base import StepCase
from lowlat.bench.presets import PRESETS
from lowlat.bench.region_arms import build_region_arm
from lowlat.bench.region_recorder import RegionRecorder

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
def test_regions_of_a_real_step(name, tmp_path):
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
    paths = regions.timeline([times], tmp_path / "t.png")
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
