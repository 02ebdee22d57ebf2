"""DeepSeek-V4.1 in the engine: exact prefix hits from snapshots, chunked prefill, preemption, tensor parallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepseek_kit import Runner, load, some_tokens

from lowlat.engine.build import SetupError, build_engine
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.models.config import UnsupportedModelError
from lowlat.platform.cpu import CpuPlatform
from lowlat.speculative.proposer import DraftRequest, Proposal

COUNT = 8


def greedy(name: str, prompt: list[int], **fields: int) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    return GenerateRequest(id=name, prompt_ids=prompt, sampling=sampling, **fields)  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[GenerateRequest], late: list[GenerateRequest]) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    for request in requests:
        core.submit(request)
    for turn in range(1000):
        if turn == 5:
            for request in late:
                core.submit(request)
        for output in core.turn():
            answers.setdefault(output.id, []).extend(output.token_ids)
        core.scheduler.check()
        if not core.has_work:
            return answers
    raise AssertionError("the engine does not come to rest")


def make(path: Path, **fields: object) -> EngineCore:
    settings = {"max_batch": 3, "kv_tokens": 208, "chunk_tokens": 24, "dtype": "bfloat16"} | fields
    return build_engine(EngineConfig(model=str(path), **settings), lambda *_: None)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(tiny_v41: Path) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Prompts and the answers of lone requests."""
    model = load(tiny_v41, draft=False)
    prompts = {f"r{i}": some_tokens(length, seed=70 + i) for i, length in enumerate((61, 5, 40, 90))}
    answers = {}
    for turn in range(2):
        for name, prompt in list(prompts.items()):
            if turn and not name.endswith(("0", "2")):
                continue
            name += "t" if turn else ""
            if turn:
                prompts[name] = prompt = [*prompt, *answers[name[:-1]], 7, 8, 9]
            runner, tokens = Runner(model), list(prompt)
            logits = runner.prefill(0, tokens)
            for _ in range(COUNT):
                tokens.append(int(logits[-1].float().argmax()))
                logits = runner.run(runner.rows(0, tokens[-1:], len(tokens) - 1))
            answers[name] = tokens[len(prompt) :]
    return prompts, answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_equal_lone_requests_with_hits_and_preemption(
    tiny_v41: Path, expected: tuple[dict[str, list[int]], dict[str, list[int]]], ranks: int
) -> None:
    prompts, answers = expected
    core = make(tiny_v41, tensor_parallel=ranks, threads=1)
    try:
        stats = core.scheduler.stats
        assert run(core, [greedy("r0", prompts["r0"])], [])["r0"] == answers["r0"]
        assert stats.cached_tokens == 0
        assert run(core, [greedy("r0", prompts["r0"])], [])["r0"] == answers["r0"]
        assert stats.cached_tokens == 48, "the prompt's whole pages"
        assert run(core, [greedy("r0t", prompts["r0t"])], [])["r0t"] == answers["r0t"]
        assert stats.cached_tokens == 48 + 64, "prompt and answer: 61 + 7 computed tokens, in whole pages"
        names = ("r0", "r1", "r2")
        found = run(core, [greedy(name, prompts[name]) for name in names], [greedy("r3", prompts["r3"], priority=3)])
        assert found == {name: answers[name] for name in (*names, "r3")}
        assert stats.preemptions > 0
        assert run(core, [greedy("r2t", prompts["r2t"])], [])["r2t"] == answers["r2t"]
    finally:
        core.close()


@pytest.mark.parametrize(("spec", "ranks"), [("draft", 1), ("draft", 2), ("ngram", 1)])
def test_speculation_changes_no_answer_across_hits_and_preemption(
    tiny_v41: Path, expected: tuple[dict[str, list[int]], dict[str, list[int]]], spec: str, ranks: int
) -> None:
    prompts, answers = expected
    core = make(tiny_v41, spec=spec, spec_width=6, tensor_parallel=ranks, threads=1)
    try:
        stats = core.scheduler.stats
        assert run(core, [greedy("r0", prompts["r0"])], [])["r0"] == answers["r0"]
        assert run(core, [greedy("r0", prompts["r0"])], [])["r0"] == answers["r0"]
        assert stats.cached_tokens == 48
        assert run(core, [greedy("r0t", prompts["r0t"])], [])["r0t"] == answers["r0t"]
        assert stats.cached_tokens == 48 + 64
        names = ("r0", "r1", "r2")
        found = run(core, [greedy(name, prompts[name]) for name in names], [greedy("r3", prompts["r3"], priority=3)])
        assert found == {name: answers[name] for name in (*names, "r3")}
        assert stats.preemptions > 0
        assert run(core, [greedy("r2t", prompts["r2t"])], [])["r2t"] == answers["r2t"]
        if spec == "draft":
            assert stats.guessed_tokens > 100
    finally:
        core.close()


