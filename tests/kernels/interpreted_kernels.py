"""Checks of the Triton kernels under Triton's interpreter, in float32.

test_kernels_interpreted.py runs them in a process of their own, since a process either interprets or compiles.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from expert_cases import check_experts
from filter_cases import filter_case
from kernel_cases import PagedCase, by_hand
from step_cases import check_begin, check_greedy

from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.device_step import DeviceStep
from lowlat.layers.rope import Rope
from lowlat.layers.triton import attention
from lowlat.layers.triton.activation import gated
from lowlat.layers.triton.attention_shape import AttentionShape
from lowlat.layers.triton.filtering import keep_likely
from lowlat.layers.triton.host import fetch
from lowlat.layers.triton.norm import add_rms_norm, rms_norm
from lowlat.layers.triton.product import product
from lowlat.layers.triton.rope_write import rope_write
from lowlat.layers.triton.rows import add_rows, look_up
from lowlat.layers.triton.slots import put_tokens, take_slots
from lowlat.layers.triton_ops import TritonOps
from lowlat.platform.cuda import CudaLinear

REFERENCE = ReferenceOps()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert not actual.isnan().any()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 48), (13, 300)])
def test_norms(rows, width):
    x, residual, weight = torch.randn(rows, width), torch.randn(rows, width) * 3, torch.randn(width)
    close(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5))
    total = x + residual
    close(add_rms_norm(x, residual, weight, 1e-5), F.rms_norm(total.double(), (width,), weight.double(), 1e-5))
    assert torch.equal(residual, total)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 1500)])
def test_rows_looked_up_and_added(rows, width):
    table, places = torch.randn(40, width), torch.randint(0, 40, (rows,))
    assert torch.equal(look_up(places, table), table[places])
    x, y, apart = torch.randn(rows, width), torch.randn(rows, width), torch.full((rows, 3, width), 7.0)
    add_rows(x, y, apart[:, 1])
    assert torch.equal(apart[:, 1], x + y)
    assert (apart[:, ::2] == 7.0).all()


@pytest.mark.parametrize(("rows", "width", "kind"), [(1, 5, "silu"), (3, 1027, "silu"), (2, 70, "gelu_pytorch_tanh")])
def test_gated_activation(rows, width, kind):
    packed = torch.randn(rows, 2 * width) * 4
    close(gated(packed, kind), REFERENCE.gate(packed.double(), kind))


@pytest.mark.parametrize(("rows", "outputs", "width", "bias"), [(1, 8, 16, False), (3, 30, 24, True), (4, 5, 70, True)])
def test_products(rows, outputs, width, bias):
    x, stream, norm = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    linear = CudaLinear(torch.randn(outputs, width), torch.randn(outputs) if bias else None)
    weights = (linear.weight_OI, linear.bias_O)
    result, passed = product(x, *weights)
    close(result, linear(x))
    assert passed is x
    result, total = product(x, *weights, stream_RI=stream, norm_I=norm, eps=1e-5, out_dtype=torch.float64)
    expected, stream_after = REFERENCE.add_norm_product(x, stream.clone(), norm, 1e-5, linear)
    assert result.dtype == torch.float64
    close(result, expected)
    assert torch.equal(total, stream_after)


@pytest.mark.parametrize(("rows", "activation"), [(3, "silu"), (1, "gelu_pytorch_tanh")])
def test_gated_products(rows, activation):
    x, stream, norm = torch.randn(rows, 40), torch.randn(rows, 40), torch.randn(40)
    linear = CudaLinear(torch.randn(2 * 21, 40), torch.randn(2 * 21))
    result, total = product(
        x, linear.weight_OI, linear.bias_O, stream_RI=stream, norm_I=norm, eps=1e-5, activation=activation
    )
    assert torch.equal(total, x + stream)
    close(result, REFERENCE.add_norm_product(None, total, norm, 1e-5, linear, activation)[0])


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_an_activation_without_a_norm(rows):
    """As ranks need it, who have normed the sum of their parts; of few rows in one kernel."""
    x, linear = torch.randn(rows, 40), CudaLinear(torch.randn(2 * 21, 40), torch.randn(2 * 21))
    result = TritonOps(4).product(x, linear, "silu", out_dtype=torch.float64)
    assert result.dtype == torch.float64
    close(result, REFERENCE.product(x, linear, "silu"))


@pytest.mark.parametrize(("vocabulary", "seed"), [(600, 1), (40, 2)])
def test_filters(vocabulary, seed):
    case = filter_case(vocabulary, seed)
    assert torch.equal(keep_likely(*case), REFERENCE.keep_likely(*case))


@pytest.mark.parametrize("slots", [[4], [2, 0, 1], [3, 5, 5]])
def test_slots(slots):
    """Slot 5 is the one of padding."""
    slots_B = torch.tensor(slots)
    lengths, tokens = torch.tensor([9, 0, 31, 7, 8, 0]), torch.arange(6) * 11
    pages = torch.randperm(6 * 8).to(torch.int32).view(6, 8)
    mine, theirs = (ops(slots_B, tokens, lengths, pages, 4) for ops in (take_slots, REFERENCE.take_slots))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    chosen = torch.tensor([-1, 70, 70][-len(slots) :])
    results = []
    for ops in (put_tokens, REFERENCE.put_tokens):
        state = tokens.clone(), lengths.clone()
        ops(slots_B, chosen, *state, 5)
        results.append(state)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("shape", [(1,), (3, 8), (0,), (1024,), (1025,)])
def test_tokens_on_the_host(shape):
    """The last is more than a launch stores."""
    source = torch.randint(-(1 << 62), 1 << 62, shape)
    assert torch.equal(fetch(source), source)
    assert torch.equal(fetch(source.float()), source.float())


@pytest.mark.parametrize(("slots", "window"), [([2], False), ([4, 0, 2, 6], True)])
def test_decodes_begin(slots, window):
    check_begin(slots, window, "cpu")


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 131), (6, 2500)])
def test_most_likely_tokens(rows, vocabulary):
    check_greedy(rows, vocabulary, "cpu")


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "kind", "biases"),
    [(1, 24, 40, "silu", False), (3, 40, 17, "gelu_pytorch_tanh", False), (2, 24, 24, "clamped", True)],
)
def test_experts(rows, hidden, inner, kind, biases):
    check_experts(rows, hidden, inner, kind, biases=biases, dtype=torch.float32, device="cpu", tolerance=2e-5)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rows"), [(4, 2, 8, 5), (3, 1, 24, 1), (8, 4, 24, 40)])
def test_rope_and_write(heads, kv_heads, dim, rows, norms):
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
    rope = Rope(dim, 10000.0, 64, None, torch.device("cpu"))
    slots = torch.randperm(48)[:rows]
    step = DeviceStep(torch.zeros(rows), torch.randint(0, 64, (rows,)), slots, [], slots, 1, None)
    given = (torch.randn(dim), torch.randn(dim), 1e-6) if norms else None
    pools = [torch.full((48, kv_heads, dim), float("nan")) for _ in range(4)]
    queries = rope_write(qkv, pools[0], pools[1], step.positions_R, slots, rope.tables, given)
    close(queries, REFERENCE.rope_write(qkv, pools[2], pools[3], step, rope.tables, given))
    for mine, theirs in ((pools[0], pools[2]), (pools[1], pools[3])):
        close(mine[slots], theirs[slots])
        others = torch.ones(48, dtype=torch.bool).index_fill_(0, slots, False)
        assert mine[others].isnan().all(), "a slot of nobody's was written"


@pytest.mark.parametrize(("layers", "kv_heads", "dim", "rows"), [(4, 3, 8, 5), (2, 4, 24, 30)])
def test_keys_of_all_layers_are_written_at_once(layers, kv_heads, dim, rows):
    kv = torch.randn(rows, layers, 2 * kv_heads, dim)
    rope, slots = Rope(dim, 10000.0, 64, None, torch.device("cpu")), torch.randperm(48)[:rows]
    step = DeviceStep(torch.zeros(rows), torch.randint(0, 64, (rows,)), slots, [], slots, 1, None)
    mine, theirs = ([torch.full((layers, 48, kv_heads, dim), float("nan")) for _ in range(2)] for _ in range(2))
    norms = torch.randn(layers, dim), 1e-6
    TritonOps(4).write_layers(kv, *mine, step, rope.tables, norms)
    REFERENCE.write_layers(kv, *theirs, step, rope.tables, norms)
    others = torch.ones(48, dtype=torch.bool).index_fill_(0, slots, False)
    for pool, expected in zip(mine, theirs, strict=True):
        close(pool[:, slots], expected[:, slots])
        assert pool[:, others].isnan().all(), "a slot of nobody's was written"


def run(case, segments, rule, out, programs, shape=None):
    paged = (case.q_RND, case.keys_SKD, case.values_SKD, case.table_TP, case.page_size)
    attention.attend(*paged, segments, rule, out, programs=programs, shape=shape)


CASES = [
    # lengths, rows, heads, kv heads, dim, page size, window, sinks
    ([1], [1], 2, 1, 16, 1, 0, False),
    ([331], [1], 4, 2, 16, 7, 0, False),
    ([270], [1], 4, 2, 16, 7, 0, True),
    ([5, 0, 260, 129], [1, 1, 1, 1], 4, 2, 8, 16, 0, True),
    ([300, 17], [1, 1], 3, 1, 24, 4, 70, True),
    ([7], [7], 4, 2, 16, 3, 0, False),
    ([200, 13, 0], [5, 11, 2], 4, 2, 16, 16, 0, True),
    ([150, 41], [23, 2], 2, 2, 16, 5, 20, False),
    ([500], [20], 1, 1, 16, 16, 400, False),
]


@pytest.mark.parametrize(("lengths", "rows", "heads", "kv_heads", "dim", "page", "window", "sinks"), CASES)
def test_attention(lengths, rows, heads, kv_heads, dim, page, window, sinks):
    case = PagedCase(
        lengths, rows, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page, window=window, seed=len(lengths)
    )
    rule = case.rule(window=window, sinks=sinks, scale=0.3 if sinks else None)
    expected = by_hand(case, rule)
    close(REFERENCE.attend(case.q_RND, case.keys_SKD, case.values_SKD, case.step, rule), expected.flatten(1))
    # One program takes all items in turn; many of them split the tokens.
    out = torch.full_like(case.q_RND, float("nan"))
    run(case, case.segments, rule, out, 1 if lengths == [331] else 23)
    close(out, expected)


ITEM_CASES = [
    # lengths, rows, items of each segment, heads, kv heads, dim, page size, window, sinks
    ([40], [16], [[3, 1, 8, 4]], 4, 2, 16, 4, 0, False),
    ([12], [12], [[5, 7]], 2, 1, 8, 4, 0, True),
    ([150, 90, 0, 33, 21], [40, 90, 3, 9, 21], [[8] * 5, [], [], [30], [4, 4, 2]], 4, 2, 16, 16, 0, True),
    ([300], [90], [[30, 1, 2, 57]], 2, 2, 16, 5, 0, False),
    ([60, 44, 70], [30, 20, 11], [[7, 3, 20], [], [25]], 4, 2, 16, 4, 9, True),
    ([64, 50], [40, 20], [[18, 22], [6, 6, 6]], 2, 1, 16, 8, 30, False),
]


@pytest.mark.parametrize(
    ("lengths", "rows", "items", "heads", "kv_heads", "dim", "page", "window", "sinks"), ITEM_CASES
)
def test_attention_of_items(lengths, rows, items, heads, kv_heads, dim, page, window, sinks):
    case = PagedCase(lengths, rows, heads=heads, kv_heads=kv_heads, dim=dim, page_size=page, window=window, items=items)
    rule = case.rule(window=window, sinks=sinks)
    expected = by_hand(case, rule)
    close(REFERENCE.attend(case.q_RND, case.keys_SKD, case.values_SKD, case.step, rule), expected.flatten(1))
    for programs in (1, 23):
        out = torch.full_like(case.q_RND, float("nan"))
        run(case, case.segments, rule, out, programs)
        close(out, expected)


def test_a_row_is_the_same_bits_beside_any_neighbours():
    case = PagedCase([200, 64, 9], [1, 1, 1], heads=2, kv_heads=1, dim=16, page_size=16)
    rule = case.rule()
    out = torch.empty_like(case.q_RND)
    run(case, case.segments, rule, out, 16)
    for index in range(3):
        alone = torch.full_like(case.q_RND, float("nan"))
        batch = case.segments
        one = type(batch)(
            *(part[index : index + 1] for part in (batch.slots_B, batch.first_B, batch.rows_B, batch.lengths_B)),
            1,
            batch.longest,
        )
        run(case, one, rule, alone, 16)
        assert torch.equal(alone[index], out[index])
        assert alone.isnan().any(-1).any(-1).sum() == 2, "rows of others were written"


@pytest.mark.parametrize(("least", "sinks"), [(1, False), (2, True)])
def test_loops_without_masks_leave_the_bits(least, sinks):
    """Lengths end with a tile, one behind it and amid a page; one request is padding, some have too few tiles."""
    case = PagedCase([300, 0, 32, 33, 96, 129], [1] * 6, heads=4, kv_heads=2, dim=16, page_size=8)
    rule = case.rule(sinks=sinks)
    plain = AttentionShape.of(2, 1, 16, 4, segments=6)
    results = []
    for shape in (plain, msgspec.structs.replace(plain, lean=least)):
        out = torch.full_like(case.q_RND, float("nan"))
        run(case, case.segments, rule, out, 4, shape)
        results.append(out)
    close(results[0], by_hand(case, rule))
    assert torch.equal(*results)


def test_long_requests_are_split_over_the_programs():
    """Not only correct: the partial results of a lone long request come from as many splits as there are programs."""
    case = PagedCase([1024], [1], heads=4, kv_heads=2, dim=16, page_size=16)
    seen = []
    original = attention.attend_kernel
    attention.attend_kernel = Spy(original, seen)
    try:
        out = torch.empty_like(case.q_RND)
        run(case, case.segments, case.rule(), out, 16)
    finally:
        attention.attend_kernel = original
    (grid, sums, most), *_ = seen
    assert grid == (16,)
    assert most == 8
    written = (sums.view(-1, 2, 16, 2)[:, :, 0, 1] > 0).all(-1)
    assert written.tolist() == [True] * 8


class Spy:
    """A kernel that keeps its grid and its sums, which start as zeros."""

    def __init__(self, kernel, seen):
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            sums = arguments[11].zero_()
            self.kernel[grid](*arguments, **options)
            self.seen.append((grid, sums, options["MOST"]))

        return launch


@pytest.mark.parametrize(("ranks", "rows", "width"), [(2, 3, 48), (4, 1, 70)])
def test_pushed_reductions(ranks, rows, width):
    """Ranks one after another: the first runs push, and all but the last miss words and say so; the second run of each
    finds everybody's words. Sums are exact here, so they must be the same bits as PyTorch's."""
    from lowlat.layers.triton.push_reduce import memory_bytes, push_reduce_norm

    memories = [torch.zeros(memory_bytes(ranks, rows + 1, width), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    weight = torch.randn(width).bfloat16()
    for call in range(3):
        parts = [torch.randint(-64, 65, (rows, width)).bfloat16() / 8 for _ in range(ranks)]
        residual = torch.randn(rows, width).bfloat16()
        total = sum(part.float() for part in parts).bfloat16() + residual
        expected = F.rms_norm(total.float(), (width,), weight.float(), 1e-5).bfloat16()
        alarms = []
        for rank in [*range(ranks), *range(ranks)]:
            alarm, stream = torch.zeros(1, dtype=torch.int32), residual.clone()
            tags = torch.full((rows + 1,), 5 + call, dtype=torch.int32)
            out = push_reduce_norm(
                parts[rank], stream, weight, 1e-5, memories=addresses, tags=tags, alarm=alarm, rank=rank,
                deadline_s=1.0, plain=True,
            )  # fmt: skip
            alarms.append(int(alarm))
            assert tags.tolist() == [6 + call] * rows + [5 + call]
            broken = [int(memory[:4].view(torch.int32)) for memory in memories]
            assert broken == [int(alarm)] * ranks, "every rank hears of it"
            for memory in memories:
                memory[:4].zero_()
            if len(alarms) < ranks:
                assert out.isnan().all()
            else:
                assert torch.equal(stream, total)
                torch.testing.assert_close(out.float(), expected.float(), rtol=0.01, atol=0.01)
        assert alarms == [6 + call] * (ranks - 1) + [0] * (ranks + 1)


def test_nobody_waits_after_a_miss():
    """Where a memory's first word says that a rank was lost, results are NaN though all words are there."""
    from lowlat.layers.triton.push_reduce import memory_bytes, push_reduce_norm

    memories = [torch.zeros(memory_bytes(2, 1, 8), dtype=torch.uint8) for _ in range(2)]
    memories[0][:4].view(torch.int32).fill_(3)
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    ones = torch.ones(1, 8).bfloat16()
    for rank in (1, 0):
        alarm = torch.zeros(1, dtype=torch.int32)
        out = push_reduce_norm(
            ones, ones.clone(), ones[0], 1e-5, memories=addresses, tags=torch.zeros(1, dtype=torch.int32), alarm=alarm,
            rank=rank, deadline_s=1.0, plain=True,
        )  # fmt: skip
    assert int(alarm) == 1
    assert out.isnan().all()
    assert int(memories[1][:4].view(torch.int32)) == 1


