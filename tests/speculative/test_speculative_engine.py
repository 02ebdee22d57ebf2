"""Every proposer in the engine: answers are token for token those without, whatever happens to the requests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from spec_kit import (
    PROPOSERS,
    SETTINGS,
    VOCABULARY,
    broken_draft,
    crowd,
    draft_config,
    random_draft,
    random_network,
    run_all,
    save_target,
)

from lowlat.engine.build import SetupError
from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine
from lowlat.speculative.draft_files import save_draft
from tiny_tokenizer import byte_tokenizer


@pytest.mark.parametrize("width", [4, None])
@pytest.mark.parametrize("spec", PROPOSERS)
def test_answers_are_those_without(
    target: Path, expected: dict[str, list[int]], options: dict, spec: str, width: int | None
):
    """Chunked prefill, prefix hits, more requests than slots, and again with everything cached."""
    with Engine(model=str(target), spec_width=width, **options[spec], **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        stats = engine._core.stats()
        assert stats.cached_tokens > 100
        if width:
            assert stats.guessed_tokens > stats.accepted_tokens
            assert stats.guessed_tokens > (30 if spec == "ngram" else 200)
            if spec == "draft-model":
                assert stats.tokens_per_step > 1.2


@pytest.mark.parametrize("spec", PROPOSERS)
def test_a_small_pool_and_cancels_change_nothing(
    target: Path, expected: dict[str, list[int]], options: dict, spec: str
):
    """Requests of higher priority push others out; one is cancelled in the middle."""
    settings = SETTINGS | {"kv_tokens": 200, "run_ahead": 2, "max_batch": 3}
    requests = crowd()
    late = [msgspec.structs.replace(request, priority=2) for request in requests[4:]]
    doomed = msgspec.structs.replace(requests[3], id="doomed")
    with Engine(model=str(target), spec_width=5, **options[spec], **settings) as engine:
        engine._core.submit(doomed)
        for _ in range(6):
            engine._core.turn()
        engine._core.abort("doomed")
        answers = run_all(engine, requests[:4], late)
        answers.pop("doomed", None)
        assert answers == expected
        assert engine._core.stats().preemptions > 0


@pytest.mark.parametrize("spec", ["dspark", "dflash2"])
def test_a_draft_without_numbers_changes_nothing(
    target: Path, expected: dict[str, list[int]], tmp_path: Path, spec: str
):
    draft = str(broken_draft(tmp_path, spec))
    with Engine(model=str(target), spec=spec, draft=draft, spec_width=4, **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().guessed_tokens > 200


@pytest.mark.parametrize("spec", PROPOSERS)
def test_the_first_request_of_all_may_decline(target: Path, expected: dict[str, list[int]], options: dict, spec: str):
    """Nothing is known of its slot then."""
    declined = next(request for request in crowd() if not request.sampling.speculate)
    with Engine(model=str(target), **options[spec], **SETTINGS) as engine:
        assert run_all(engine, [declined]) == {declined.id: expected[declined.id]}
        assert engine._core.stats().guessed_tokens == 0


@pytest.mark.parametrize(("spec", "width", "least"), [("ngram", 4, 10), ("dspark", 4, 100), ("draft-model", None, 1)])
def test_two_ranks_agree(
    target: Path, expected: dict[str, list[int]], options: dict, spec: str, width: int | None, least: int
):
    """Where the width adapts, rank 0's clock decides how many guesses each request gets."""
    with Engine(model=str(target), tensor_parallel=2, spec_width=width, **options[spec], **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().guessed_tokens >= least


def proposals_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Everything that a proposer proposes for prompts that run one after the other."""
    proposer = engine._core.executor.run.__self__.speculation._proposer
    seen: list[list[int]] = []
    propose = proposer.propose

    def recorded(requests):
        found = propose(requests)
        seen.extend([request.length, *of.tokens[: request.most]] for request, of in zip(requests, found, strict=True))
        return found

    proposer.propose = recorded
    for prompt in prompts:
        engine.generate(prompt, SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        while engine._core.has_work:
            engine._core.turn()
    proposer.propose = propose
    return seen


@pytest.mark.parametrize("spec", ["draft-model", "dflash", "dflash2", "dspark"])
def test_a_draft_guesses_the_same_after_a_prefix_hit(target: Path, options: dict, spec: str):
    """Its keys and values of reused pages, an answer's too, are those that it would compute anew."""
    first = [(3 * k) % VOCABULARY for k in range(23)]
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with Engine(model=str(target), spec_width=4, **options[spec], **SETTINGS) as engine:
        answer = engine.generate(first, sampling).token_ids
        while engine._core.has_work:  # a step launched ahead of the end
            engine._core.turn()
        prompts = [[*first, *answer, 5], [*first, *answer[:9]]]
        before = engine._core.stats().cached_tokens
        reused = proposals_of(engine, prompts)
        assert engine._core.stats().cached_tokens - before > 60
    with Engine(model=str(target), spec_width=4, prefix_cache=False, **options[spec], **SETTINGS) as engine:
        anew = proposals_of(engine, prompts)
    assert len(anew) > 10
    assert reused == anew


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spec": "dflash"}, "needs --draft PATH"),
        ({"spec": "ngram", "draft": "x"}, "leave it out"),
        ({"spec": "dspark", "draft": "dflash"}, "use --spec dflash"),
        ({"spec": "dflash", "draft": "small"}, "is no draft; known: DFlashDraftModel"),
        ({"spec": "dflash", "draft": "nowhere"}, "is no draft: .*train-draft"),
        ({"spec": "dflash", "draft": "narrow"}, "hidden_size 32, the model's is 64"),
        ({"spec": "dflash", "draft": "torn"}, "do not fit: .*norm"),
        ({"spec": "dflash", "draft": "strange"}, "draft_tokens are not tokens of the vocabulary"),
        ({"spec": "dflash", "draft": "dflash", "spec_simulate_acceptance": 5.5}, "choose a number between$"),
        ({"spec": "ngram", "spec_simulate_acceptance": 9.0}, "1 to 8 tokens; .*, or a --spec-width of up to 16$"),
        ({"spec": "draft-model", "draft": "other"}, "has 90 tokens and .* 101"),
        ({"spec": "draft-model", "draft": "short"}, "use --max-context 64 or less"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(target: Path, options: dict, tmp_path: Path, settings: dict, message: str):
    name = settings.get("draft", "")
    if name == "narrow":
        random_draft(tmp_path / name, "dflash", hidden_size=32)
    if name == "strange":
        config = draft_config("dflash", draft_vocab_size=60)
        tokens = {"draft_tokens": torch.arange(60) + VOCABULARY - 59}
        save_draft(tmp_path / name, config, random_network(config, 0).state_dict() | tokens)
    if name == "torn":
        config = draft_config("dflash")
        weights = random_network(config, 0).state_dict()
        weights.pop("norm.weight")
        save_draft(tmp_path / name, config, weights)
    if name in ("other", "short"):
        save_target(tmp_path / name, **({"vocab_size": 90} if name == "other" else {"max_position_embeddings": 64}))
    if name in ("dflash", "small"):
        (tmp_path / name).symlink_to(Path(options["dflash"]["draft"]).parent / name)
    if name:
        settings = settings | {"draft": str(tmp_path / name)}
    with pytest.raises(SetupError, match=message):
        Engine(model=str(target), **settings, **SETTINGS)


def test_simulated_acceptance_is_exact_and_labelled(target: Path):
    settings = SETTINGS | {"spec": "ngram", "spec_width": 6, "spec_simulate_acceptance": 3.51}
    with Engine(model=str(target), **settings) as engine:
        sampling = SamplingParams(max_tokens=140, temperature=0, ignore_eos=True, logprobs=1)
        first = engine.generate([5, 6, 7], sampling)
        assert len(first.token_ids) == len(first.logprobs) == 140
        timings = first.timings
        assert 0 < timings.gap_mean_ms * 139 <= 1e3 * (timings.total_s - timings.first_token_s), "of tokens, not steps"
        report = engine.speculation()
        assert report.simulated_acceptance == 3.51
        assert report.tokens_per_step == pytest.approx(3.51, abs=0.1)
        assert report.break_even > 0
        assert engine.generate([5, 6, 7], sampling).token_ids == first.token_ids


@pytest.mark.parametrize("spec", ["ngram", "dspark"])
def test_a_target_with_windows_answers_the_same(options: dict, tmp_path: Path, spec: str):
    """Layers with a window have pages of their own; guesses and prefix hits cross their edges."""
    torch.manual_seed(6)
    config = transformers.Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=160,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    with Engine(model=str(tmp_path), **SETTINGS) as engine:
        expected = run_all(engine, crowd())
    with Engine(model=str(tmp_path), spec_width=4, **options[spec], **SETTINGS) as engine:
        assert run_all(engine, crowd()) == expected
        assert run_all(engine, crowd()) == expected
        assert engine._core.stats().cached_tokens > 100
        assert engine._core.stats().guessed_tokens > 100
