"""The order of launches and results, and what follows when the end of a request is noticed late."""

from __future__ import annotations

import gc

import pytest
from kv_simulator import EOS, drain, make_core, make_request, solo_answer

from lowlat.cache.prefix import PrefixCache
from lowlat.engine.batch import PlanLimits
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import ScriptedExecutor, StepResult, ThreadExecutor
from lowlat.engine.request import FinishReason
from lowlat.engine.scheduler import Scheduler


def scripted(run_ahead: int) -> tuple[EngineCore, ScriptedExecutor]:
    limits = PlanLimits(max_batch=2, max_rows=18, max_pages=16)
    scheduler = Scheduler(PrefixCache(32, 4), limits, eos_ids=frozenset([EOS]), chunk_tokens=16, seed=0)
    executor = ScriptedExecutor(lambda slot, position: 100 + position, keep_log=True)
    return EngineCore(scheduler, executor, run_ahead=run_ahead), executor


@pytest.mark.parametrize(
    ("run_ahead", "order"),
    [
        (0, "L0 R0 L1 R1 L2 R2 L3 R3"),
        (1, "L0 L1 R0 L2 R1 L3 R2 R3"),
        (2, "L0 L1 L2 R0 L3 R1 R2 R3"),
    ],
)
def test_launches_run_ahead_of_results(run_ahead: int, order: str):
    core, executor = scripted(run_ahead)
    core.submit(make_request("a", [1, 2, 3], 4))
    while core.has_work:
        core.turn()
    assert executor.log is not None
    assert " ".join(("L" if kind == "launch" else "R") + str(step) for kind, step in executor.log) == order


