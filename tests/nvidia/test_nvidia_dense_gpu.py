"""The dense step on a Hopper GPU against float32 PyTorch: fresh inputs, poisoned outputs, odd page tables."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator

import pytest
import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.cases import copy_pools, make_case, one_row
from lowlat_nvidia.dense.reference import random_weights, reference_step
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.step import DEFAULT_SPIN_LIMIT, THREADS, DenseStep, StepDeadlineError, StepTensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SHAPES = {
    "heads of 64": plans.DenseShape(5, 2048, 32, 8, 64, 3072, 3001, False),
    "heads of 128, query norms": plans.DenseShape(4, 1024, 16, 8, 128, 3072, 5003, True, 1e-6),
    "wide": plans.DenseShape(4, 4096, 32, 8, 128, 4096, 2999, True, 1e-6),
    "biases": plans.DenseShape(3, 1024, 16, 8, 128, 2048, 2999, False, 1e-6, qkv_bias=True),
}
CASES = {
    "one row, first token": [[0]],
    "one row": [[1234]],
    "two requests": [[17], [900]],
    "verify": [[511, 512, 513, 514, 515]],
    "mixed": [[5], [700, 701, 702], [63]],
    "seven": [[i * 97] for i in range(7)],
    "eight": [[3000 - i * 331] for i in range(8)],
    "long": [[40000]],
    "long and short": [[20000], [63], [9001, 9002], [1023]],
}
# Relative distance of logits from float32. The kernel rounds what it multiplies to bfloat16 and nothing else; a path
# that also keeps its residual in bfloat16 is farther away (`test_closer_than_bfloat16`).
BOUND = 1.2e-2


@pytest.fixture(scope="module", params=SHAPES)
def built(request: pytest.FixtureRequest) -> Iterator[tuple[DenseStep, object]]:
    shape = SHAPES[request.param]
    weights = random_weights(shape, 11, "cuda")
    step = DenseStep(
        plans.DensePlan(shape), weights, rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), 40_001, "cuda")
    )
    yield step, weights
    step.close()


def run(step: DenseStep, inputs: StepTensors, pools: list, page_size: int) -> torch.Tensor:
    step.bind(pools, page_size)
    step.logits_RV.fill_(float("nan"))
    step.next_token_R.fill_(-7)
    logits = step.run(inputs).clone()
    step.check()
    return logits


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("case", CASES)
def test_against_float32(built: tuple, case: str, page_size: int) -> None:
    step, weights = built
    shape = step.plan.shape
    inputs, pools = make_case(shape, CASES[case], page_size, zlib.crc32(case.encode()) % 10_000 + page_size)
    expected_pools = copy_pools(pools)
    expected = reference_step(shape, weights, step.rotary, expected_pools, page_size, inputs)
    logits = run(step, inputs, pools, page_size)
    error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < BOUND).all(), error
    assert torch.equal(step.next_token_R[: len(logits)], logits.argmax(1))
    for mine, theirs in zip(pools, expected_pools, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            untouched = b == 1e4
            assert torch.equal(a == 1e4, untouched)
            a, b = a.float()[~untouched], b.float()[~untouched]
            assert (a - b).norm() < 0.02 * b.norm()


def test_a_row_has_the_same_bits_at_every_width(built: tuple) -> None:
    step, _ = built
    positions = [[40], [1000], [999], [0], [2500], [64], [65], [128]]
    inputs, pools = make_case(step.plan.shape, positions, 16, 5)
    together = run(step, inputs, copy_pools(pools), 16)
    for row in range(8):
        alone = one_row(inputs, row)
        assert torch.equal(run(step, alone, copy_pools(pools), 16)[0], together[row]), row


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_with_more_units_than_there_is_room_for_sums(built: tuple, page_size: int) -> None:
    """With a warp each, the default, they have the bits that they have in turns: five to eight units a split beside
    fewer, and half of that where a KV head has 512 query elements; two rows of a request."""
    step, weights = built
    wide = step.plan.shape.qdim // step.plan.shape.kv_heads == 512
    assert step.plan.kernel(8).definitions()["ROW_UNITS"] == (4 if wide else 8)
    in_turns = DenseStep(dataclasses.replace(step.plan, row_warps=0), weights, step.rotary)
    for longest in (
        [[2047], [1300], [1100], [0], [1791], [1279], [1535], [700]],
        [[1800, 1801], [2040], [1290], [1536], [0]],
        [[2047]] * 8,
    ):
        positions = [[rows[0] // (1 + wide) + place for place in range(len(rows))] for rows in longest]
        inputs, pools = make_case(step.plan.shape, positions, page_size, 13)
        own, turns = copy_pools(pools), copy_pools(pools)
        expected = run(in_turns, inputs, turns, page_size)
        for _ in range(20):
            assert torch.equal(run(step, inputs, own, page_size), expected)
        assert all(
            torch.equal(a, b)
            for mine, theirs in zip(own, turns, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
    in_turns.close()


def test_verifying_equals_decoding_one_by_one(built: tuple) -> None:
    step, _ = built
    inputs, pools = make_case(step.plan.shape, [[702, 703, 704, 705]], 1, 6)
    together = run(step, inputs, copy_pools(pools), 1)
    for row in range(4):
        one = one_row(inputs, row)
        assert torch.equal(run(step, one, pools, 1)[0], together[row]), row


def test_repeats_bit_for_bit_and_widths_alternate(built: tuple) -> None:
    step, _ = built
    wide, pools = make_case(step.plan.shape, [[100 + i] for i in range(8)], 16, 7)
    narrow = StepTensors(wide.tokens_R[:2], wide.positions_R[:2], wide.query_start_Q1[:3], wide.page_table_TP)
    step.bind(pools, 16)
    first = step.run(wide).clone()
    for turn in range(300):
        assert torch.equal(step.run(wide), first), turn
        if turn % 3 == 0:
            assert torch.equal(step.run(narrow), first[:2]), turn
    step.check()


def test_in_a_graph(built: tuple) -> None:
    step, _ = built
    inputs, pools = make_case(step.plan.shape, [[321], [5]], 16, 8)
    step.bind(pools, 16)
    expected = step.run(inputs).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step.run(inputs)
    for _ in range(20):
        logits.fill_(float("nan"))
        graph.replay()
        assert torch.equal(logits, expected)
    step.check()


def test_a_missed_deadline_is_an_error_and_the_context_lives(built: tuple) -> None:
    step, _ = built
    inputs, pools = make_case(step.plan.shape, [[77]], 16, 9)
    expected = run(step, inputs, pools, 16)
    step.spin_limit = 3000
    try:
        parameters = step.parameters(inputs)
        # One block is missing: the others wait in vain for what it would have published.
        step.function(1).launch(plans.BLOCKS - 1, THREADS, parameters, torch.cuda.current_stream().cuda_stream)
        with pytest.raises(StepDeadlineError, match=r"block \d+ gave up waiting for the input of stage '\w"):
            step.check()
    finally:
        step.spin_limit = DEFAULT_SPIN_LIMIT
        step.reset()
    assert torch.equal(run(step, inputs, pools, 16), expected)


def test_a_failed_step_leaves_no_tokens_until_the_reset(built: tuple) -> None:
    step, _ = built
    inputs, pools = make_case(step.plan.shape, [[77], [5]], 16, 9)
    expected = run(step, inputs, pools, 16)
    step.state[1] = 1 + 3 * 16 + 6
    for _ in range(3):
        logits = step.run(inputs)
        assert logits[:, 0].isnan().all()
        assert step.next_token_R[:2].tolist() == [-1, -1]
        assert "block 3 gave up waiting for the input of stage 'down'" in str(step.error())
    step.reset()
    assert torch.equal(run(step, inputs, pools, 16), expected)


def test_padding_rows_and_tables_by_row(built: tuple) -> None:
    """Padding rows write nowhere, real rows keep their bits; a step of padding alone writes nothing at all."""
    step, _ = built
    inputs, pools = make_case(step.plan.shape, [[40], [7], [300]], 16, 12)
    expected_pools = copy_pools(pools)
    expected = run(step, inputs, expected_pools, 16)
    starts = torch.arange(6, dtype=torch.int32, device="cuda")
    table = torch.full((9, inputs.page_table_TP.shape[1]), 1 << 20, dtype=torch.int32, device="cuda")
    rows = torch.tensor([7, 0, 3, 1, 5], dtype=torch.int32, device="cuda")
    table[rows[[0, 2, 3]].long()] = inputs.page_table_TP
    tokens = torch.zeros(5, dtype=torch.int64, device="cuda")
    tokens[[0, 2, 3]] = inputs.tokens_R
    positions = torch.full((5,), 1 << 30, dtype=torch.int64, device="cuda")
    positions[[0, 2, 3]] = inputs.positions_R
    write = torch.tensor([5, -1, 5, 5, -1], device="cuda")
    padded = StepTensors(tokens, positions, starts, table, write, rows)
    mine = copy_pools(pools)
    logits = run(step, padded, mine, 16)
    assert torch.equal(logits[[0, 2, 3]], expected)
    for a, b in zip(mine, expected_pools, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])
    mine = copy_pools(pools)
    run(step, StepTensors(tokens, positions, starts, table, torch.full_like(write, -1), rows), mine, 16)
    for a, b in zip(mine, pools, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_closer_than_bfloat16(built: tuple) -> None:
    """A forward pass that keeps everything in bfloat16 is farther from float32 than the kernel."""
    step, weights = built
    shape = step.plan.shape
    inputs, pools = make_case(shape, [[300]], 16, 10)
    expected_pools = copy_pools(pools)
    expected = reference_step(shape, weights, step.rotary, expected_pools, 16, inputs)[0]
    rounded = reference_step(shape, weights, step.rotary, copy_pools(pools), 16, inputs, torch.bfloat16)[0]
    logits = run(step, inputs, pools, 16)[0]
    assert (logits - expected).norm() < (rounded.float() - expected).norm()
