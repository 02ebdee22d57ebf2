"""The gate: instruction counts that repeat, bytes that may not grow, and no way to pass by judging nothing."""

import json
import re
import shutil

import msgspec
import pytest
from typer.testing import CliRunner

from lowlat.bench import gate, gate_counts
from lowlat.bench.cli import app
from lowlat.bench.host_work import HostWork
from lowlat.bench.presets import PRESETS
from lowlat.bench.roofline import dense_step_bytes


def baseline(**fields):
    limits = {"decode-8": gate.Limit(value=100000, tolerance=0.03)}
    return gate.Baseline(python=gate.python_version(), instructions=limits, **fields)


@pytest.mark.parametrize(("count", "verdict"), [(100500, "ok"), (103500, "worse"), (90000, "better"), (102900, "ok")])
def test_instructions_are_judged_by_their_tolerance(count, verdict):
    asked = []

    def counter(scenario, requests):
        asked.append((scenario, requests))
        return count

    (finding,) = gate.judge_instructions(baseline(), counter, ["decode-8"])
    assert finding.verdict == verdict
    assert asked == [("decode", 8)]


def test_another_python_is_not_judged():
    old = baseline()
    old.python = "3.99"
    (finding,) = gate.judge_instructions(old, lambda *_: pytest.fail("nothing to count"), ["decode-8"])
    assert finding.verdict == "not judged"
    assert "3.99" in finding.reason


def test_bytes_may_shrink_but_not_grow():
    judged = gate.judge_bytes({"a": 100, "b": 100, "c": 100}, {"a": 100, "b": 101, "c": 99})
    assert [finding.verdict for finding in judged] == ["ok", "worse", "better"]


def test_times_fail_only_after_three_repeats_beyond_one_and_a_half():
    values = iter([2.0, 1.9, 1.4])
    (finding,) = gate.judge_times(baseline(times={"decode-8": 1.0}), lambda _: next(values), ["decode-8"])
    assert finding.verdict == "ok"
    tries = []
    (finding,) = gate.judge_times(
        baseline(times={"decode-8": 1.0}), lambda name: tries.append(name) or 1.6, ["decode-8"]
    )
    assert finding.verdict == "worse"
    assert len(tries) == 3


def test_the_committed_baseline_covers_what_is_counted_today():
    kept = gate.load_baseline(gate.default_baseline())
    kernels = gate_counts.kernel_byte_counts()
    assert kept.bytes == gate_counts.step_byte_counts()
    assert {counter: set(names) for counter, names in kept.kernel_bytes.items()} == {
        counter: set(names) for counter, names in kernels.items()
    }
    assert {finding.verdict for finding in gate_counts.run_gate(kept, only="bytes", say=print)} <= {"ok", "better"}
    # A kernel streams the weights of the step's count, and at most a hundredth more, which is padding.
    for name, size in kernels["lowlat_nvidia.counts:step_bytes"].items():
        preset = name.removeprefix("lowlat-nvidia dense ").removesuffix(" weights")
        counted = dense_step_bytes(PRESETS[preset], requests=1, context=1, dtype="bfloat16")
        assert 0.99 * (counted.layers + counted.head) < size < 1.01 * (counted.layers + counted.head)


def test_host_work_of_the_baseline_is_what_is_counted():
    kept = gate.load_baseline(gate.default_baseline())
    assert list(kept.instructions) == list(kept.times) == list(gate_counts.HOST_WORK)


def whole():
    """A baseline that holds today's names with counts as they are."""
    return msgspec.structs.replace(
        gate.load_baseline(gate.default_baseline()), bytes=gate_counts.step_byte_counts(), python=gate.python_version()
    )


def judged(kept, monkeypatch, only="bytes"):
    monkeypatch.setattr(gate_counts, "time_ratio", lambda name: kept.times.get(name, 1.0))
    monkeypatch.setattr(
        gate_counts, "host_instructions", lambda scenario, n: kept.instructions[f"{scenario}-{n}"].value
    )
    return gate_counts.run_gate(kept, only=only, say=lambda _: None)


def failed(findings):
    return {(finding.name, finding.verdict) for finding in findings if finding.verdict in gate.FAILING}


def test_all_of_today_passes(monkeypatch):
    findings = judged(whole(), monkeypatch, only=None)
    assert failed(findings) == set()
    assert gate.not_judged(findings) == []
    assert {finding.kind for finding in findings} == {"instructions", "bytes", "times"}


@pytest.mark.parametrize("section", ["instructions", "bytes", "times"])
def test_a_name_that_vanished_from_either_side_fails(section, monkeypatch):
    kept = whole()
    held = getattr(kept, section)
    name = next(iter(held))
    held["another-1"] = held.pop(name)
    assert failed(judged(kept, monkeypatch, only=section)) == {("another-1", "gone"), (name, "new")}


