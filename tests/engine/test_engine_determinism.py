"""One answer for one seed, whatever else happens; what prefix hits, edge values and end tokens may not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from kv_simulator import drain, make_core, make_request

from lowlat import Engine, SamplingParams
from lowlat.engine.request import FinishReason
from tiny_tokenizer import byte_tokenizer

VOCABULARY = 120
SETTINGS: dict[str, Any] = {"page_size": 4, "threads": 1, "low_latency": "off", "chunk_tokens": 24}
DRAWN = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny random model with two tokens that end an answer: its folder, and the model in transformers."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    (path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    return path, model


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(10, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("spec", ["off", "ngram"])
def test_a_seed_repeats_whatever_shares_the_batch(reference: tuple[Path, Any], spec: str):
    prompts = [(some_tokens(7, n) * 8)[: 20 + 5 * n] for n in range(5)]
    samplings = [msgspec.structs.replace(DRAWN, seed=n, temperature=0.3 * n) for n in range(5)]
    with Engine(model=str(reference[0]), kv_tokens=2048, prefix_cache=False, **SETTINGS) as engine:
        alone = [engine.generate(*one).token_ids for one in zip(prompts, samplings, strict=True)]
    # Together, in a pool that is too small for all, with a cache that is cold and then warm.
    with Engine(model=str(reference[0]), kv_tokens=220, spec=spec, **SETTINGS) as engine:
        for _ in range(2):
            for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
                answers = engine.generate([prompts[n] for n in order], [samplings[n] for n in order])
                assert [answer.token_ids for answer in answers] == [alone[n] for n in order]
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert (stats.guessed_tokens > 0) == (spec == "ngram")
    assert len({tuple(tokens) for tokens in alone}) == 5


def test_log_probabilities_on_a_prefix_hit(reference: tuple[Path, Any]):
    path, model = reference
    prompt = some_tokens(43, 7)
    sampling = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
    with Engine(model=str(path), kv_tokens=1024, **SETTINGS) as engine:
        cold, warm = engine.generate(prompt, sampling), engine.generate(prompt, sampling)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 40)
        scored = engine.generate(prompt, msgspec.structs.replace(sampling, prompt_logprobs=2))
        assert scored.usage.cached_tokens == 0, "a prompt that is scored is computed whole"
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + cold.token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    for answer in (cold, warm, scored):
        assert answer.token_ids == cold.token_ids
        for row, entry in enumerate(answer.logprobs or [], start=len(prompt) - 1):
            assert entry.logprob == pytest.approx(float(expected[row, entry.token_id]), abs=1e-4)
            best = expected[row].topk(3)
            assert [top.logprob for top in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(prompt) - 1
    for row, entry in enumerate(scored.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(expected[row, prompt[row + 1]]), abs=1e-4)


def test_edge_values_mean_the_most_likely_token(reference: tuple[Path, Any]):
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompt = some_tokens(9, 8)
    with Engine(model=str(reference[0]), kv_tokens=512, **SETTINGS) as engine:
        expected = engine.generate(prompt, greedy).token_ids
        for fields in ({"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-4}, {"temperature": 1e-30}):
            sampling = msgspec.structs.replace(greedy, **{"temperature": 2.0, "seed": 1, **fields})
            assert engine.generate(prompt, sampling).token_ids == expected, fields


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, float(value)) for field in ("temperature", "top_p", "min_p") for value in ("nan", "inf", "-inf")),
        *((field, float("nan")) for field in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("logprobs", -1),
        ("logit_bias", ((3, float("inf")),)),
        ("logit_bias", ((VOCABULARY, 1.0),)),
        ("stop_token_ids", (VOCABULARY,)),
    ],
)
def test_parameters_out_of_bounds_are_named(small: Engine, field: str, value: Any):
    with pytest.raises(ValueError, match=field):
        small.generate([1, 2], SamplingParams(**{field: value}))
    assert not small._core.has_work


@pytest.fixture(scope="module")
def small(reference: tuple[Path, Any]) -> Any:
    with Engine(model=str(reference[0]), kv_tokens=256, **SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize("end", [5, 9])
def test_each_end_token_ends_an_answer(small: Engine, end: int):
    prompt = some_tokens(6, 12)
    bias = ((end, 1000.0),)
    answer = small.generate(prompt, SamplingParams(max_tokens=8, logit_bias=bias))
    assert (answer.finish_reason, answer.token_ids) == ("stop", [end])
    on = small.generate(prompt, SamplingParams(max_tokens=8, logit_bias=bias, ignore_eos=True))
    assert (on.finish_reason, on.token_ids) == ("length", [end] * 8)
    later = small.generate(prompt, SamplingParams(max_tokens=8, logit_bias=bias, min_tokens=3))
    assert (later.finish_reason, len(later.token_ids), later.token_ids[-1]) == ("stop", 4, end)
    assert not {5, 9} & set(later.token_ids[:3]), "no end token before min_tokens, whichever it is"
    named = small.generate(
        prompt, SamplingParams(max_tokens=8, logit_bias=bias, ignore_eos=True, stop_token_ids=(end,))
    )
    assert (named.finish_reason, named.stop_reason) == ("stop", end)


@pytest.mark.parametrize("width", [1, 4])
def test_the_first_of_several_end_tokens_counts(width: int):
    core, device = make_core(width=width)
    core.scheduler.eos_ids = frozenset(range(0, 50, 7))
    core.submit(make_request("a", [1, 2, 3, 4, 5], 40))
    outputs = []
    while core.has_work:
        outputs.extend(core.turn())
    answer = [token for output in outputs for token in output.token_ids]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id == answer[-1]
    assert answer[-1] % 7 == 0
    assert all(token % 7 for token in answer[:-1])
    assert drain(core, device) == {}
