"""Logits that are not numbers end the request that has them, and no other; nothing of it reaches the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lowlat.engine.batch import SlotSampling
from lowlat.engine.build import build_engine
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from lowlat.engine.sampler import sample_bursts

BROKEN = 13
"""A token whose embedding is NaN, as a broken weight would make it: so are its row's keys, values and logits."""
VOCABULARY = 97
ANSWER = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("broken")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = float("nan")
    model.save_pretrained(path)
    return path


@pytest.fixture(params=[{}, {"spec": "ngram"}, {"tensor_parallel": 2}], ids=["plain", "ngram", "two ranks"])
def core(folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    config = EngineConfig(
        model=str(folder),
        page_size=4,
        kv_tokens=512,
        max_batch=8,
        chunk_tokens=16,
        threads=1,
        low_latency="off",
        **request.param,
    )
    core, _, _ = build_engine(config, lambda *_: None)
    yield core
    core.close()


def ask(name: str, prompt: list[int], **fields: Any) -> GenerateRequest:
    """Greedy, and never the broken token of its own accord."""
    bias = fields.pop("logit_bias", ((BROKEN, -100.0),))
    sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logit_bias=bias, **fields)
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling)


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.id: [] for request in requests}
    for request in requests:
        core.submit(request)
    for _ in range(2000):
        for output in core.turn():
            outputs[output.id].append(output)
        core.scheduler.check()
        if not core.has_work:
            return outputs
    raise AssertionError("the engine does not come to rest")


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def some_tokens(count: int, seed: int) -> list[int]:
    """A few words again and again, so that n-grams guess; never the broken one."""
    words = torch.randint(BROKEN + 1, VOCABULARY, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (words * count)[:count]


def check_failed(outputs: list[RequestOutput]) -> None:
    last = outputs[-1]
    assert last.finish_reason is FinishReason.ERROR
    assert "NaN" in (last.error or "")
    assert all(output.finish_reason is None for output in outputs[:-1])


def test_one_request_fails_and_the_others_go_on(core: EngineCore):
    good = [ask(f"good{number}", some_tokens(20 + number, number)) for number in range(3)]
    alone = {request.id: tokens_of(run(core, request)[request.id]) for request in good}
    before = core.stats().bad_logits
    # In the prompt; in a prompt longer than a chunk; in the answer, where the bias puts it at some place.
    broken = [
        ask("prompt", [*some_tokens(9, 5), BROKEN]),
        ask("chunk", [*some_tokens(5, 6), BROKEN, *some_tokens(30, 7)]),
        ask("answer", some_tokens(11, 8), logit_bias=((BROKEN, 100.0),)),
        ask("scored", [BROKEN, *some_tokens(5, 9)], prompt_logprobs=1),
    ]
    outputs = run(core, good[0], *broken[:2], good[1], *broken[2:], good[2])
    for request in good:
        assert tokens_of(outputs[request.id]) == alone[request.id]
        assert outputs[request.id][-1].finish_reason is FinishReason.LENGTH
        assert len(alone[request.id]) == ANSWER
    for request in broken:
        check_failed(outputs[request.id])
    assert tokens_of(outputs["prompt"]) == tokens_of(outputs["chunk"]) == tokens_of(outputs["scored"]) == []
    assert tokens_of(outputs["answer"]) == [BROKEN]
    stats = core.stats()
    assert stats.bad_logits == before + 4
    assert stats.pages_held == 0
    assert (stats.guessed_tokens > 0) == (core.scheduler.width > 1)


def test_nothing_broken_is_cached(core: EngineCore):
    prefix = some_tokens(12, 10)
    broken = ask("broken", [*prefix, BROKEN, *some_tokens(12, 11)])
    check_failed(run(core, broken)["broken"])
    assert core.stats().pages_cached == 0
    # The same again finds nothing of the first, and prompts that share its good part are as good as alone.
    again = ask("again", broken.prompt_ids)
    outputs = run(core, again, ask("good", [*prefix, *some_tokens(8, 12)]))
    check_failed(outputs["again"])
    assert len(tokens_of(outputs["good"])) == ANSWER
    later = run(core, ask("later", [*prefix, *some_tokens(8, 12)]))["later"]
    assert tokens_of(later) == tokens_of(outputs["good"])
    assert max(output.cached_tokens for output in later) >= 12
    # What the prompt left before the answer broke may be used.
    prompt = some_tokens(13, 13)
    check_failed(run(core, ask("ends badly", prompt, logit_bias=((BROKEN, 100.0),)))["ends badly"])
    after = run(core, ask("after", prompt))["after"]
    assert max(output.cached_tokens for output in after) == 12
    assert len(tokens_of(after)) == ANSWER


def test_guesses_that_were_wrong_may_be_anything():
    """Rows: one request of three rows whose second guess is wrong, and one that breaks at a row it needs."""
    logits = torch.zeros(6, 8)
    logits[0, 3] = logits[1, 5] = logits[3, 2] = 1.0
    logits[2] = float("nan")
    logits[4] = float("nan")
    setting = SlotSampling(0.0, 0, 1.0, 0, 0)
    bursts, entries = sample_bursts(logits, [setting, setting], [4, 9], None, [[3, 1], [2, 6]])
    assert bursts == [[3, 5], []]
    assert entries is not None
    assert len(entries) == 2, "one entry a token"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_finite_best_logit_have_no_token(value: float):
    logits = torch.zeros(2, 8)
    logits[1] = value
    setting = SlotSampling(0.7, 0, 1.0, 0, -1)
    bursts, _ = sample_bursts(logits, [setting, setting], [0, 0], None, [[], []])
    assert len(bursts[0]) == 1
    assert bursts[1] == []
