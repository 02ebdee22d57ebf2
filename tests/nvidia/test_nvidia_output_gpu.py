"""The output projection on Hopper: all ranks on one GPU against float32 PyTorch."""

from __future__ import annotations

import pytest
import torch
from output_kit import make_residual, make_weights

from lowlat_nvidia.comm.output_projection import MAX_ROWS, OutputDeadlineError, OutputPlan, OutputProjection, reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
# Ranks here are launched one after the other by one thread, which a busy machine may stop for seconds.
PATIENCE = 20_000_000


class Ranks:
    """All ranks of a projection on this GPU, each on a stream of its own."""

    def __init__(self, plan: OutputPlan) -> None:
        self.plan = plan
        self.inboxes = [torch.zeros(plan.inbox_bytes // 8, dtype=torch.int64, device="cuda") for _ in range(plan.ranks)]
        self.errors = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(plan.ranks)]
        self.weights, self.ranks = [], []
        self.streams = [torch.cuda.Stream() for _ in range(plan.ranks)]
        for rank in range(plan.ranks):
            raw, scale, meant = make_weights(plan, "cuda")
            self.weights.append(meant)
            addresses = [t.data_ptr() for t in self.inboxes], [t.data_ptr() for t in self.errors]
            self.ranks.append(OutputProjection(plan, raw, scale, rank, *addresses))
            self.ranks[-1].spin_limit = PATIENCE

    def run(self, inputs, residual, *, plain=False):
        torch.cuda.synchronize()
        for one in self.ranks:
            for tensor in (one.out_RH, one.streams_RNH, one.partial_RH, one.sum_RH):
                tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        got = [
            (one.run_plain if plain else one.run)(z, residual, stream.cuda_stream)
            for one, z, stream in zip(self.ranks, inputs, self.streams, strict=True)
        ]
        torch.cuda.synchronize()
        self.check()
        return [(out.clone(), streams.clone()) for out, streams in got]

    def check(self):
        for error in self.errors:
            OutputProjection.explain(int(error))


PLANS = {
    "one": OutputPlan(ranks=1),
    "many inputs": OutputPlan(ranks=1, inputs=4096),
    "two": OutputPlan(hidden=2560, inputs=1024, ranks=2, blocks=33),
    "four": OutputPlan(hidden=1024, inputs=512, ranks=4, blocks=15),
}


@pytest.fixture(scope="module", params=PLANS)
def ranks(request):
    """On one GPU a rank's next projection keeps its place while it waits for other ranks. So all ranks' blocks take at
    most half of the multiprocessors, whatever else runs there, or what waits keeps out what it waits for."""
    torch.manual_seed(0)
    plan = PLANS[request.param]
    assert plan.ranks == 1 or plan.ranks * plan.blocks <= torch.cuda.get_device_properties(0).multi_processor_count // 2
    return Ranks(plan)


@pytest.mark.parametrize("plain", [False, True])
def test_against_float32(ranks, plain):
    plan = ranks.plan
    for rows in (1, 6, 8, 3, 6):
        inputs = [torch.randn(rows, plan.inputs, device="cuda").bfloat16() for _ in range(plan.ranks)]
        residual = make_residual(plan, rows, "cuda")
        expected, streams = reference(inputs, ranks.weights, residual, 1e-20)
        for out, new in ranks.run(inputs, residual, plain=plain):
            for mine, theirs in ((out, expected), (new, streams)):
                assert mine.isfinite().all()
                distance = ((mine.float() - theirs.float()).norm() / theirs.float().norm()).item()
                assert distance < 3e-3  # a bfloat16 sum may round to the neighbour
        assert len({out.float().sum().item() for out, _ in ranks.run(inputs, residual)}) == 1, (
            "ranks have the same bits"
        )


def test_many_steps_without_the_host(ranks):
    plan, rows = ranks.plan, 6
    inputs = [torch.randn(rows, plan.inputs, device="cuda").bfloat16() for _ in range(plan.ranks)]
    residual = make_residual(plan, rows, "cuda")
    first = ranks.run(inputs, residual)
    for _ in range(500):
        for one, z, stream in zip(ranks.ranks, inputs, ranks.streams, strict=True):
            one.run(z, residual, stream.cuda_stream)
    torch.cuda.synchronize()
    ranks.check()
    for one, (out, streams) in zip(ranks.ranks, first, strict=True):
        assert torch.equal(one.out_RH[:rows], out)
        assert torch.equal(one.streams_RNH[:rows], streams)


def test_ten_thousand_replays_of_one_rank_repeat_bit_for_bit():
    ranks = Ranks(OutputPlan(ranks=1))
    one, residual = ranks.ranks[0], make_residual(ranks.plan, MAX_ROWS, "cuda")
    z = torch.randn(MAX_ROWS, 2048, device="cuda").bfloat16()
    one.run(z, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, streams = one.run(z, residual)
    graph.replay()
    first, new, wrong = out.clone(), streams.clone(), torch.zeros((), dtype=torch.long, device="cuda")
    for replay in range(10_000):
        graph.replay()
        wrong += (out != first).sum()
        if replay % 500 == 0:
            wrong += (streams != new).sum()
            out.fill_(float("nan"))
            streams.fill_(float("nan"))
    assert wrong.item() == 0
    ranks.check()


def test_a_rank_that_never_publishes_ends_in_one_error_everywhere():
    ranks = Ranks(PLANS["two"])
    residual = make_residual(ranks.plan, 2, "cuda")
    inputs = [torch.randn(2, 1024, device="cuda").bfloat16() for _ in range(2)]
    ranks.ranks[0].spin_limit = 3000
    ranks.ranks[0].run(inputs[0], residual)
    torch.cuda.synchronize()
    codes = [int(error) for error in ranks.errors]
    assert codes[0] == codes[1]
    with pytest.raises(OutputDeadlineError, match="rank 0 gave up waiting for another rank's tiles"):
        OutputProjection.explain(codes[1])
    for tensor in (*ranks.inboxes, *ranks.errors):
        tensor.zero_()
    for one in ranks.ranks:
        one.reset()
        one.spin_limit = PATIENCE
    got = ranks.run(inputs, residual)
    assert torch.equal(got[0][0], got[1][0])
