"""Regions of captured steps: which kernel is whose, and how records become times. CUPTI itself needs a GPU."""

import json
from collections import Counter

import pytest
import torch
from family_kit import save_random
from spec_kit import VOCABULARY, random_draft, save_target

from lowlat.bench import kernel_regions, region_arms, regions
from lowlat.bench.arms.base import ArmUnavailableError, StepCase, build_arm
from lowlat.bench.kernel_regions import (
    KernelRecord,
    Layout,
    RecordsError,
    read_layout,
    spans_of,
    split_steps,
    with_parts,
)
from lowlat.bench.presets import PRESETS, FolderShape, any_shape
from lowlat.bench.region_recorder import RegionRecorder, Span
from lowlat.engine import build
from lowlat.platform.cpu import CpuPlatform
from lowlat_plugin import Part

TINY = PRESETS["tiny"]


def annotation(name, start, size):
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": size}


def launch(correlation, start, cat="cuda_runtime"):
    return {"ph": "X", "cat": cat, "name": "launch", "ts": start, "dur": 2, "args": {"correlation": correlation}}


def kernel(name, correlation, start, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": 3, "args": {"correlation": correlation}}


def trace():
    """A step of gather, two layers of (product, attention by the driver's call) and a head; kernels run late."""
    events = [
        annotation("region: other", 0, 1000), annotation("region: layer", 100, 200),
        annotation("region: attention", 200, 50), annotation("region: layer", 400, 200),
        annotation("region: attention", 500, 50), annotation("region: head", 700, 100), annotation("aten::x", 0, 1000),
        {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    work = [
        ("warm", -50, "cuda_runtime", "kernel"), ("gather", 10, "cuda_runtime", "kernel"),
        ("product", 110, "cuda_runtime", "kernel"), ("attend", 210, "cuda_driver", "kernel"),
        ("product", 410, "cuda_runtime", "kernel"), ("attend", 510, "cuda_driver", "kernel"),
        ("head", 710, "cuda_runtime", "kernel"), ("copy", 900, "cuda_runtime", "gpu_memcpy"),
    ]  # fmt: skip
    for number, (name, at, api, cat) in enumerate(work):
        events += [launch(number, at, api), kernel(name, number, at + 60, cat)]
    # a kernel that starts after its region was left on the host is still its region's
    return {"traceEvents": events}


def test_a_kernel_belongs_to_the_regions_open_at_its_launch():
    layout = read_layout(trace())
    assert layout.kernels == ["gather", "product", "attend", "product", "attend", "head", "copy"]
    names = [[layout.regions[instance] for instance in path] for path in layout.paths]
    layer, attention = ["other", "layer"], ["other", "layer", "attention"]
    assert names == [["other"], layer, attention, layer, attention, ["other", "head"], ["other"]]
    assert layout.paths[1] != layout.paths[3], "two layers are two instances"
    with pytest.raises(RecordsError, match="no kernel"):
        read_layout({"traceEvents": trace()["traceEvents"][:8]})


def test_marks_are_annotations_of_the_profilers_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    marks = kernel_regions.ProfilerMarks()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with marks.region("layer"), marks.region("attention"):
            torch.ones(3).sum()
        marks.enabled = False
        with marks.region("head"):
            torch.ones(3).sum()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sorted(name for name in found if name.startswith("region")) == ["region: attention", "region: layer"]


def replay(start, names=("gather", "product", "attend", "product", "attend", "head", "copy")):
    """Kernels of 10 us with gaps of 2 us before them."""
    return [KernelRecord(name, start + 12 * i + 2, start + 12 * i + 12) for i, name in enumerate(names)]


def test_replays_are_told_apart_and_foreign_kernels_refused():
    layout = read_layout(trace())
    first, second = replay(0), replay(84)
    assert split_steps(first + second, layout, 2) == [first, second]
    with pytest.raises(RecordsError, match="left 13 records"):
        split_steps((first + second)[:-1], layout, 2)
    with pytest.raises(RecordsError, match="kernel 2 of a replay is other"):
        split_steps(replay(0, ("gather", "product", "other", "product", "attend", "head", "copy")), layout, 1)


@pytest.mark.parametrize("tracing", [0.0, 1.5, 5.0])
def test_gaps_belong_to_the_kernel_after_them_and_regions_add_up(tracing):
    layout = read_layout(trace())
    spans = spans_of(replay(84), layout, 84.0, tracing)
    each = 10 + max(0.0, 2 - tracing)
    found = [(s.name, s.start_us / each, s.end_us / each, s.depth, s.own_us / each) for s in spans]
    assert [tuple(pytest.approx(x) if isinstance(x, float) else x for x in span) for span in found] == [
        ("attention", 2.0, 3.0, 2, 1.0), ("layer", 1.0, 3.0, 1, 1.0), ("attention", 4.0, 5.0, 2, 1.0),
        ("layer", 3.0, 5.0, 1, 1.0), ("head", 5.0, 6.0, 1, 1.0), ("other", 0.0, 7.0, 0, 2.0),
    ]  # fmt: skip
    assert sum(span.own_us for span in spans) == pytest.approx(7 * each)


def test_kernels_that_overlap_count_once():
    layout = Layout(["a", "b", "c"], [(0,), (0, 1), (0, 1)], ["other", "layer"])
    records = [KernelRecord("a", 1, 10), KernelRecord("b", 5, 8), KernelRecord("c", 9, 14)]
    layer, step = spans_of(records, layout, 0.0, 0.5)
    assert (layer.start_us, layer.end_us, layer.own_us) == (9.5, 13.5, 4)
    assert (step.end_us, step.own_us) == (13.5, 9.5)


def test_a_librarys_parts_are_fitted_into_its_region():
    """A region of 20 us from 10 on; the library's own step took 40 us, in which two layers of two parts lie."""
    spans = [Span("take", 0, 10, 1, 10.0), Span("kernels", 10, 30, 1, 20.0), Span("other", 0, 32, 0, 2.0)]
    parts = [
        Part("start", 0, 4, 1), Part("layer", 4, 20, 1), Part("qkv", 4, 14, 2), Part("exchange", 4, 6, 3),
        Part("down", 14, 20, 2), Part("head", 20, 40, 1),
    ]  # fmt: skip
    found, stretch = with_parts(spans, "kernels", parts)
    assert stretch == 2.0
    assert [(s.name, s.start_us, s.end_us, s.depth, s.own_us) for s in found] == [
        ("take", 0, 10, 1, 10), ("start", 10, 12, 2, 2), ("exchange", 12, 13, 4, 1), ("qkv", 12, 17, 3, 4),
        ("down", 17, 20, 3, 3), ("layer", 12, 20, 2, 0), ("head", 20, 30, 2, 10), ("kernels", 10, 30, 1, 0),
        ("other", 0, 32, 0, 2),
    ]  # fmt: skip
    assert sum(span.own_us for span in found) == 32
    times = regions.RegionTimes("x", [32.0], [found])
    regions.check_sum(times, {"parts_over_region": 1.02})
    with pytest.raises(regions.RegionsRefusedError, match=r"stamps inside the kernels took \+4\.0%"):
        regions.check_sum(times, {"parts_over_region": 1.04})


class KeepingPlatform(CpuPlatform):
    keeps_state = True


def test_the_parts_of_a_device_step_are_marked_and_left_as_they_were(monkeypatch):
    monkeypatch.setattr(build, "select", lambda *_: KeepingPlatform())
    arm = build_arm("general", StepCase(shape=TINY, requests=2, context=30, dtype="float32", steps=8))
    arm.rewind()
    arm.decode()
    replayed, body = arm.runner.captured_step([0, 1])
    lengths = arm.runner._state.lengths_T
    assert lengths[:2].tolist() == [31, 31]
    with torch.inference_mode():
        replayed()
        recorder = RegionRecorder()
        region_arms.mark_device_step(recorder, arm.runner)
        recorder.begin_step()
        body()
        recorder.end_step()
        recorder.unwrap()
        counts = {}
        for span in recorder.spans():
            counts[span.name, span.depth] = counts.get((span.name, span.depth), 0) + 1
        inside = {"attention": 2, "rotation and cache write": 2, "qkv": 2, "attention output": 2, "mlp": 2}
        expected = {("layer", 1): 2, ("head", 1): 1, ("sample", 1): 1, ("other", 0): 1}
        expected |= {(name, 2): count for name, count in inside.items()}
        expected |= {("gate and up", 3): 2, ("activation", 4): 2, ("down", 3): 2}
        assert counts == expected
        recorder.begin_step()
        body()
        recorder.end_step()
        assert [span.name for span in recorder.spans()] == ["other"]
    assert lengths[:2].tolist() == [34, 34]


def counts_of_a_device_step(monkeypatch, case):
    """Instances of regions of the operations that a captured step holds, by region and depth."""
    monkeypatch.setattr(build, "select", lambda *_: KeepingPlatform())
    arm = build_arm("general", case)
    arm.rewind()
    arm.decode()
    before = arm.runner._state.lengths_T[0].item()
    replayed, body = arm.runner.captured_step([0])
    with torch.inference_mode():
        replayed()
        assert arm.runner._state.lengths_T[0].item() == before + 1, "one token a step"
        recorder = RegionRecorder()
        region_arms.mark_device_step(recorder, arm.runner)
        recorder.begin_step()
        body()
        recorder.end_step()
        recorder.unwrap()
    arm.close()
    return Counter((span.name, span.depth) for span in recorder.spans())


@pytest.mark.parametrize("spec", ["dspark", "ngram"])
def test_a_drafts_proposals_are_one_region_of_a_step_that_checks_them(spec, tmp_path, monkeypatch):
    target = save_target(tmp_path / "target")
    draft = str(random_draft(tmp_path / "draft", spec)) if spec == "dspark" else None
    case = StepCase(
        shape=FolderShape("target", VOCABULARY, 160), context=30, dtype="float32", steps=8, model=str(target),
        spec=spec, draft=draft,
    )  # fmt: skip
    counts = counts_of_a_device_step(monkeypatch, case)
    assert counts["layer", 1] == counts["attention", 2] == counts["mlp", 2] == 4
    assert counts["head", 1] == counts["sample", 1] == counts["acceptance", 1] == counts["states", 1] == 1
    # a trained draft guesses once, and keeps keys and values of the rows that were computed
    assert counts["proposals", 1] == (2 if spec == "dspark" else 1)
    assert "product" not in {name for name, _ in counts}, "a draft's own operations are not told apart"


def test_experts_are_a_region_of_a_device_step(tmp_path, monkeypatch):
    save_random(tmp_path, "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
    config = json.loads((tmp_path / "config.json").read_text())
    case = StepCase(shape=any_shape(str(tmp_path)), context=30, dtype="float32", steps=8, model=str(tmp_path))
    assert case.shape.vocab == config["vocab_size"]
    counts = counts_of_a_device_step(monkeypatch, case)
    layers = config["num_hidden_layers"]
    assert counts["layer", 1] == counts["mlp", 2] == counts["router", 3] == counts["experts", 3] == layers


def test_a_captured_step_is_measured_in_batches(monkeypatch):
    """The arm with the profiler and the events replaced: replays advance a clock, and records are made from it."""
    layout = read_layout(trace())
    replays, rewinds = [], []

    def traced(run, steps, kernels):
        assert kernels == 7
        for _ in range(steps + 1):
            run()
        return replay(0)[-1:] + [record for step in range(steps) for record in replay(84 * (step + 1))]

    monkeypatch.setattr(kernel_regions, "layout_of", lambda body, marks: layout)
    monkeypatch.setattr(kernel_regions, "tracing_cost", lambda: 1.0)
    monkeypatch.setattr(kernel_regions, "traced_replays", traced)
    monkeypatch.setattr(
        "lowlat.bench.arms.torch_step.time_cuda", lambda run, steps: [run() or 77.5 for _ in range(steps + 1)][1:]
    )
    arm = region_arms.GraphArm(
        "note", lambda: replays.append(1), lambda: None, lambda marks: None, lambda: rewinds.append(len(replays)),
        lambda: None,
    )  # fmt: skip
    assert "parts_over_region" not in arm.details
    times = regions.measure_regions("general", arm, 100)
    assert len(times.steps) == len(times.bare_us) == 130
    assert len(replays) == (2 * 2 + 2 * 2) * 66
    assert rewinds == [0, *range(0, len(replays), 66)]
    # 7 kernels of 10 us, of each gap of 2 us one for the records: 77 us
    assert times.own_us() == {"attention": 22, "layer": 22, "head": 11, "other": 22}
    assert times.error == pytest.approx(77 / 77.5 - 1)
    regions.check_sum(times)
    rows = regions.region_rows(times, StepCase(shape=TINY), arm.note, arm.details)
    assert {row.details["tracing_us_per_kernel"] for row in rows} == {1.0}
    assert {row.details["region"]: row.instances for row in rows} == {
        "step": 130, "layer": 260, "attention": 260, "head": 130
    }  # fmt: skip


def test_arms_without_regions_are_named():
    with pytest.raises(ValueError, match="torch-compile"):
        region_arms.build_region_arm("torch-compile", StepCase(shape=TINY))
    with pytest.raises(ArmUnavailableError, match="nothing"):
        region_arms.build_region_arm("plugin:nothing", StepCase(shape=TINY))
