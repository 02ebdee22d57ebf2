"""Sequential proposals, their own source on a CPU: finds wrong indices, missing waits and deadlocks."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from emulator import machine

from lowlat_nvidia.draft import markov, plan, reference
from lowlat_nvidia.draft.markov import MarkovProposals, ProposalDeadlineError, ProposalTensors
from lowlat_nvidia.draft.plan import MarkovPlan

pytestmark = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
SURE, STEPS = 1e-3, 3


def build(
    made: MarkovPlan, head: torch.Tensor, embedding: torch.Tensor, patch: pytest.MonkeyPatch, folder: Path
) -> MarkovProposals:
    kernels = machine.Machine(machine.build(machine.MARKOV, made.definitions(), folder))
    patch.setattr(markov, "compile_cubin", lambda name, definitions: (b"", ""))
    patch.setattr(markov, "Function", lambda cubin, name, shared: machine.EmulatedFunction(kernels, 0, 1, shared))
    return MarkovProposals(made, head, embedding)


@pytest.mark.parametrize("requests", [1, 3])
def test_the_proposals_are_right_on_a_cpu(requests: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A block has tiles of every kind: in registers, in shared memory, and such that pass, some warps two of them."""
    torch.manual_seed(requests)
    monkeypatch.setattr(plan, "SHARED_BYTES", 48_000 if requests == 1 else 60_000)
    vocabulary = 2 * 38 * 16 - 5
    head = (torch.randn(vocabulary, 256) * 0.2).bfloat16()
    embedding = torch.randn(vocabulary, 256).bfloat16()
    base = torch.randn(requests, STEPS, vocabulary) * 2
    anchors, seeds, positions = (torch.randint(vocabulary, (requests,)) for _ in range(3))
    temperatures = torch.tensor([0.0, 0.8, 1.3])[:requests]
    lists = (t.tolist() for t in (anchors, temperatures, seeds, positions))
    expected, logits, margins = reference.propose(head, embedding, base, *lists)
    assert (margins > SURE).all()
    made = MarkovPlan(vocabulary, requests=requests, blocks=2)
    assert 0 < made.resident < made.passing
    assert made.passing > plan.WARPS
    built = build(made, head, embedding, monkeypatch, tmp_path)
    for _ in range(2):  # a launch after another finds its words by their tag
        out = torch.full_like(base, float("nan"))
        inputs = ProposalTensors(base, anchors, temperatures, seeds, positions, out)
        built.tokens.fill_(-1)
        assert torch.equal(built.run(inputs, 1), expected)
        built.check()
        torch.testing.assert_close(out.double(), logits, rtol=0, atol=2e-4)


class Kept(machine.EmulatedFunction):
    """Launches are kept until `finish`, so that ranks run beside each other."""

    def launch(self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int) -> None:
        self.launch_early(blocks, threads, parameters, stream)


def test_two_ranks_agree_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(9)
    made = MarkovPlan(2 * 2 * 20 * 16, rank=64, ranks=2, requests=3, blocks=2)
    head, embedding = (torch.randn(made.vocabulary, 64).bfloat16() for _ in range(2))
    base = torch.randn(3, STEPS, made.vocabulary) * 2
    anchors, seeds, positions = (torch.randint(made.vocabulary, (3,)) for _ in range(3))
    temperatures = torch.tensor([0.0, 0.8, 1.3])
    lists = (t.tolist() for t in (anchors, temperatures, seeds, positions))
    expected, _, margins = reference.propose(head, embedding, base, *lists)
    assert (margins > SURE).all()
    begin = "  const int thread = threadIdx.x, block = blockIdx.x;\n"
    together = {
        "markov.cu": (begin, begin + "  let_next_kernel_start();\n")
    }  # the next rank does not wait for this one
    kernels = machine.Machine(machine.build(machine.MARKOV, made.definitions(), tmp_path, together))
    monkeypatch.setattr(markov, "compile_cubin", lambda name, definitions: (b"", ""))
    monkeypatch.setattr(markov, "Function", lambda cubin, name, shared: Kept(kernels, 0, 1, shared))
    parts = head.chunk(2)
    ranks = [MarkovProposals(made, part, embedding, rank) for rank, part in enumerate(parts)]
    for one in ranks:
        one.connect([each.inbox.data_ptr() for each in ranks], [each.error.data_ptr() for each in ranks])
    inputs = [ProposalTensors(part.contiguous(), anchors, temperatures, seeds, positions) for part in base.chunk(2, -1)]
    for last in (1, 0):  # the machine stops when the rank that was launched last has ended
        for rank in (1 - last, last):
            ranks[rank].tokens.fill_(-1)
            tokens = ranks[rank].run(inputs[rank], 1)
        kernels.finish(plan.THREADS)
        assert torch.equal(tokens, expected)
        for one in ranks:
            one.check()
    of_the_second = int((expected >= made.local_vocabulary).sum())
    assert 0 < of_the_second < expected.numel()  # both ranks had some of the tokens


def test_a_launch_that_finds_an_error_ends_without_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(5)
    made = MarkovPlan(2 * 20 * 16, rank=64, blocks=2)
    head, embedding = torch.randn(made.vocabulary, 64).bfloat16(), torch.randn(made.vocabulary, 64).bfloat16()
    built = build(made, head, embedding, monkeypatch, tmp_path)
    zeros = torch.zeros(1, dtype=torch.int64)
    inputs = ProposalTensors(torch.randn(1, STEPS, made.vocabulary), zeros, torch.zeros(1), zeros, zeros)
    built.error.fill_(1)
    built.tokens.fill_(-1)
    assert (built.run(inputs, 1) == -1).all()
    with pytest.raises(ProposalDeadlineError, match="this rank gave up waiting for the words of proposal 0"):
        built.check()
    built.reset()
    assert (built.run(inputs, 1) >= 0).all()
    built.check()