def test_counts_of_kernels_that_vanish_fail(monkeypatch):
    kept, (counter,) = whole(), gate_counts.KERNEL_COUNTERS
    name = next(iter(kept.kernel_bytes[counter]))
    del kept.kernel_bytes[counter][name]
    assert failed(judged(kept, monkeypatch)) == {(name, "new")}
    kept.kernel_bytes = {"json:no_such_counter": {"kernel": 5}}
    assert failed(judged(kept, monkeypatch)) == {("json:no_such_counter", "gone"), (counter, "new")}
    monkeypatch.setattr(gate_counts, "KERNEL_COUNTERS", ["json:no_such_counter"])
    assert failed(judged(kept, monkeypatch)) == {("json:no_such_counter", "gone")}, "installed, but it counts nothing"


def test_a_library_that_is_not_installed_is_not_judged_and_makes_no_baseline(monkeypatch):
    kept = whole()
    kept.kernel_bytes = {"no_such_library:counts": {"kernel": 5}}
    monkeypatch.setattr(gate_counts, "KERNEL_COUNTERS", list(kept.kernel_bytes))
    (finding,) = (finding for finding in judged(kept, monkeypatch) if finding.verdict != "ok")
    assert (finding.name, finding.verdict, finding.reason) == (
        "kernel", "not judged", "no_such_library is not installed"
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no_such_library"):
        gate_counts.current_baseline(lambda _: pytest.fail("counted"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda raw, s=section: raw.update({s: {}}), f"{section} is empty")
            for section in ("instructions", "bytes", "times")
        ),
        *((lambda raw, s=section: raw.pop(s), f"{section} is empty") for section in ("bytes", "kernel_bytes")),
        (lambda raw: raw["kernel_bytes"].update({"lowlat_nvidia.counts:step_bytes": {}}), "counts nothing"),
        (lambda raw: raw["bytes"].update({"tiny rows 1 bfloat16": 0}), "tiny rows 1 bfloat16 is 0"),
        (lambda raw: raw["times"].update({"decode-8": -1.0}), "decode-8 is -1"),
        (lambda raw: raw["instructions"]["decode-8"].update(value=0), "decode-8 is 0"),
        (lambda raw: raw["instructions"]["decode-8"].update(tolerance=0.5), "the tolerance of decode-8 is 0.5"),
        (lambda raw: raw["instructions"]["decode-8"].update(tolerance=-1), "the tolerance of decode-8 is -1"),
        (lambda raw: raw.update(instrctions={}), "instrctions"),
    ],
)
def test_a_file_by_which_nothing_could_fail_is_refused(change, message, tmp_path):
    raw = msgspec.to_builtins(whole())
    change(raw)
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(raw))
    for only in ("bytes", "instructions"):
        got = CliRunner().invoke(app, ["gate", "--only", only, "--baseline", str(path)])
        assert got.exit_code == 1
        assert str(path) in got.stderr
        assert message in got.stderr


def test_a_kind_of_which_nothing_was_judged_fails(tmp_path, monkeypatch):
    kept = whole()
    kept.python = "3.99"
    gate.save_baseline(kept, tmp_path / "gate.json")
    monkeypatch.setattr(gate_counts, "host_instructions", lambda *_: pytest.fail("nothing to count"))
    got = CliRunner().invoke(app, ["gate", "--only", "instructions", "--baseline", str(tmp_path / "gate.json")])
    assert got.exit_code == 1
    assert "instructions: nothing was judged (the baseline is for Python 3.99" in got.stderr
    assert (
        CliRunner().invoke(app, ["gate", "--only", "bytes", "--baseline", str(tmp_path / "gate.json")]).exit_code == 0
    )


def test_no_number_is_no_pass():
    limits = {"decode-8": gate.Limit(value=100.0, tolerance=0.03)}
    kept = gate.Baseline(python=gate.python_version(), instructions=limits, times={"decode-8": 1.0})
    (finding,) = gate.judge_times(kept, lambda _: float("nan"), ["decode-8"])
    assert finding.verdict == "worse"


def test_baselines_are_written_whole_and_bad_ones_named(tmp_path):
    path = tmp_path / "gate.json"
    gate.save_baseline(whole(), path)
    assert gate.load_baseline(path) == whole()
    with pytest.raises(ValueError, match="times is empty"):
        gate.save_baseline(baseline(bytes={"a": 1}), path)
    assert gate.load_baseline(path) == whole()
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


def test_findings_are_json():
    (finding,) = gate.judge_bytes({"a": 1}, {"a": 1})
    assert json.loads(msgspec.json.encode(finding))["verdict"] == "ok"
