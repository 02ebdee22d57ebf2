"""The life cycle against a small engine: what works goes active, and each broken promise is caught by its name."""

from __future__ import annotations

import threading

import pytest
import torch
from plugin_zoo import WaitsForEver, installed, zoo_case, zoo_spec

from lowlat_plugin import (
    Code,
    LowLatency,
    Mode,
    Policy,
    Refused,
    Registry,
    Requirements,
    Shape,
    State,
    StepFailed,
    ThreadRanks,
)
from lowlat_plugin.conformance import ReferenceHost
from lowlat_plugin.shadow import Shadow


def codes(low: LowLatency) -> set[str]:
    report = low.report()
    return {reason.code for reason in (*report.reasons, *(r for c in report.candidates for r in c.reasons))}


def general_still_right(host: ReferenceHost) -> None:
    """The same engine continues from a prefill to the same logits as a prefill of the whole."""
    with torch.inference_mode():
        shadow = Shadow(host, [Shape(Mode.DECODE, 1, 1)], lengths=(9,), seed=3)
        step = shadow.step(Shape(Mode.DECODE, 1, 1))
        logits = host.general(step).logits_RV
        shadow.close()
    assert torch.isfinite(logits).all()
    assert logits.shape == (1, host.vocab_size)


def test_good_kernels_go_active_and_are_measured():
    low = installed(policy=Policy.REQUIRE)
    assert low.state is State.ACTIVE
    assert {str(s) for s in low.table.covered} == {
        "decode/1x1",
        "decode/2x2",
        "decode/3x3",
        "decode/4x4",
        "verify/1x2",
        "verify/2x4",
    }
    assert len(low.results) == 6
    assert all(m.ok for result in low.results for m in result.measurements)
    assert {"greedy token", "logits", "kv", "logits beside padding"} <= {
        m.output for result in low.results for m in result.measurements
    }
    assert low.route(Mode.DECODE, 3, 3).kernels
    assert low.route(Mode.PREFILL, 1, 9).reason == "prefill"
    assert low.route(Mode.VERIFY, 1, 3).reason == "not-covered"
    assert low.route(Mode.DECODE, 5, 5).reason == "too-wide"


def test_off_touches_nothing():
    low = installed("RaisesInConstructor", policy=Policy.OFF)
    assert low.state is State.NONE
    assert low.report().candidates == ()
    assert low.route(Mode.DECODE, 1, 1).reason == "off"


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("RaisesInConstructor", Code.LOAD_FAILED),
        ("NoSuchKernel", Code.LOAD_FAILED),
        ("RaisesInGuard", Code.RAISED),
        ("WordyGuard", Code.LIBRARY),
        ("CoversTooMuch", Code.BAD_PLAN),
        ("NeverRight", Code.NUMERICS),
        ("ChoosesOthers", Code.NUMERICS),
        ("FailsOnTheDevice", Code.RAISED),
        ("ForgetsKV", Code.NUMERICS),
        ("ReadsBeyondLength", Code.NUMERICS),
        ("WrongSlot", Code.KV_WRITE),
        ("WritesForPadding", Code.KV_WRITE),
        ("TakesMemoryLate", Code.LATE_MEMORY),
        ("UsesClosedWorkspace", Code.RAISED),
    ],
)
def test_each_broken_promise_is_named_and_the_general_path_goes_on(kernel, code):
    host = ReferenceHost(zoo_case())
    low = installed(kernel, host)
    assert code in codes(low), low.report().lines()
    assert low.state is not State.ACTIVE
    assert not low.route(Mode.DECODE, 1, 1).kernels
    general_still_right(host)
    with pytest.raises(Refused) as refusal:
        installed(kernel, ReferenceHost(zoo_case()), Policy.REQUIRE)
    assert code in {reason.code for reason in refusal.value.reasons}


def test_all_words_of_a_library_guard_are_kept():
    low = installed("WordyGuard")
    assert [r.found for r in low.report().candidates[0].reasons] == ["hidden size is odd", "the moon is full"]


def test_numerics_beyond_the_bound_disable_that_width_with_the_number():
    low = installed("OutOfBounds")
    assert low.state is State.ACTIVE
    assert low.route(Mode.DECODE, 3, 3).reason == "shadow-miss"
    assert low.route(Mode.DECODE, 4, 4).kernels
    missed = next(result for result in low.results if result.shape == "decode/3x3")
    found = next(m for m in missed.measurements if m.output == "logits")
    assert found.measured > found.limit == 1e-4
    assert any("max-abs" in reason.found for reason in missed.reasons)


def test_a_wait_that_never_ends_is_given_up_by_name():
    host = ReferenceHost(zoo_case(deadline_s=0.2))
    try:
        low = installed("WaitsForEver", host, min_deadline_s=0.1)
        assert Code.DEADLINE in codes(low)
        assert low.state is State.FAILED
        assert low.kernel.engine is not None, "what the hanging thread works on was closed"
        general_still_right(host)
    finally:
        WaitsForEver.over.set()


