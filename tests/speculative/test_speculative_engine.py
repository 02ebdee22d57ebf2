"""Every proposer in the engine: answers are token for token those without, whatever happens to the requests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from spec_kit import SETTINGS, crowd, run_all, save_target

from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def expected(target: Path) -> dict[str, list[int]]:
    with Engine(model=str(target), **SETTINGS) as engine:
        answers = run_all(engine, crowd())
        assert {len(answer) for answer in answers.values()} == {40}
        return answers


PROPOSERS = ["ngram"]


def options(spec: str) -> dict:
    return {"spec": spec}


@pytest.mark.parametrize("width", [4, None])
@pytest.mark.parametrize("spec", PROPOSERS)
def test_answers_are_those_without(target: Path, expected: dict[str, list[int]], spec: str, width: int | None):
    """Chunked prefill, prefix hits, more requests than slots, and again with everything cached."""
    with Engine(model=str(target), spec_width=width, **options(spec), **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        stats = engine._core.stats()
        assert stats.cached_tokens > 100
        if width:
            assert stats.guessed_tokens > stats.accepted_tokens > 0
            assert stats.tokens_per_step > 1


@pytest.mark.parametrize("spec", PROPOSERS)
def test_a_small_pool_and_cancels_change_nothing(target: Path, expected: dict[str, list[int]], spec: str):
    """Requests of higher priority push others out; one is cancelled in the middle."""
    settings = SETTINGS | {"kv_tokens": 200, "run_ahead": 2, "max_batch": 3}
    requests = crowd()
    late = [msgspec.structs.replace(request, priority=2) for request in requests[4:]]
    doomed = msgspec.structs.replace(requests[3], id="doomed")
    with Engine(model=str(target), spec_width=5, **options(spec), **settings) as engine:
        engine._core.submit(doomed)
        for _ in range(6):
            engine._core.turn(10)
        engine._core.abort("doomed")
        answers = run_all(engine, requests[:4], late)
        answers.pop("doomed", None)
        assert answers == expected
        assert engine._core.stats().preemptions > 0


@pytest.mark.parametrize("spec", PROPOSERS)
def test_two_ranks_agree(target: Path, expected: dict[str, list[int]], spec: str):
    with Engine(model=str(target), tensor_parallel=2, spec_width=4, **options(spec), **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().accepted_tokens > 0


def test_simulated_acceptance_is_exact_and_labelled(target: Path):
    settings = SETTINGS | {"spec": "ngram", "spec_width": 6, "spec_simulate_acceptance": 3.51}
    with Engine(model=str(target), **settings) as engine:
        sampling = SamplingParams(max_tokens=140, temperature=0, ignore_eos=True, logprobs=1)
        first = engine.generate([5, 6, 7], sampling)
        assert len(first.token_ids) == len(first.logprobs) == 140
        report = engine.speculation()
        assert report.simulated_acceptance == 3.51
        assert report.tokens_per_step == pytest.approx(3.51, abs=0.1)
        assert report.break_even > 0
        assert engine.generate([5, 6, 7], sampling).token_ids == first.token_ids
