"""Sequential proposals on a Hopper GPU against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from lowlat_nvidia.draft import reference
from lowlat_nvidia.draft.markov import MarkovProposals, ProposalDeadlineError, ProposalTensors
from lowlat_nvidia.draft.plan import MarkovPlan

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SURE = 1e-3
"""Below this distance between the two best, sums in float32 may choose otherwise."""


class Case:
    """Random weights and inputs."""

    def __init__(self, plan: MarkovPlan, requests: int, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.plan = plan
        self.head = (torch.randn(plan.vocabulary, plan.rank, device="cuda") * 0.2).bfloat16()
        self.embedding = torch.randn(plan.vocabulary, plan.rank, device="cuda").bfloat16()
        self.base = torch.randn(requests, steps, plan.vocabulary, device="cuda") * 2
        self.anchors = torch.randint(plan.vocabulary, (requests,), device="cuda")
        self.temperatures = torch.tensor([0.0, 0.8, 1.3][:requests] * 3, device="cuda")[:requests].contiguous()
        self.seeds = torch.randint(-(2**62), 2**62, (requests,), device="cuda")
        self.positions = torch.randint(0, 100_000, (requests,), device="cuda")
        self.logits = torch.full_like(self.base, float("nan"))

    def inputs(self, rank: int = 0, logits: bool = True) -> ProposalTensors:
        local = self.plan.local_vocabulary
        part = slice(rank * local, (rank + 1) * local)
        base = self.base[..., part].contiguous()
        out = torch.full_like(base, float("nan")) if logits else None
        return ProposalTensors(base, self.anchors, self.temperatures, self.seeds, self.positions, out)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lists = (t.tolist() for t in (self.anchors, self.temperatures, self.seeds, self.positions))
        return reference.propose(self.head, self.embedding, self.base, *lists)

    def built(self, rank: int = 0) -> MarkovProposals:
        local = self.plan.local_vocabulary
        return MarkovProposals(self.plan, self.head[rank * local : (rank + 1) * local], self.embedding, rank)


def agree(tokens: torch.Tensor, expected: torch.Tensor, margins: torch.Tensor) -> int:
    """Compares each request up to its first unsure token; returns how many tokens that were."""
    compared = 0
    for mine, theirs, margin in zip(tokens.tolist(), expected.tolist(), margins.tolist(), strict=True):
        for a, b, distance in zip(mine, theirs, margin, strict=True):
            if distance < SURE:
                break
            assert a == b
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("vocabulary", "rank", "requests", "steps"),
    [
        (129280, 256, 1, 5),
        (129280, 256, 8, 5),
        (129280, 256, 2, 7),
        (49152, 64, 3, 4),
        (1009, 32, 1, 15),
        (7, 128, 5, 3),
    ],
)
def test_against_float64(vocabulary, rank, requests, steps):
    for seed in range(3):
        case = Case(MarkovPlan(vocabulary, rank=rank, requests=requests), requests, steps, seed)
        built, inputs = case.built(), case.inputs()
        built.tokens.fill_(-1)
        tokens = built.run(inputs).clone()
        built.check()
        expected, logits, margins = case.expected()
        assert agree(tokens, expected, margins) >= requests * steps // 2
        for request in range(requests):  # logits follow the tokens chosen so far
            same = int((tokens[request] == expected[request]).cumprod(0).sum())
            rows = slice(0, min(steps, same + 1))
            torch.testing.assert_close(
                inputs.logits_RSL[request, rows].double(), logits[request, rows], rtol=0, atol=2e-4
            )


def test_ties_go_to_the_lowest_token():
    case = Case(MarkovPlan(5000, rank=64), 1, 5, 0)
    case.head.zero_()
    case.base.fill_(1.0)
    assert case.built().run(case.inputs()).tolist() == [[0] * 5]
    case.base[..., [4321, 777, 3000]] = 2.0
    assert case.built().run(case.inputs()).tolist() == [[777] * 5]


def test_ten_thousand_replays_repeat_bit_for_bit():
    case = Case(MarkovPlan(129280, requests=2), 2, 5, 1)
    built, inputs = case.built(), case.inputs()
    built.run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = built.run(inputs)
    first_tokens, first_logits = None, None
    wrong = torch.zeros(1, dtype=torch.long, device="cuda")
    for replay in range(10_000):
        graph.replay()
        if first_tokens is None:
            first_tokens, first_logits = tokens.clone(), inputs.logits_RSL.clone()
        wrong += (tokens != first_tokens).sum()
        if replay % 100 == 0:
            wrong += (inputs.logits_RSL != first_logits).sum()
            inputs.logits_RSL.fill_(float("nan"))
    assert wrong.item() == 0
    built.check()


def connected(case: Case, blocks: int) -> list[MarkovProposals]:
    """All ranks of a vocabulary on this one GPU, each with its share of the multiprocessors."""
    assert case.plan.ranks * blocks <= 132
    ranks = [case.built(rank) for rank in range(case.plan.ranks)]
    for rank in ranks:
        rank.connect([one.inbox.data_ptr() for one in ranks], [one.error.data_ptr() for one in ranks])
    torch.cuda.synchronize()
    return ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree(ranks):
    blocks = 132 // ranks
    case = Case(MarkovPlan(129280 // ranks * ranks, ranks=ranks, requests=2, blocks=blocks), 2, 5, ranks)
    built = connected(case, blocks)
    streams = [torch.cuda.Stream() for _ in built]
    inputs = [case.inputs(rank) for rank in range(ranks)]
    torch.cuda.synchronize()
    for _ in range(50):
        got = [one.run(mine, stream.cuda_stream) for one, mine, stream in zip(built, inputs, streams, strict=True)]
    torch.cuda.synchronize()
    for one in built:
        one.check()
    assert all(torch.equal(tokens, got[0]) for tokens in got)
    expected, _, margins = case.expected()
    assert agree(got[0], expected, margins) >= 5


def test_a_rank_that_never_publishes_ends_in_a_named_error():
    case = Case(MarkovPlan(10_000, rank=64, ranks=2, blocks=64), 1, 5, 0)
    built = connected(case, 64)
    built[0].spin_limit = 2000
    built[0].run(case.inputs(0))
    with pytest.raises(ProposalDeadlineError, match="words of proposal 0"):
        built[0].check()
    with pytest.raises(ProposalDeadlineError, match="another rank"):
        built[1].check()
    assert built[1].run(case.inputs(1)) is not None  # ends at once: it was told
    torch.cuda.synchronize()
    for one in built:
        one.reset()
    streams = [torch.cuda.Stream() for _ in built]
    inputs = [case.inputs(rank) for rank in range(2)]
    torch.cuda.synchronize()
    built[0].spin_limit = built[1].spin_limit
    got = [one.run(mine, stream.cuda_stream) for one, mine, stream in zip(built, inputs, streams, strict=True)]
    torch.cuda.synchronize()
    for one in built:
        one.check()
    assert torch.equal(got[0], got[1])