def test_a_plan_that_changes_after_capture_is_caught():
    low = installed("ChangesPlan")
    assert low.state is State.ACTIVE
    low.recheck()
    assert low.state is State.FAILED
    assert Code.PLAN_CHANGED in codes(low)


def test_recheck_is_quiet_when_nothing_changed():
    low = installed()
    low.recheck()
    assert low.state is State.ACTIVE


def test_pools_that_move_without_bind_stop_the_step_before_it_runs():
    host = ReferenceHost(zoo_case())
    low = installed(host=host)
    with torch.inference_mode():
        shadow = Shadow(host, [Shape(Mode.DECODE, 2, 2)])
        step = shadow.step(Shape(Mode.DECODE, 2, 2))
        assert low.forward(step).shape == (2, host.vocab_size)
        host.reallocate()
        with pytest.raises(StepFailed) as failure:
            low.forward(step)
    assert failure.value.reason.code == Code.POOLS_MOVED
    assert low.route(Mode.DECODE, 2, 2).reason == "failed"


def test_moved_pools_work_after_bind_and_kernels_that_ignore_it_are_caught():
    host = ReferenceHost(zoo_case())
    low = installed(host=host)
    host.reallocate()
    low.bind()
    low.prove()
    assert low.state is State.ACTIVE
    low = installed("IgnoresRebind", host)
    assert low.state is State.ACTIVE
    host.reallocate()
    low.bind()
    low.prove()
    assert low.state is State.FAILED
    assert Code.NUMERICS in codes(low)


def test_an_error_inside_a_step_disables_the_kernels_and_says_why():
    host = ReferenceHost(zoo_case())
    low = installed("FailsAtStep", host)
    low.kernel.error = ValueError("bad cubin")
    with torch.inference_mode():
        step = Shadow(host, [Shape(Mode.DECODE, 1, 1)]).step(Shape(Mode.DECODE, 1, 1))
        with pytest.raises(StepFailed, match="bad cubin"):
            low.forward(step)
    assert low.state is State.FAILED
    general_still_right(host)


def test_switch_counters_and_close():
    low = installed()
    for on in (True, False, True):
        low.switch(on)
        low.counters.add(low.route(Mode.DECODE, 1, 1))
    assert low.counters.snapshot() == {("general", "switched-off"): 1, ("plugin", "covered"): 2}
    low.close()
    low.close()
    assert low.route(Mode.DECODE, 1, 1).reason == "no-kernels"


def test_weight_updates_are_taken_over_or_named():
    host = ReferenceHost(zoo_case())
    fresh, stale = installed("RefreshingKernel", host), installed("TorchKernel", host)
    for name, tensor in zoo_case(seed=1).weights.items():
        host.case.weights[name].copy_(tensor)
    fresh.refresh()
    stale.refresh()
    assert fresh.state is State.ACTIVE, fresh.report().lines()
    assert stale.state is State.FAILED
    assert Code.WEIGHTS_UPDATED in codes(stale)


def test_suspend_gives_memory_back_and_resume_proves_again():
    low = installed("RefreshingKernel")
    low.suspend()
    assert low.route(Mode.DECODE, 1, 1).reason == "suspended"
    assert not hasattr(low.kernel, "engine")
    low.resume()
    assert low.state is State.ACTIVE


def on_two_ranks(kernel: str, policy: Policy = Policy.AUTO) -> list[LowLatency | BaseException]:
    ranks = ThreadRanks(2, timeout_s=120)
    results: list = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = installed(kernel, ReferenceHost(zoo_case(), ranks.of(rank)), policy)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_well_ranks_agree():
    lows = on_two_ranks("TorchKernel")
    assert [low.state for low in lows] == [State.ACTIVE, State.ACTIVE]
    assert lows[0].table.digest() == lows[1].table.digest()


@pytest.mark.parametrize(
    ("kernel", "code"),
    [
        ("ProbeRaisesOnRank1", Code.RAISED),
        ("BuildRaisesOnRank1", Code.RAISED),
        ("WidthsDiffer", Code.RANKS_DIFFER),
        ("ShadowRaisesOnRank1", Code.RAISED),
        ("MissesOnRank1", Code.NUMERICS),
    ],
)
def test_what_one_rank_finds_all_ranks_act_on(kernel, code):
    lows = on_two_ranks(kernel)
    states = {low.state for low in lows}
    assert len(states) == 1
    if kernel == "MissesOnRank1":
        assert [low.route(Mode.DECODE, 2, 2).reason for low in lows] == ["shadow-miss"] * 2
        reasons = [reason for low in lows for result in low.results for reason in result.reasons]
    else:
        assert states == {State.FAILED}
        reasons = [reason for low in lows for reason in low.report().reasons]
    assert {reason.code for reason in reasons} == {code}
    if code is not Code.RANKS_DIFFER:
        assert {reason.rank for reason in reasons} == {1}
    if kernel == "WidthsDiffer":
        refused = on_two_ranks(kernel, Policy.REQUIRE)
        assert all(isinstance(error, Refused) for error in refused)


