"""Sampling options on their way from a body to the engine."""

from lowlat.engine.request import SamplingParams
from lowlat.server.plan import GREEDY_BELOW, derived_seed, sampling_params
from lowlat.server.requests import CompletionRequest


def test_small_temperatures_are_greedy_and_edge_filters_have_one_meaning():
    def params(**fields):
        return sampling_params(CompletionRequest(prompt="x", **fields), None, (), 100)

    assert params(temperature=GREEDY_BELOW / 2).temperature == 0
    assert params(temperature=GREEDY_BELOW).temperature == GREEDY_BELOW
    assert params().temperature == 1
    assert (params(top_p=0).top_k, params(top_p=0).top_p) == (1, 1)
    assert params(top_k=-1).top_k == 0
    assert params(top_k=1000).top_k == 100
    assert params(seed=-1).seed == 2**63 - 1


def test_every_sampling_option_reaches_the_engine():
    body = CompletionRequest(
        prompt="x",
        min_tokens=2,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={"7": -100, "9": 5, "007": 3},
        prompt_logprobs=1,
    )
    params = sampling_params(body, 4, (3,), 100, echo=True)
    assert (params.min_tokens, params.min_p, params.repetition_penalty) == (2, 0.1, 1.2)
    assert (params.presence_penalty, params.frequency_penalty) == (-0.5, 0.25)
    assert dict(params.logit_bias) == {7: 3, 9: 5}
    assert params.prompt_logprobs == 4
    assert sampling_params(body, 4, (3,), 100).prompt_logprobs == 1
    plain = sampling_params(CompletionRequest(prompt="x"), None, (), 100)
    assert plain == SamplingParams(temperature=1.0)


def test_derived_seeds_differ_and_repeat():
    seeds = {derived_seed(7, choice) for choice in range(1, 100)}
    assert len(seeds) == 99
    assert seeds == {derived_seed(7, choice) for choice in range(1, 100)}
    assert all(0 <= seed < 2**63 for seed in seeds)
