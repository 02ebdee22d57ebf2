"""Verification: the law of what is kept is the target's, whatever the draft proposes."""

from __future__ import annotations

import pytest
import torch
from deepseek_kit import Runner, load, some_tokens

from lowlat.models.deepseek_v4.dspark import DraftRequest
from lowlat.models.deepseek_v4.verify import verify_greedy, verify_sampled

VOCABULARY, BLOCK, TRIALS = 7, 3, 60_000
# 99.99th percentiles of chi-square with 6 degrees of freedom is 27.9; some dozens of tests are made below.
LIMIT = 33.0


def distributions(rows: int, seed: int, sharp: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(rows, VOCABULARY, dtype=torch.float64, generator=generator)).softmax(-1)


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    expected = counts.sum() * law
    return float(((counts - expected) ** 2 / expected).sum())


def uniforms(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draft_kind", ["random", "close", "one-hot", "same"])
def test_kept_tokens_have_the_targets_law(seed: int, draft_kind: str) -> None:
    target = distributions(BLOCK + 1, seed)
    draft = {
        "random": distributions(BLOCK, seed + 50),
        "close": 0.9 * target[:-1] + 0.1 * distributions(BLOCK, seed + 60),
        "one-hot": torch.nn.functional.one_hot(target[:-1].argmax(-1), VOCABULARY).double(),
        "same": target[:-1],
    }[draft_kind]
    generator = torch.Generator().manual_seed(seed + 7)
    drafts = torch.stack([torch.multinomial(q, TRIALS, replacement=True, generator=generator) for q in draft], 1)
    verdict = verify_sampled(
        drafts,
        draft.expand(TRIALS, -1, -1),
        target.expand(TRIALS, -1, -1),
        uniforms(TRIALS, BLOCK, seed=seed + 8),
        uniforms(TRIALS, seed=seed + 9),
    )
    rejected = 0
    for row in range(BLOCK + 1):
        reached = verdict.accepted >= row
        own = verdict.accepted == row
        tokens = torch.cat([drafts[verdict.accepted > row, row] if row < BLOCK else drafts[:0, 0], verdict.token[own]])
        assert len(tokens) == int(reached.sum())
        counts = torch.bincount(tokens, minlength=VOCABULARY).double()
        assert chi_square(counts, target[row]) < LIMIT, (draft_kind, row)
        # Acceptance itself: the sum of min(p, q) of those that came so far.
        if row < BLOCK:
            share = float((verdict.accepted > row).sum()) / max(1, int(reached.sum()))
            assert share == pytest.approx(float(torch.minimum(target[row], draft[row]).sum()), abs=0.02)
            rejected += int(own.sum())
    assert (rejected == 0) == (draft_kind == "same")


def test_what_the_chi_square_would_catch() -> None:
    """The residual drawn from p instead of max(p - q, 0) is a common mistake; the limit sees it."""
    target, draft = distributions(1, 1), distributions(1, 51)
    generator = torch.Generator().manual_seed(3)
    drafts = torch.multinomial(draft[0], TRIALS, replacement=True, generator=generator)
    kept = uniforms(TRIALS, seed=4) * draft[0][drafts] < target[0][drafts]
    wrong = torch.multinomial(target[0], TRIALS, replacement=True, generator=generator)
    counts = torch.bincount(torch.where(kept, drafts, wrong), minlength=VOCABULARY).double()
    assert chi_square(counts, target[0]) > LIMIT


def test_edges() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    q = torch.tensor([[[0.0, 1.0, 0.0]]], dtype=torch.float64)
    uniform = torch.tensor([[1 - 1e-16]], dtype=torch.float64)
    for choice, token in ((0.0, 0), (0.49, 0), (0.5, 1), (1 - 1e-16, 1)):
        verdict = verify_sampled(torch.tensor([[1]]), q, p, uniform, torch.tensor([choice], dtype=torch.float64))
        assert (int(verdict.accepted), int(verdict.token)) == (1, token)
    verdict = verify_sampled(
        torch.tensor([[2]]), torch.tensor([[[0.0, 0.0, 1.0]]]).double(), p, torch.zeros(1, 1), torch.zeros(1)
    )
    assert (int(verdict.accepted), int(verdict.token)) == (0, 1), "a token that the target forbids is never kept"


def test_greedy() -> None:
    best = torch.tensor([[3, 1, 4, 1], [5, 5, 5, 5]])
    logits = torch.nn.functional.one_hot(best, 6).float()
    verdict = verify_greedy(torch.tensor([[3, 1, 0], [5, 5, 5]]), logits)
    assert verdict.accepted.tolist() == [2, 3]
    assert verdict.token.tolist() == [4, 5]


def test_sampled_drafts_of_the_model_are_verified(tiny_v41) -> None:
    """`choose` picks the proposals; their distributions and the target's rows fit together."""
    model = load(tiny_v41)
    assert model.draft is not None
    runner = Runner(model)
    prompt = some_tokens(30, seed=5)
    runner.prefill(0, prompt)
    places = []

    def choose(logits: torch.Tensor, place: int) -> torch.Tensor:
        places.append(place)
        generator = torch.Generator().manual_seed(place)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)

    proposal = model.draft.propose([DraftRequest(8, 30, 0)], runner.caches, choose)
    assert places == [0, 1, 2, 3, 4]
    again = model.draft.propose([DraftRequest(8, 30, 0)], runner.caches, choose)
    assert torch.equal(again.tokens, proposal.tokens)
    rows = runner.run(runner.rows(0, [8, *proposal.tokens[0].tolist()], 30))
    verdict = verify_sampled(
        proposal.tokens,
        proposal.logits.softmax(-1),
        rows.softmax(-1).unsqueeze(0),
        uniforms(1, 5, seed=1),
        uniforms(1, seed=2),
    )
    assert 0 <= int(verdict.accepted) <= 5
    assert 0 <= int(verdict.token) < 200