def test_a_library_that_is_missing_on_one_rank_stops_all_ranks():
    ranks = ThreadRanks(2, timeout_s=120)
    lows = []
    for rank in range(2):
        registry = Registry()
        if rank == 0:
            registry.register(zoo_spec(), "zoo")
        lows.append(LowLatency(ReferenceHost(zoo_case(), ranks.of(rank)), registry))
    threads = [threading.Thread(target=low.choose) for low in lows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [low.state for low in lows] == [State.FAILED] * 2
    assert all(codes(low) == {Code.RANKS_DIFFER} for low in lows)


def test_named_kernels_are_required_and_a_wrong_name_is_an_error():
    registry = Registry()
    registry.register(zoo_spec("NeverRight"), "zoo")
    with pytest.raises(Refused) as refusal:
        LowLatency(ReferenceHost(zoo_case()), registry, name="nosuch").choose()
    assert refusal.value.reasons[0].code == Code.NOT_FOUND
    assert "zoo/neverright" in refusal.value.reasons[0].found
    low = LowLatency(ReferenceHost(zoo_case()), registry, name="neverright")
    low.choose()
    low.build()
    low.bind()
    with pytest.raises(Refused):
        low.prove()


def test_the_first_candidate_that_fits_is_chosen_and_all_are_reported():
    registry = Registry()
    registry.register(zoo_spec("TorchKernel"), "b-library")
    registry.register(zoo_spec("RefreshingKernel"), "c-library")
    registry.register(zoo_spec("TorchKernel", vendor="nvidia"), "a-library")
    low = LowLatency(ReferenceHost(zoo_case()), registry)
    low.choose()
    assert low.candidate.key == "b-library/torchkernel"
    found = {c.key: [r.code for r in c.reasons] for c in low.report().candidates}
    assert found == {
        "a-library/torchkernel": [Code.VENDOR],
        "b-library/torchkernel": [],
        "c-library/refreshingkernel": [],
    }
    chosen = LowLatency(ReferenceHost(zoo_case()), registry, name="c-library")
    chosen.choose()
    assert chosen.candidate.key == "c-library/refreshingkernel"


def test_shapes_that_cannot_occur_are_neither_proven_nor_routed():
    host = ReferenceHost(zoo_case())
    whole = host.context

    def context(spec, workspace):
        made = whole(spec, workspace)
        made.max_requests = 2
        return made

    host.context = context
    low = installed(host=host)
    assert {str(shape) for shape in low.table.covered} == {"decode/1x1", "decode/2x2", "verify/1x2", "verify/2x4"}
    assert len(low.results) == 4
    assert low.route(Mode.DECODE, 3, 3).reason == "not-covered"


def test_a_pool_too_small_to_check_is_a_reason():
    low = installed(host=ReferenceHost(zoo_case(), pages=3))
    assert low.state is State.FAILED
    assert "too few" in str(low.report().reasons[0])


@pytest.mark.parametrize(
    ("policy", "words"), [(Policy.AUTO, "none is installed, the general path"), (Policy.OFF, "--low-latency is off")]
)
def test_the_report_says_why_nothing_is_active(policy, words):
    low = LowLatency(ReferenceHost(zoo_case()), Registry(), policy)
    low.choose()
    (line,) = low.report().lines()
    assert line.startswith(f"no kernel library is active: {words}")


def test_the_log_says_why_the_nearest_library_was_refused(caplog):
    registry = Registry()
    other = Requirements(dtypes=frozenset({"float64"}))
    registry.register(zoo_spec(name="elsewhere", architectures=frozenset({"Other"})), "zoo")
    registry.register(zoo_spec(name="far", requires=other, devices={}), "zoo")
    registry.register(zoo_spec(name="near", requires=other), "zoo")
    with caplog.at_level("INFO"):
        low = LowLatency(ReferenceHost(zoo_case()), registry)
        low.choose()
    elsewhere, far, near = low.report().candidates
    assert [len(one.reasons) for one in (elsewhere, far, near)] == [1, 2, 1]
    (line,) = [record.getMessage() for record in caplog.records if "kernel libraries fits" in record.getMessage()]
    assert line.startswith("none of 3 ")
    assert line.endswith(f"nearest is zoo/near: {near.reasons[0]}")
    assert far.why_not() == f"zoo/far: {far.reasons[0]} and 1 more (lowlat plugins doctor shows all)"
