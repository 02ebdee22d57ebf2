"""The runner of GPUs on a CPU: its tokens are those of the runner of CPUs, and its steps ask the device nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from device_kit import EngineSize, RehearsedBodies, answer, begin, make_engine, make_runner, reference_ops
from family_kit import VOCABULARY, build, random_tokens, save_random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lowlat.engine.batch import PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.device_decodes import padded_requests
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.device_sampler import SamplingMode
from lowlat.engine.graphs import EagerBodies
from lowlat.engine.request import SamplingParams

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6},
    "GptOss": {
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attn_implementation": "eager",
    },
}

SAMPLINGS = [
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=17, temperature=0.9, seed=5),
    SamplingParams(max_tokens=20, temperature=1.2, seed=6, top_k=7, logprobs=3),
    SamplingParams(max_tokens=13, temperature=0.8, seed=7, top_p=0.7, min_p=0.02),
    SamplingParams(max_tokens=20, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(
        max_tokens=15, temperature=1.0, seed=(1 << 64) - 9, presence_penalty=0.6, logit_bias=((3, 2.5), (77, -4.0))
    ),
    SamplingParams(max_tokens=9, temperature=0, logprobs=0, min_tokens=5, stop_token_ids=(1, 2, 3)),
    SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    def make(family: str) -> Any:
        path: Path = tmp_path_factory.mktemp(family)
        save_random(path, family, **FAMILIES[family])
        return build(path)

    return {family: make(family) for family in FAMILIES}


def requests() -> list[list[tuple[list[int], SamplingParams]]]:
    """Rounds of requests with shared prefixes and every kind of sampling, more than fit at a time."""
    shared = random_tokens(31, 20)
    prompts = [random_tokens(28 + n, 21 + n) for n in range(3)] + [shared, shared + [5, 6, 7], shared[:25]]
    first = list(zip(prompts[:4], SAMPLINGS[:4], strict=True))
    second = list(zip([*prompts[4:], random_tokens(40, 9), random_tokens(7, 10)], SAMPLINGS[4:], strict=True))
    return [first, second]


def check_same(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.tokens == other.tokens
        assert one.finish == other.finish
        for kind in ("logprobs", "prompt_logprobs"):
            for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True):
                assert (a.rank, a.top_ids) == (b.rank, b.top_ids)
                assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
                assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=2e-4)


@pytest.mark.parametrize(
    ("family", "run_ahead"), [("Llama", 0), ("Llama", 1), ("Llama", 2), ("Qwen3", 2), ("Gemma3", 1), ("GptOss", 2)]
)
def test_tokens_are_those_of_the_runner_of_cpus(family, run_ahead, models):
    size = EngineSize()
    core = make_engine(models[family], size, run_ahead, ops=reference_ops())
    runner = core.executor._runner
    mine = answer(core, requests())
    other = make_engine(models[family], size, run_ahead, ops=None)
    theirs = answer(other, requests())
    check_same(mine, theirs)
    # What this is about has happened.
    assert core.scheduler.stats.preemptions > 0
    assert other.scheduler.stats.preemptions > 0
    assert max(one.cached for one in mine) >= 24
    assert sum(len(one.logprobs) for one in mine) > 20
    assert len(mine[-1].prompt_logprobs) == 6
    assert set(runner.fallbacks) == {"prompt log-probabilities"}


SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
    seed=st.integers(0, (1 << 64) - 1),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logprobs=st.sampled_from([None, None, 0, 4]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, VOCABULARY, 9))]),
)


def check_random_schedules(model, requests, family_size, run_ahead):
    rounds = [[(random_tokens(40, start % 3)[: 3 + length], one) for start, length, one in part] for part in requests]
    mine = answer(make_engine(model, family_size, run_ahead, ops=reference_ops()), rounds)
    theirs = answer(make_engine(model, family_size, run_ahead, ops=None), rounds)
    check_same(mine, theirs)


REQUESTS = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 37), SAMPLING), min_size=1, max_size=4), min_size=1, max_size=3
)
SIZES = st.builds(
    EngineSize,
    pages=st.sampled_from([34, 50, 90]),
    page_size=st.just(2),
    chunk_tokens=st.sampled_from([3, 16, 64]),
    max_batch=st.sampled_from([1, 3, 4]),
)


@settings(max_examples=4, deadline=None)
@given(requests=REQUESTS, size=SIZES, run_ahead=st.integers(0, 2))
def test_random_schedules(models, requests, size, run_ahead):
    check_random_schedules(models["Llama"], requests, size, run_ahead)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(requests=REQUESTS, size=SIZES, run_ahead=st.integers(0, 2))
def test_more_random_schedules(models, requests, size, run_ahead):
    check_random_schedules(models["Gemma3"], requests, size, run_ahead)


class NoReads(TorchDispatchMode):
    """Fails on every operation that makes the host wait for the device."""

    WAITS = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique",
        "repeat_interleave",
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        name = func.name().removeprefix("aten::").split(".")[0]
        assert name not in self.WAITS, f"{name} waits for the device"
        indices = [part for part in args[1] if part is not None] if name == "index" else []
        assert all(part.dtype != torch.bool for part in indices), "indexing by a mask waits for the device"
        return func(*args, **(kwargs or {}))


def begun(models, max_batch: int = 5, settings: list[SlotSampling] | None = None) -> DeviceRunner:
    """A runner with `len(settings)` requests."""
    _, runner = make_runner(models["Qwen3"], EngineSize(pages=64, max_batch=max_batch), reference_ops())
    assert isinstance(runner, DeviceRunner)
    begin(runner, settings or [SlotSampling(0.0, 0, 1.0, 0, -1)] * max_batch)
    return runner


ALL_KINDS = [
    SlotSampling(0.0, 0, 1.0, 0, -1),
    SlotSampling(0.7, 0, 1.0, 3, 2),
    SlotSampling(0.9, 5, 0.8, 4, 0, min_p=0.01),
    SlotSampling(0.0, 0, 1.0, 0, -1, repetition_penalty=1.2, logit_bias=((4, 1.0),), banned=(9,), banned_until=99),
]


@pytest.mark.parametrize("chunks", [False, True])
def test_launches_ask_the_device_nothing(models, monkeypatch, chunks):
    runner = begun(models, settings=ALL_KINDS)
    new = random_tokens(15, 99)
    for name in ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, what=name, **__: pytest.fail(f"Tensor.{what}"))
    pending = []
    with NoReads() as watch:
        for step in range(3):
            chunk = PrefillChunk(4, 5 * step, new[5 * step : 5 * step + 5], step == 2)
            begins = [(4, ALL_KINDS[1])] if step == 0 else []
            pages = [(4, 0, list(range(48, 60)))] if step == 0 else []
            given = [begins, pages, [chunk]] if chunks else [[], [], []]
            pending.append(runner.launch(StepPlan(9 + step, *given, [0, 1, 2, 3])))
    assert watch.calls > 500
    monkeypatch.undo()
    results = [one.wait() for one in pending]
    assert [len(result.tokens) for result in results] == ([4, 4, 5] if chunks else [4, 4, 4])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_rehearsals_write_changes_no_answer(models, family):
    """The same steps as on a GPU in tests/gpu/test_gpu_engine.py, bit for bit."""
    runners = []
    for bodies in (RehearsedBodies(), EagerBodies()):
        _, runner = make_runner(models[family], EngineSize(pages=64, max_batch=5), reference_ops(), bodies=bodies)
        begin(runner, ALL_KINDS)
        runners.append(runner)
    for step, slots in enumerate([[0], [1, 0], [3, 2, 1], [0], [2], [0, 1, 2, 3], [3, 2, 1, 0]]):
        mine, theirs = (runner.run(StepPlan(9 + step, [], [], [], slots)) for runner in runners)
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == theirs.logprobs


def test_padding_rows_touch_no_real_page(models):
    """Five requests run as five of eight rows would; here three of four: the fourth row leaves no trace."""
    assert [padded_requests(n, 6) for n in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    runner = begun(models)
    pools = runner.kv.keys + runner.kv.values
    before = [pool.clone() for pool in pools]
    lengths = runner._state.lengths_T.clone()
    runner.run(StepPlan(9, [], [], [], [4, 0, 2]))
    assert runner._lists.tensor(4).tolist() == [4, 0, 2, 5]
    after = runner._state.lengths_T
    assert (after - lengths).tolist() == [1, 0, 1, 0, 1, 0]
    page_size, padding = runner.kv.layout.page_size, runner.kv.layout.padding_page
    for old, new in zip(before, pools, strict=True):
        changed = ((old != new) & ~(old.isnan() & new.isnan())).flatten(1).any(1).nonzero()[:, 0]
        pages = {int(slot) // page_size for slot in changed}
        # Request n has 10 + n tokens, so its next token lies in its page (10 + n) // 2; pages are numbered downwards.
        assert pages - {padding} == {slot * 12 + 11 - (10 + slot) // page_size for slot in (4, 0, 2)}


def test_a_row_that_is_not_numbers_is_said_to_be_broken(models):
    runner = begun(models)
    runner.kv.keys[0][11 * runner.kv.layout.page_size] = float("nan")
    result = runner.run(StepPlan(9, [], [], [], [0, 1]))
    assert (result.bad_slots, result.counts, len(result.tokens)) == ([0], [0, 1], 1)
    # Its neighbours and later steps still work: nothing was looked up by a broken token.
    assert len(runner.run(StepPlan(10, [], [], [], [0, 1, 2])).tokens) == 2


def test_greedy_steps_pay_for_nothing(models):
    runner = begun(models, settings=ALL_KINDS)
    assert runner._slots.mode([0]) == SamplingMode()
    assert runner._slots.mode([0, 1]) == SamplingMode(draws=True, logprobs=5)
    assert runner._slots.mode([2]) == SamplingMode(draws=True, filters=True, logprobs=0)
    assert runner._slots.mode([3, 0]) == SamplingMode(rules=True)
