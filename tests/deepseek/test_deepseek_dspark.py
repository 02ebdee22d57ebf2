"""The DSpark draft against the reference, and speculation that needs no undo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepseek_kit import Runner, load, reference, some_tokens

from lowlat.models.deepseek_v4.dspark import DraftRequest
from lowlat.models.deepseek_v4.model import DeepseekV4


@pytest.fixture(scope="module")
def model(tiny_v41: Path) -> DeepseekV4:
    return load(tiny_v41)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("length", [1, 9, 40])
def test_the_draft_equals_the_reference(tiny_v41: Path, length: int, quantised: bool) -> None:
    tokens = some_tokens(length + 1, seed=length)
    ref = reference(tiny_v41, quantised=quantised)
    ref.forward(tokens[:length])
    h, base = ref.draft_block(ref.draft_context(), length, tokens[length])
    expected = ref.draft_tokens(h, base, tokens[length])
    model = load(tiny_v41, quantised=quantised, compute=torch.float64)
    assert model.draft is not None
    runner = Runner(model)
    runner.prefill(3, tokens[:length], [length // 2])
    request = DraftRequest(tokens[length], length, 3)
    np.testing.assert_allclose(model.draft.hidden([request], runner.caches)[0].numpy(), h, atol=1e-9)
    found = model.draft.propose([request], runner.caches)
    assert found.tokens[0].tolist() == expected[0]
    np.testing.assert_allclose(found.logits[0].numpy(), expected[1], atol=1e-9)
    np.testing.assert_allclose(found.confidence[0].numpy(), expected[2], atol=1e-9)
    assert 0.01 < found.confidence.min() < found.confidence.max() < 0.999


def test_requests_are_drafted_together_as_alone(model: DeepseekV4) -> None:
    assert model.draft is not None
    runner = Runner(model)
    prompts = [some_tokens(length, seed=length) for length in (3, 33, 20)]
    for state, prompt in enumerate(prompts):
        runner.prefill(state, prompt)
    requests = [DraftRequest(7 + state, len(prompt), state) for state, prompt in enumerate(prompts)]
    together = model.draft.propose(requests, runner.caches)
    for index, request in enumerate(requests):
        alone = model.draft.propose([request], runner.caches)
        assert torch.equal(alone.logits[0], together.logits[index])
        assert torch.equal(alone.confidence[0], together.confidence[index])


def greedy(model: DeepseekV4, prompt: list[int], count: int) -> list[int]:
    """Plain decoding, one row a step."""
    runner = Runner(model, seed=11)
    tokens = list(prompt)
    logits = runner.prefill(0, tokens)
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = runner.run(runner.rows(0, tokens[-1:], len(tokens) - 1))
    return tokens[len(prompt) :]


def speculate(model: DeepseekV4, prompt: list[int], count: int, wish: list[int] | None) -> tuple[list[int], list[int]]:
    """Greedy decoding with six-row verification; drafts are DSpark's, or right ones with a fault here and there.

    Returns the tokens and how many drafts each step accepted.
    """
    assert model.draft is not None
    runner = Runner(model, seed=12)
    tokens = list(prompt)
    logits = runner.prefill(1, tokens, [5])
    tokens.append(int(logits[-1].argmax()))
    accepted = []
    while len(tokens) < len(prompt) + count:
        length = len(tokens) - 1
        proposal = model.draft.propose([DraftRequest(tokens[-1], length, 1)], runner.caches)
        drafts = proposal.tokens[0].tolist()
        if wish is not None:
            done = len(tokens) - len(prompt)
            drafts = (wish[done : done + 5] + drafts)[:5]
            wrong = len(accepted) % 7
            if wrong < 5:
                drafts[wrong] = (drafts[wrong] + 1) % 190
        logits = runner.run(runner.rows(1, [tokens[-1], *drafts], length))
        best = logits.argmax(-1).tolist()
        matches = next((i for i, draft in enumerate(drafts) if draft != best[i]), len(drafts))
        accepted.append(matches)
        tokens += drafts[:matches] + [best[matches]]
    return tokens[len(prompt) :][:count], accepted


def test_greedy_speculation_equals_plain_greedy(model: DeepseekV4) -> None:
    """With drafts accepted in every number from none to all: windows, rings and histories need no undo."""
    prompt = some_tokens(37, seed=2)
    plain = greedy(model, prompt, 84)
    assert len(set(plain)) > 5, "the model must say something"
    spoken, accepted = speculate(model, prompt, 84, wish=plain)
    assert spoken == plain
    assert set(accepted) >= {0, 1, 2, 3, 4, 5}
    spoken, accepted = speculate(model, prompt, 40, wish=None)
    assert spoken == plain[:40]


def test_verify_rows_equal_decoding_bit_by_bit_also_after_a_rejection(model: DeepseekV4) -> None:
    tokens = some_tokens(60, seed=4)
    whole = Runner(model).prefill(0, tokens)
    runner = Runner(model, seed=3)
    runner.prefill(2, tokens[:41])
    assert torch.equal(runner.run(runner.rows(2, tokens[41:47], 41)), whole[41:47])
    noise = some_tokens(5, seed=99)
    runner.run(runner.rows(2, [tokens[47], *noise], 47))
    assert torch.equal(runner.run(runner.rows(2, tokens[48:54], 48)), whole[48:54])
    # What a rejection leaves behind equals a fresh state, for the draft as well.
    fresh = Runner(model, seed=8)
    fresh.prefill(0, tokens[:54])
    assert model.draft is not None
    one = model.draft.propose([DraftRequest(9, 54, 2)], runner.caches)
    other = model.draft.propose([DraftRequest(9, 54, 0)], fresh.caches)
    assert torch.equal(one.logits, other.logits)


def test_requests_run_together_as_alone(model: DeepseekV4) -> None:
    prompts = [some_tokens(length, seed=length) for length in (50, 7, 23)]
    alone = []
    for prompt in prompts:
        alone.append(Runner(model).prefill(0, prompt))
    runner = Runner(model, seed=4)
    first = runner.run(*(runner.rows(s, prompt[: len(prompt) // 2], 0) for s, prompt in enumerate(prompts)))
    second = runner.run(
        *(runner.rows(s, prompt[len(prompt) // 2 :], len(prompt) // 2) for s, prompt in enumerate(prompts))
    )
    at = [0, 0]
    for prompt, expected in zip(prompts, alone, strict=True):
        half = len(prompt) // 2
        assert torch.equal(first[at[0] : at[0] + half], expected[:half])
        assert torch.equal(second[at[1] : at[1] + len(prompt) - half], expected[half:])
        at = [at[0] + half, at[1] + len(prompt) - half]


def test_a_snapshot_continues_exactly(model: DeepseekV4) -> None:
    """A record copied at the end of a prefix, with the prefix's pages, is all that another request needs."""
    tokens = some_tokens(48 + 20, seed=6)
    whole = Runner(model).prefill(0, tokens)
    runner = Runner(model, seed=5)
    runner.prefill(0, tokens[:48], [20])
    runner.caches.copy_state(0, 3)
    # The first request goes on, in pages of its own from there; its record moves away from the snapshot.
    runner.run(runner.rows(0, some_tokens(30, seed=77), 48))
    runner.slots[1] = torch.cat([runner.slots[0][:48], runner.slots[1][48:]])
    runner.caches.copy_state(3, 1)
    logits = runner.run(runner.rows(1, tokens[48:], 48))
    assert torch.equal(logits, whole[48:])
    stale = Runner(model, seed=5)
    stale.prefill(0, tokens[:48])
    stale.slots[1] = torch.cat([stale.slots[0][:48], stale.slots[1][48:]])
    for tensor in stale.caches.state_tensors():
        tensor[1] = 0
    wrong = stale.run(stale.rows(1, tokens[48:], 48))
    assert not torch.equal(wrong, whole[48:]), "the record must matter"