class KnowingDraft:
    """Proposes what a lone request said, with a fault here and there: acceptance of every length."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers, self.calls = answers, 0

    def __call__(self, requests: list[DraftRequest], caches: object) -> list[Proposal]:
        proposals = []
        for request in requests:
            self.calls += 1
            known = self.answers[request.state]
            block = (known[request.length + 1 :] + [9] * 5)[:5]
            if self.calls % 6 < 5:
                block[self.calls % 6] = (block[self.calls % 6] + 1) % 190
            proposals.append(Proposal(block))
        return proposals


def test_snapshots_are_right_when_drafts_are_accepted(tiny_v41: Path) -> None:
    """With most drafts accepted, pages end inside a step; what is resumed there equals what is computed anew."""
    model = load(tiny_v41, draft=False)
    prompt = some_tokens(37, seed=90)
    runner, tokens = Runner(model), list(prompt)
    logits = runner.prefill(0, tokens)
    for _ in range(75):
        tokens.append(int(logits[-1].float().argmax()))
        logits = runner.run(runner.rows(0, tokens[-1:], len(tokens) - 1))
    core = make(tiny_v41, spec="draft", spec_width=6, max_batch=1)
    try:
        served = core.executor.run.__self__.model  # the runner's model
        served.propose = KnowingDraft({0: tokens})
        stats = core.scheduler.stats
        for length in (50, 60, 71):
            before = stats.cached_tokens, stats.accepted_tokens
            sampling = SamplingParams(temperature=0.0, max_tokens=length - 37, ignore_eos=True)
            request = GenerateRequest(id=f"n{length}", prompt_ids=prompt, sampling=sampling)
            assert run(core, [request], [])[request.id] == tokens[37:length]
            assert stats.accepted_tokens > before[1] + 3
            sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            request = GenerateRequest(id=f"m{length}", prompt_ids=tokens[:length], sampling=sampling)
            before = stats.cached_tokens, stats.accepted_tokens
            assert run(core, [request], [])[request.id] == tokens[length : length + 30]
            assert stats.cached_tokens - before[0] == (length - 1) // 16 * 16
    finally:
        core.close()


@pytest.mark.parametrize(
    ("wanted", "memory", "found"),
    [("auto", 1 << 33, "shards"), ("auto", 1 << 20, "host"), ("peer", 0, "peer"), ("host", 1 << 33, "host")],
)
def test_engram_lies_where_the_flag_and_the_memory_say(
    tiny_v41: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, memory: int, found: str
) -> None:
    monkeypatch.setattr(CpuPlatform, "memory_available", lambda self: memory)
    core = make(tiny_v41, engram_placement=wanted)
    try:
        model = core.executor.run.__self__.model
        assert model.engram_placement == found
        tables = {type(engram.table).__name__ for engram in model.model.engrams.values()}
        assert tables == {{"shards": "ShardedTable", "peer": "PeerTable", "host": "HostTable"}[found]}
    finally:
        core.close()


def scores(core: EngineCore, request: GenerateRequest) -> tuple[list[float], list[float]]:
    """Log-probabilities of the prompt's tokens (where asked) and of the answer's."""
    core.submit(request)
    prompt, answer = [], []
    while core.has_work:
        for output in core.turn():
            prompt += [entry.logprob for entry in output.prompt_logprobs or []]
            answer += [entry.logprob for entry in output.logprobs or []]
    return prompt, answer


def test_decoder_replay_spares_prompts_whose_log_probabilities_are_asked(tiny_v41: Path) -> None:
    prompt = some_tokens(150, seed=95)
    plain = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
    scored = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = {}
    for tail in (0, 31):
        core = make(tiny_v41, replay_tail=tail, chunk_tokens=100)
        try:
            found[tail] = scores(core, GenerateRequest(id="a", prompt_ids=prompt, sampling=plain, cache_salt="a"))
            found[tail] += scores(core, GenerateRequest(id="b", prompt_ids=prompt, sampling=scored, cache_salt="b"))
            assert core.scheduler.stats.cached_tokens == 0
        finally:
            core.close()
    assert found[31][2:] == found[0][2:], "asked for the prompt's log-probabilities, all rows run"
    assert found[0][1] == found[0][3]
    differences = [abs(a - b) for a, b in zip(found[31][1], found[0][1], strict=True)]
    assert 0 < max(differences) < 2, "replay must have left rows out, and change little"


def test_encoder_replay_uses_a_prefix_without_state(tiny_v41: Path) -> None:
    """Exact where the tokens that run again reach back far enough for all layers' windows (15 each)."""
    first = some_tokens(200, seed=96)
    second = [*first[:150], *some_tokens(30, seed=97)]
    found = {}
    for replay in (0, 96):
        core = make(tiny_v41, replay_prefix=replay, kv_tokens=512, spec="draft" if replay else "off")
        try:
            stats = core.scheduler.stats
            run(core, [greedy("first", first)], [])
            found[replay] = run(core, [greedy("second", second)], [])["second"]
            assert stats.cached_tokens == (144 if replay else 0)
            again = run(core, [greedy("again", second)], [])["again"]
            assert stats.cached_tokens == (144 if replay else 0) + 176, "what was replayed leaves its own state"
            assert again == found[replay]
        finally:
            core.close()
    assert found[96] == found[0]


def test_flags_of_other_models_are_refused(tiny_v4: Path, tiny_v41: Path) -> None:
    with pytest.raises(SetupError, match=r"--replay-tail 200: .* leave it out"):
        make(tiny_v4, dtype="float32", replay_tail=200)
    with pytest.raises(SetupError, match=r"--replay-prefix 200: .* leave it out"):
        make(tiny_v4, dtype="float32", replay_prefix=200)
    with pytest.raises(UnsupportedModelError, match="need 31 rows or more"):
        make(tiny_v41, replay_tail=30)
    with pytest.raises(UnsupportedModelError, match="a window needs 16 tokens or more"):
        make(tiny_v41, replay_prefix=15)
    with pytest.raises(SetupError, match="has no Engram tables; leave it out"):
        make(tiny_v4, dtype="float32", engram_placement="host")
    with pytest.raises(SetupError, match=r"--chunk-tokens 15: .* use 16 or more"):
        make(tiny_v4, dtype="float32", chunk_tokens=15)
