"""Compare: verdicts only beyond noise, and nothing judged across machines or simulations."""

import math

import msgspec
import pytest
from command_kit import lowlat
from result_kit import machine, result, row

from lowlat.bench.compare import compare
from lowlat.bench.results import LOWER_IS_BETTER, METRICS, Simulated, save


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


def test_ratios_beyond_every_float_are_judged_too():
    before, after = row("vllm", 1e300, spread=0.0), row("vllm", 1e-300, spread=0.0)
    less = verdicts(result(before), result(after))["vllm", "step_us"]
    more = verdicts(result(after), result(before))["vllm", "step_us"]
    assert (less.ratio, less.low, less.high, less.verdict) == (0.0, 0.0, 0.0, "better")
    assert (more.ratio, more.low, more.high, more.verdict) == (math.inf, math.inf, math.inf, "worse")
    drifted = verdicts(result(before, row("general", 1e200)), result(after, row("general", 1e-300)))["vllm", "step_us"]
    assert drifted.reference == "general"
    assert drifted.ratio == pytest.approx(1e-100)


def test_every_line_of_a_comparison_says_which_load_it_is_of(tmp_path):
    rows = [
        row("general", 10.0, metric="tokens_per_s_user", concurrency=users, context=0, dtype="") for users in (1, 2)
    ]
    steps = [row("general", 10.0, rows=8, concurrency=8, tp=2), row("general", 10.0)]
    path = save(result(*rows, *steps), tmp_path)
    lines = lowlat("compare", path, path).stdout.splitlines()
    assert [line.removeprefix("same").strip().partition("  general  ")[0] for line in lines] == [
        "llama-1b",
        "llama-1b, concurrency 2",
        "llama-1b, tp 2, dtype bfloat16, rows 8, context 1024",
        "llama-1b, dtype bfloat16, context 1024",
    ]
