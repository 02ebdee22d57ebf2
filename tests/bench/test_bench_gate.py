"""The gate: instruction counts that repeat, bytes that may not grow, and no way to pass by judging nothing."""

import json
import re
import shutil

import msgspec
import pytest

from lowlat.bench import gate, gate_counts
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


def test_findings_are_json():
    (finding,) = gate.judge_bytes(baseline(bytes={"a": 1}), {"a": 1})
    assert json.loads(msgspec.json.encode(finding))["verdict"] == "ok"
