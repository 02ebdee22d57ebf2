"""Grammars among the engine's other duties: batches, preemption, speculation, ranks, stops, limits of length."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from grammar_kit import EOS, OTHER_EOS, SETTINGS, byte_level, save_tiny
from lowlat import Engine, Grammar, SamplingParams
from lowlat.engine import build
from lowlat.platform.cpu import CpuPlatform
from tiny_tokenizer import byte_tokenizer

REGEX = Grammar("regex", "([a-d]{2} ){2,12}[x-z]")
WORDS = Grammar("regex", "(yes,|no,|maybe,){3,20}end")
CROWD: list[SamplingParams] = [
    SamplingParams(max_tokens=40, temperature=0, grammar=REGEX),
    SamplingParams(max_tokens=30, temperature=0),
    SamplingParams(max_tokens=60, seed=3, grammar=REGEX, logprobs=2),
    SamplingParams(max_tokens=30, seed=4),
    SamplingParams(max_tokens=60, seed=5, grammar=WORDS, presence_penalty=0.5, top_k=20),
    SamplingParams(max_tokens=60, temperature=0, grammar=WORDS),
    SamplingParams(max_tokens=60, seed=6, grammar=Grammar.choice(["a" * 30, "b" * 33])),
]
PROMPTS = [[(7 * n + k) % 250 for k in range(3 + 5 * n)] for n in range(len(CROWD))]


def crowd(engine: Engine) -> list[Any]:
    return [(one.token_ids, one.finish_reason, one.text) for one in engine.generate(PROMPTS, CROWD)]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Any]:
    """Each request by itself."""
    found = []
    for prompt, sampling in zip(PROMPTS, CROWD, strict=True):
        one = engine.generate(prompt, sampling)
        found.append((one.token_ids, one.finish_reason, one.text))
    return found


def test_an_answer_is_the_same_alone_and_in_a_batch(engine: Engine, alone: list[Any]):
    assert crowd(engine) == alone
    assert [finish for _, finish, _ in alone].count("stop") >= 4


def test_steps_are_launched_ahead_of_tokens_under_a_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    depths = []
    launch = engine._core.executor.launch

    def watch(plan: Any) -> None:
        depths.append(engine._core.scheduler.in_flight)
        launch(plan)

    monkeypatch.setattr(engine._core.executor, "launch", watch)
    engine.generate([[1, 2]] * 2, SamplingParams(max_tokens=30, seed=1, grammar=REGEX))
    assert max(depths) == 2


def test_preempted_requests_find_back_into_their_grammar(byte_folder: Path, alone: list[Any]):
    with Engine(model=str(byte_folder), **SETTINGS | {"kv_tokens": 112, "max_context": 100}) as engine:
        for grammar in (REGEX, WORDS, CROWD[-1].grammar):
            engine.generate([1], SamplingParams(max_tokens=1, grammar=grammar))
        # All grammars have compiled: nobody comes later than the others.
        assert crowd(engine) == alone
        assert engine._core.stats().preemptions > 0


def test_guesses_change_no_answer_and_some_are_right(byte_folder: Path, alone: list[Any]):
    settings = SETTINGS | {"spec": "ngram", "spec_width": 4}
    with Engine(model=str(byte_folder), **settings) as engine:
        assert crowd(engine) == alone
        engine.generate([1], SamplingParams(max_tokens=80, temperature=0, grammar=Grammar("regex", "(abc){20}")))
        assert engine._core.stats().accepted_tokens > 20


def test_rank_0_follows_the_grammar_for_two(byte_folder: Path):
    with Engine(model=str(byte_folder), **SETTINGS | {"tensor_parallel": 2}) as engine:
        texts = [text for _, _, text in crowd(engine)]
    # Sums are rounded differently on two ranks, so tokens may differ: the form may not.
    for sampling, text in zip(CROWD, texts, strict=True):
        if sampling.grammar in (REGEX, WORDS):
            assert re.fullmatch(sampling.grammar.text, text)
    assert re.fullmatch("a{30}|b{33}", texts[-1])


def test_min_tokens_and_ignore_eos_go_on_as_far_as_the_grammar_does(engine: Engine):
    def text(pattern: str, **fields: Any) -> str:
        likely_end = ((EOS, 100.0), (OTHER_EOS, 90.0))
        sampling = SamplingParams(max_tokens=30, grammar=Grammar("regex", pattern), logit_bias=likely_end, **fields)
        answer = engine.generate([1], sampling)
        assert answer.finish_reason == "stop"
        return answer.text

    assert text("a{1,9}") == "a"
    assert 5 <= len(text("[b-d]{1,9}", min_tokens=5)) <= 9
    assert text("aa", min_tokens=5) == "aa"
    assert len(text("[b-d]{1,9}", ignore_eos=True)) == 9
    assert text("aa", ignore_eos=True, min_tokens=2) == "aa"


def test_stops_end_an_answer_wherever_they_occur(engine: Engine):
    grammar = Grammar("regex", "[a-c]{4}x[a-c]{4}")
    sampling = SamplingParams(max_tokens=30, seed=1, grammar=grammar)
    by_text = engine.generate([1], sampling, stop=["x"])
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", "x")
    assert re.fullmatch("[a-c]{4}", by_text.text)
    by_id = engine.generate([1], SamplingParams(max_tokens=30, seed=1, grammar=grammar, stop_token_ids=(ord("x"),)))
    assert by_id.stop_reason == ord("x")
    assert by_id.token_ids == engine.generate([1], sampling).token_ids[: len(by_id.token_ids)]
    control = 299
    biased = SamplingParams(
        max_tokens=30, temperature=0, grammar=grammar, stop_token_ids=(control,), logit_bias=((control, 100.0),)
    )
    ended = engine.generate([1], biased)
    assert (ended.stop_reason, ended.token_ids[-1]) == (control, control)
    assert re.fullmatch(grammar.text, ended.text)


def test_log_probabilities_are_the_models_own(engine: Engine):
    answer = engine.generate([1], SamplingParams(max_tokens=9, seed=1, logprobs=3, grammar=Grammar.choice(["zzz"])))
    assert answer.text == "zzz"
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(entry.logprob < -0.01 and len(entry.top) == 3 for entry in answer.logprobs)


def test_without_an_end_token_a_complete_answer_ends(tmp_path: Path):
    with Engine(model=str(save_tiny(tmp_path, byte_level(), eos_token_id=None)), **SETTINGS) as engine:
        answers = engine.generate(
            [[1]] * 3,
            [
                SamplingParams(max_tokens=20, seed=1, grammar=Grammar.choice(["abc", "yes"])),
                SamplingParams(max_tokens=20, seed=1, grammar=Grammar("regex", "a{50}")),
                SamplingParams(max_tokens=20, seed=1, grammar=Grammar.choice([""])),
            ],
        )
        assert [answer.finish_reason for answer in answers] == ["stop", "length", "stop"]
        assert answers[0].text in ("abc", "yes")
        assert answers[2].token_ids == []
        plain = engine.generate([1], SamplingParams(max_tokens=5, temperature=0))
        assert len(plain.token_ids) == 5


def test_what_the_vocabulary_cannot_write_is_an_error(tmp_path: Path):
    folder = save_tiny(tmp_path, byte_tokenizer(90), vocab_size=96, eos_token_id=91)
    with Engine(model=str(folder), **SETTINGS) as engine:
        with pytest.raises(RuntimeError, match="vocabulary"):
            engine.generate([1], SamplingParams(max_tokens=20, seed=1, grammar=Grammar.choice(["a\u7fff"])))
        assert engine.generate([1], SamplingParams(max_tokens=9, grammar=Grammar.choice(["abc"]))).text == "abc"


def test_grammars_are_refused_where_answers_mean_nothing(byte_folder: Path):
    settings = SETTINGS | {"spec": "ngram", "spec_width": 4, "spec_simulate_acceptance": 2.0}
    refusal = pytest.raises(ValueError, match="spec-simulate-acceptance")
    with Engine(model=str(byte_folder), **settings) as engine, refusal:
        engine.generate([1], SamplingParams(max_tokens=9, grammar=REGEX))


class KeepingPlatform(CpuPlatform):
    keeps_state = True


def test_state_on_the_device_gives_way_to_a_grammar(
    byte_folder: Path, alone: list[Any], monkeypatch: pytest.MonkeyPatch
):
    runners: list[Any] = []
    original = build.prepare
    monkeypatch.setattr(build, "select", lambda device, rank: KeepingPlatform())
    monkeypatch.setattr(build, "prepare", lambda runner, *rest: runners.append(runner) or original(runner, *rest))
    with Engine(model=str(byte_folder), **SETTINGS) as engine:
        assert crowd(engine) == alone
    assert runners[0].fallbacks["grammar"] > 0