@pytest.mark.parametrize(("ranks", "rows", "columns"), [(2, 3, 50), (3, 2, 1500)])
def test_pushed_picks(ranks, rows, columns):
    """As `argmax` of all columns, ties included; rows that hold NaN or nothing finite give -1."""
    from lowlat.layers.triton.push_pick import pick_bytes, push_pick

    offset = 512
    memories = [torch.zeros(offset + pick_bytes(ranks, rows + 2), dtype=torch.uint8) for _ in range(ranks)]
    addresses = torch.tensor([memory.data_ptr() for memory in memories])
    for call in range(4):
        logits = torch.randint(-9, 10, (rows, ranks * columns)).float()
        expected = logits.argmax(-1)
        if call == 2:
            logits[0, -1], logits[1] = float("nan"), float("-inf")
            expected[:2] = -1
        for rank in [*range(ranks), *range(ranks)]:
            alarm, newest = torch.zeros(1, dtype=torch.int32), torch.full((9,), -9)  # no token
            tags = torch.full((rows + 2,), call, dtype=torch.int32)
            slots = torch.tensor([6, 1, 4][:rows])
            mine = logits[:, rank * columns : (rank + 1) * columns].contiguous()
            got = push_pick(
                mine, rank * columns, slots, newest, memories=addresses, offset=offset, tags=tags, alarm=alarm,
                rank=rank, deadline_s=1.0, plain=True,
            )  # fmt: skip
            for memory in memories:
                memory[:4].zero_()
        assert int(alarm) == 0
        assert got.tolist() == expected.tolist()
        assert newest[slots].tolist() == expected.clamp(min=0).tolist()
        assert (newest == -9).sum() == 9 - rows
        assert tags.tolist() == [call + 1] * rows + [call] * 2
