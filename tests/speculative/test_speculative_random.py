"""Random crowds, settings and proposers, on the host and on a CPU that says it is a device: answers are those without.

Requests come late, are cancelled, run into the end of the context, decline guesses, and come again to a full cache.
`make soak` draws many more.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from spec_kit import PROPOSERS, SETTINGS, VOCABULARY

from lowlat.engine import build
from lowlat.engine.request import GenerateRequest, SamplingParams, TokenLogprobs
from lowlat.offline import Engine
from lowlat.platform import select
from lowlat.platform.cpu import CpuPlatform

CONTEXT = 160
PLAIN = SETTINGS | {"max_batch": 1}
Answer = tuple[list[int], list[TokenLogprobs]]


class KeepingPlatform(CpuPlatform):
    keeps_state = True


def some(chance: random.Random, part: float, options: dict[str, Any]) -> dict[str, Any]:
    return options if chance.random() < part else {}


def requests(chance: random.Random) -> list[GenerateRequest]:
    """A crowd, half of it with the same beginning."""
    shared = chance.choices(range(VOCABULARY), k=40) * 4
    found = []
    for number in range(chance.randint(1, 8)):
        length = chance.choice([1, 2, 3, 5, 17, 40, 100, 150, 158, 159])
        prompt = chance.choice([shared[:length], chance.choices(range(VOCABULARY), k=length)])
        tokens = min(chance.choice([1, 2, 3, 7, 20, CONTEXT]), CONTEXT - length)
        options: dict[str, Any] = {"temperature": chance.choice([0, 0, 0.3, 0.7, 1.0]), "seed": chance.randrange(99)}
        options |= some(chance, 0.3, {"top_k": chance.choice([1, 3, 20])})
        options |= some(chance, 0.3, {"top_p": chance.choice([0.0, 0.5, 0.9])}) | some(chance, 0.2, {"min_p": 0.05})
        options |= some(chance, 0.2, {"repetition_penalty": 1.1, "presence_penalty": 0.3})
        options |= some(chance, 0.2, {"frequency_penalty": 0.4})
        options |= some(chance, 0.2, {"logit_bias": ((chance.randrange(VOCABULARY), 3.0),)})
        stops = {"stop_token_ids": tuple(chance.sample(range(VOCABULARY), 8)), "min_tokens": min(3, tokens)}
        options |= (
            some(chance, 0.3, stops) | some(chance, 0.2, {"logprobs": 2}) | some(chance, 0.15, {"speculate": False})
        )
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, **options)
        priority = chance.choice([0, 0, 1, 2])
        found.append(GenerateRequest(id=f"r{number}", prompt_ids=prompt, sampling=sampling, priority=priority))
    return found


def engine_settings(chance: random.Random) -> dict[str, Any]:
    return SETTINGS | {
        "page_size": chance.choice([1, 4, 16]),
        "chunk_tokens": chance.choice([4, 8, 64]),
        "kv_tokens": chance.choice([176, 256, 512, 2048]),
        "max_batch": chance.choice([1, 2, 4, 8]),
        "run_ahead": chance.choice([0, 1, 2, 3]),
        "prefix_cache": chance.random() < 0.8,
        "spec_width": chance.choice([None, 2, 3, 5, 8, 16]),
    }


def run(engine: Engine, crowd: list[GenerateRequest], chance: random.Random, cancels: float) -> dict[str, Answer]:
    """Answers by request, of those that were not cancelled."""
    core, todo, cancelled = engine._core, list(crowd), set()
    answers: dict[str, Answer] = {}
    while todo or core.has_work:
        if todo and chance.random() < 0.6:
            core.submit(todo.pop(0))
        if chance.random() < cancels:
            victim = chance.choice(crowd).id
            if core.abort(victim):
                cancelled.add(victim)
        for output in core.turn():
            assert output.error is None
            tokens, entries = answers.setdefault(output.id, ([], []))
            tokens += output.token_ids
            entries += output.logprobs or []
        core.scheduler.check()
    assert core.scheduler.cache.pool.held == 0
    return {id: answer for id, answer in answers.items() if id not in cancelled}


def check(seed: int, target: Path, options: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    crowd, settings = requests(chance), engine_settings(chance) | options[chance.choice(PROPOSERS)]
    monkeypatch.setattr(build, "select", select)
    with Engine(model=str(target), **PLAIN) as engine:
        expected = run(engine, crowd, chance, 0.0)
    if chance.random() < 0.6:
        monkeypatch.setattr(build, "select", lambda device, rank=0: KeepingPlatform())
    with Engine(model=str(target), **settings) as engine:
        for cancels in (0.0, 0.05):
            for id, (tokens, entries) in run(engine, crowd, chance, cancels).items():
                assert tokens == expected[id][0], (seed, settings, id)
                logprobs = [entry.logprob for entry in expected[id][1]]
                assert [entry.logprob for entry in entries] == pytest.approx(logprobs, abs=1e-3), (seed, settings, id)


def test_answers_are_those_without(target: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    for seed in range(8):
        check(seed, target, options, monkeypatch)


@pytest.mark.slow
def test_many_answers_are_those_without(target: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    for seed in range(1000, 1300):
        check(seed, target, options, monkeypatch)