def prompt_that_ends_after(answer: int) -> list[int]:
    """A prompt whose solo answer ends with EOS after `answer` tokens."""
    for seed in range(100_000):
        prompt = [10 + seed % 40, 5 + seed // 40 % 40, seed // 1600]
        if len(solo_answer(make_request("x", prompt, answer + 1))) == answer:
            return prompt
    raise AssertionError("no such prompt")


def test_an_end_noticed_late_frees_once_and_after_the_last_step():
    core, device = make_core(max_batch=1, page_size=1, pages=16)
    scheduler = core.scheduler
    prompt = prompt_that_ends_after(2)
    core.submit(make_request("a", prompt, 8))
    core.submit(make_request("b", [7, 7], 3))
    for _ in range(3):  # prefill and two decode steps: the third step computes beyond the end
        plan = scheduler.schedule()
        assert plan is not None
        device.launch(plan)
    for _step in range(2):
        result = device.collect(None)
        assert result is not None
        scheduler.commit(result)
        device.check()
    outputs = scheduler.take_outputs()
    assert outputs[-1].finish_reason == FinishReason.STOP
    assert outputs[-1].stop_token_id == EOS
    assert scheduler.schedule() is None, "b waits: the slot is free only after the step in flight"
    assert not core.abort("a"), "an abort after the end finds nothing"
    result = device.collect(None)
    assert result is not None
    scheduler.commit(result)
    assert scheduler.take_outputs() == [], "the token beyond the end is dropped"
    scheduler.check()
    assert drain(core, device)["b"] == solo_answer(make_request("b", [7, 7], 3))
    # The last token of an answer was never an input: a follow-up finds everything but it.
    follow_up = [*prompt, *solo_answer(make_request("a", prompt, 8)), 9, 9]
    core.submit(make_request("c", follow_up, 1))
    outputs = [output for _ in range(4) for output in core.turn()]
    assert outputs[0].cached_tokens == len(follow_up) - 3


def test_abort_between_launch_and_result():
    core, device = make_core(max_batch=2, page_size=1, pages=32)
    core.submit(make_request("a", [1] * 6, 20, ignore_eos=True))
    core.turn()
    assert core.scheduler.in_flight == 1
    assert core.abort("a")
    core.submit(make_request("b", [2] * 6, 4))
    answers = drain(core, device)
    assert answers["b"] == solo_answer(make_request("b", [2] * 6, 4))
    assert core.scheduler.cache.pool.held == 0


def test_a_higher_priority_preempts_when_the_batch_is_full():
    core, device = make_core(max_batch=2, pages=60)
    low = [make_request(f"low{n}", [n, 1, 2], 30, ignore_eos=True) for n in range(2)]
    for request in low:
        core.submit(request)
    for _ in range(5):
        core.turn()
    high = make_request("high", [9, 9], 3, priority=1, ignore_eos=True)
    core.submit(high)
    ended: list[str] = []
    answers: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.turn():
            answers.setdefault(output.id, []).extend(output.token_ids)
            if output.finish_reason:
                ended.append(output.id)
        core.scheduler.check()
        device.check()
    assert core.scheduler.stats.preemptions == 1
    assert ended[0] == "high"
    assert ended[1] == "low0", "the latest of the lowest priority gave way"
    for request in low:
        # The first five turns' tokens were taken before `answers` was kept.
        assert answers[request.id] == solo_answer(request)[-len(answers[request.id]) :]


def test_equal_priorities_keep_their_order():
    core, _device = make_core(max_batch=2)
    for number in range(6):
        core.submit(make_request(f"r{number}", [number, 1], 4, ignore_eos=True))
    firsts: list[str] = []
    while core.has_work:
        for output in core.turn():
            if output.id not in firsts:
                firsts.append(output.id)
    assert firsts == [f"r{number}" for number in range(6)]
    assert core.scheduler.stats.preemptions == 0


def test_full_pool_preempts_the_latest_and_all_end_right():
    core, device = make_core(pages=12, page_size=4, max_batch=4, max_context=48)
    requests = [make_request(f"r{n}", [n, n, n], 40, ignore_eos=True) for n in range(4)]
    for request in requests:
        core.submit(request)
    answers = drain(core, device)
    assert core.scheduler.stats.preemptions > 0
    for request in requests:
        assert answers[request.id] == solo_answer(request)


def test_chunks_and_decodes_share_steps():
    core, device = make_core(chunk_tokens=4, max_batch=3)
    core.submit(make_request("short", [1, 2], 12, ignore_eos=True))
    core.turn()
    core.submit(make_request("long", list(range(5, 25)), 2, ignore_eos=True))
    gaps = 0
    while "long" in core.scheduler._live:
        outputs = core.turn()
        gaps = 0 if any(output.id == "short" for output in outputs) else gaps + 1
        assert gaps <= 1 or "short" not in core.scheduler._live, "a prefill in chunks must not stop a running answer"
    drain(core, device)


def test_requests_that_never_fit_are_refused():
    core, _ = make_core(pages=4, page_size=4)
    for prompt, max_tokens in (([], 1), ([1], -1), ([1] * 10, 7)):
        with pytest.raises(ValueError, match="at most 16"):
            core.submit(make_request("a", prompt, max_tokens))
    core.submit(make_request("a", [1] * 10, 6))
    with pytest.raises(ValueError, match="already in use"):
        core.submit(make_request("a", [1], 1))


def test_the_simulator_sees_a_page_freed_too_early():
    """The tests above prove something only if their device notices faults."""
    core, device = make_core(page_size=1, pages=32)
    core.submit(make_request("a", [1] * 6, 20, ignore_eos=True))
    core.turn()
    active = core.scheduler._live["a"]
    assert active.lease is not None
    core.scheduler.cache.pool.give_back(active.lease.private)
    with pytest.raises(AssertionError, match="is free while a step may write it"):
        device.check()


def test_an_engine_that_is_dropped_ends_its_thread():
    def run(plan):
        return StepResult(plan.step, [])

    core, _ = make_core()
    core.executor = ThreadExecutor(run)
    thread = core.executor._thread
    del core
    gc.collect()
    thread.join(120)
    assert not thread.is_alive()
