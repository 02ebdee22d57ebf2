"""Kernels that reach into other GPUs' memory, a process a GPU: results, and one named error everywhere when a rank
never publishes. Two GPUs at least.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from output_kit import make_residual, make_weights

from lowlat_nvidia.comm.output_projection import OutputDeadlineError, OutputPlan, OutputProjection
from lowlat_nvidia.comm.output_projection import reference as output_reference
from lowlat_nvidia.comm.peers import PeerBuffer
from lowlat_nvidia.draft import reference as draft_reference
from lowlat_nvidia.draft.markov import MarkovProposals, ProposalDeadlineError, ProposalTensors
from lowlat_nvidia.draft.plan import MarkovPlan

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")]


def exchange(blob: bytes) -> list[bytes]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, blob)
    return found


def same_everywhere(value: Any) -> bool:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return all(other == value for other in found)


@contextlib.contextmanager
def others_never_publish(
    rank: int, one: Any, spin_limit: int, run: Callable[[], object], buffers: list[PeerBuffer]
) -> Iterator[None]:
    """Rank 0 launches alone. Where the caller looks for the error, every rank does; afterwards all may launch again."""
    dist.barrier()
    usual = one.spin_limit
    if rank == 0:
        one.spin_limit = spin_limit
        run()
        torch.cuda.synchronize()
    dist.barrier()
    yield
    dist.barrier()
    for buffer in buffers:
        buffer.clear()
    one.reset()
    one.spin_limit = usual
    torch.cuda.synchronize()
    dist.barrier()


def output_projection(rank: int, ranks: int) -> None:
    plan, rows = OutputPlan(ranks=ranks), 6
    torch.manual_seed(0)
    weights = [make_weights(plan, "cuda") for _ in range(ranks)]
    inbox, error = PeerBuffer(plan.inbox_bytes, rank, exchange), PeerBuffer(4096, rank, exchange)
    one = OutputProjection(plan, *weights[rank][:2], rank, inbox.addresses, error.addresses)
    residual = make_residual(plan, rows, "cuda")
    inputs = [torch.randn(rows, plan.inputs, device="cuda").bfloat16() for _ in range(ranks)]
    expected, streams = output_reference(inputs, [meant for _, _, meant in weights], residual, one.eps)

    def right() -> None:
        for tensor in (one.out_RH, one.streams_RNH):
            tensor.fill_(float("nan"))
        dist.barrier()
        out, new = one.run(inputs[rank], residual)
        torch.cuda.synchronize()
        OutputProjection.explain(error.read_word(0))
        for mine, theirs in ((out, expected), (new, streams)):
            assert ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item() < 3e-3
        assert same_everywhere(out.float().cpu().numpy().tobytes())

    for _ in range(3):
        right()
    for _ in range(300):
        one.run(inputs[rank], residual)
    right()
    with (
        others_never_publish(rank, one, 3000, lambda: one.run(inputs[rank], residual), [inbox, error]),
        pytest.raises(OutputDeadlineError, match="rank 0 gave up waiting for another rank's tiles"),
    ):
        OutputProjection.explain(error.read_word(0))
    right()


def proposals(rank: int, ranks: int) -> None:
    for requests, steps in ((1, 5), (8, 7)):
        plan = MarkovPlan(129280, ranks=ranks, requests=requests)
        own = slice(rank * plan.local_vocabulary, (rank + 1) * plan.local_vocabulary)
        torch.manual_seed(requests)
        head = (torch.randn(plan.vocabulary, plan.rank, device="cuda") * 0.2).bfloat16()
        embedding = torch.randn(plan.vocabulary, plan.rank, device="cuda").bfloat16()
        base = torch.randn(requests, steps, plan.vocabulary, device="cuda") * 2
        anchors = torch.randint(plan.vocabulary, (requests,), device="cuda")
        temperatures = torch.tensor([0.0, 0.8, 1.3] * 3, device="cuda")[:requests].contiguous()
        seeds = torch.randint(-(2**62), 2**62, (requests,), device="cuda")
        positions = torch.randint(0, 100_000, (requests,), device="cuda")
        inputs = ProposalTensors(base[..., own].contiguous(), anchors, temperatures, seeds, positions)
        built = MarkovProposals(plan, head[own].contiguous(), embedding, rank)
        inbox, error = PeerBuffer(plan.inbox_bytes, rank, exchange), PeerBuffer(4096, rank, exchange)
        built.connect(inbox.addresses, error.addresses)
        lists = (t.tolist() for t in (anchors, temperatures, seeds, positions))
        expected, _, margins = draft_reference.propose(head, embedding, base, *lists)
        clear = (margins > 1e-3).cumprod(1).bool()  # up to the first token that rounding may decide
        assert clear.sum() >= requests * steps // 2

        def right(built=built, inputs=inputs, error=error, expected=expected, clear=clear) -> None:
            built.tokens.fill_(-1)
            dist.barrier()
            tokens = built.run(inputs)
            torch.cuda.synchronize()
            MarkovProposals.explain(error.read_word(0))
            assert torch.equal(tokens[clear], expected[clear])
            assert same_everywhere(tokens.tolist())

        right()
        for _ in range(300):
            built.run(inputs)
        right()
        run = functools.partial(built.run, inputs)
        with (
            others_never_publish(rank, built, 2000, run, [inbox, error]),
            pytest.raises(ProposalDeadlineError, match="words of proposal 0"),
        ):
            MarkovProposals.explain(error.read_word(0))
        right()


def worker(rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.zeros(1, device="cuda")  # makes the context that buffers belong to
    output_projection(rank, ranks)
    proposals(rank, ranks)
    dist.barrier()


@pytest.mark.parametrize("ranks", [size for size in (2, 4) if size <= GPUS])
def test_ranks_reach_each_other_and_fail_together(ranks: int) -> None:
    mp.spawn(worker, (ranks, 29541), nprocs=ranks)
