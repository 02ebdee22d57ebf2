"""The Triton kernels of the general path on a GPU, in float32 and bfloat16, against float64 references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

# Kernels sum in float32 and round once to the type: half a unit in the last place, and the error of the sums.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert not actual.isnan().any()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2048), (8, 4096), (513, 1024), (7, 100)])
def test_norms(rows, width, dtype):
    from lowlat.layers.triton.norm import add_rms_norm, rms_norm

    x, residual = (torch.randn(rows, width, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(width, device="cuda").to(dtype)
    close(rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (width,), weight.double(), 1e-5), dtype)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    close(normed, F.rms_norm(total.double(), (width,), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh"])
def test_gated_activation(kind, dtype):
    from lowlat.layers.device_reference import ReferenceOps
    from lowlat.layers.triton.activation import gated

    packed = (torch.randn(5, 2 * 8192 + 6, device="cuda") * 3).to(dtype)
    close(gated(packed, kind), ReferenceOps().gate(packed.double(), kind), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("outputs", "width", "activation", "bias"),
    [
        (3072, 2048, None, False),
        (1024, 2048, None, False),
        (1000, 576, None, True),
        (4096, 12288, None, False),
        (3000, 1024, "silu", False),
        (8192, 4096, "gelu_pytorch_tanh", True),
    ],
)
def test_products_of_few_rows(outputs, width, activation, bias, dtype):
    """Against float64; and a row is the same bits beside any others, started early or not."""
    from lowlat.layers.device_reference import ReferenceOps
    from lowlat.layers.triton.early import starts_early
    from lowlat.layers.triton.product import product
    from lowlat.platform.cuda import CudaLinear

    features = outputs * (1 if activation is None else 2)
    weight = (torch.randn(features, width, device="cuda") / width**0.5).to(dtype)
    bias_O = torch.randn(features, device="cuda").to(dtype) if bias else None
    x, stream = (torch.randn(4, width, device="cuda").to(dtype) for _ in range(2))
    norm = torch.randn(width, device="cuda").to(dtype)
    wide = CudaLinear(weight.double(), None if bias_O is None else bias_O.double())
    before = {"stream_RI": stream, "norm_I": norm, "eps": 1e-5, "activation": activation}
    early = starts_early(torch.device("cuda"))
    result, total = product(x, weight, bias_O, **before, early_start=early)
    assert torch.equal(total, x + stream)
    expected, _ = ReferenceOps().add_norm_product(None, total.double(), norm.double(), 1e-5, wide, activation)
    close(result, expected, dtype)
    for rows in (1, 2, 3):
        part = {**before, "stream_RI": stream[4 - rows :].contiguous()}
        again, _ = product(x[4 - rows :].contiguous(), weight, bias_O, **part)
        assert torch.equal(again, result[4 - rows :])
    if activation is None:
        close(product(x, weight, bias_O, early_start=early)[0], wide(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "kind", "biases"),
    [(1, 2048, 768, "silu", False), (16, 1024, 3000, "gelu_pytorch_tanh", False), (3, 2880, 2880, "clamped", True)],
)
def test_experts_are_found_on_the_device(rows, hidden, inner, kind, biases, dtype):
    from expert_cases import check_experts

    options = {"biases": biases, "dtype": dtype, "device": "cuda", "early_start": True}
    check_experts(rows, hidden, inner, kind, tolerance=TOLERANCE[dtype] * 2, **options)


def test_decode_steps_begin_and_end():
    from step_cases import check_begin, check_greedy

    for slots, window in (([2], False), ([4, 0, 2, 6], True)):
        check_begin(slots, window, "cuda")
    for rows, vocabulary in ((1, 128256), (6, 151936), (16, 1000)):
        check_greedy(rows, vocabulary, "cuda", early_start=True)


def test_kernels_that_start_early_read_what_was_written_before():
    """A long chain in a graph, where each product needs the one before it, replayed often: always the same bits as one
    kernel after another."""
    from lowlat.layers.triton.product import product

    weights = [(torch.randn(512, 512, device="cuda") / 512**0.5).bfloat16() for _ in range(4)]
    norm = torch.ones(512, device="cuda").bfloat16()
    start = torch.randn(2, 512, device="cuda").bfloat16()

    def chain(early):
        x, stream = start, start * 0.5
        for place in range(64):
            x, stream = product(x, weights[place % 4], stream_RI=stream, norm_I=norm, eps=1e-5, early_start=early)
        return x

    expected = chain(False)
    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 64), (16, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rows", [11, 50])
def test_rope_and_write(rows, heads, kv_heads, dim, norms, dtype):
    from lowlat.layers.device_reference import ReferenceOps
    from lowlat.layers.device_step import DeviceStep
    from lowlat.layers.rope import Rope
    from lowlat.layers.triton.rope_write import rope_write

    slots = torch.randperm(64, device="cuda")[:rows]
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim, device="cuda").to(dtype)
    rope = Rope(dim, 500000.0, 4096, None, torch.device("cuda"))
    positions = torch.randint(0, 4096, (rows,), device="cuda")
    step = DeviceStep(positions, positions, slots, [], positions, 1, None)
    given = (torch.randn(dim, device="cuda").to(dtype), torch.randn(dim, device="cuda").to(dtype), 1e-6)
    pools = [torch.full((64, kv_heads, dim), float("nan"), device="cuda", dtype=dtype) for _ in range(2)]
    exact = [torch.full((64, kv_heads, dim), float("nan"), device="cuda", dtype=torch.float64) for _ in range(2)]
    queries = rope_write(qkv, *pools, positions, slots, rope.tables, given if norms else None)
    wide = (given[0].double(), given[1].double(), 1e-6) if norms else None
    close(queries, ReferenceOps().rope_write(qkv.double(), *exact, step, rope.tables, wide), dtype)
    for mine, theirs in zip(pools, exact, strict=True):
        close(mine[slots], theirs[slots], dtype)
        others = torch.ones(64, dtype=torch.bool, device="cuda").index_fill_(0, slots, False)
        assert mine[others].isnan().all()


NEW_ROWS = [
    # width, heads, kv heads, dim, page, window, sinks, norms, draft; tokens in the cache, new rows
    ((7, 9, 3, 64, 16), [512], [7]),
    ((6, 9, 3, 64, 16, 256, False, True, True), [0, 1, 63, 1500], [6, 6, 0, 6]),
    ((8, 32, 8, 128, 16, 0, False, True), [20_000, 64], [8, 3]),
    ((2, 16, 8, 128, 1), [65, 900, 7, 0], [2, 1, 2, 2]),
    ((8, 64, 8, 64, 16, 128, True), [3000, 100], [8, 8]),
    ((16, 8, 4, 64, 7, 5), [200], [11]),
    ((1, 9, 3, 64, 16), [512, 63, 0, 5, 8000, 65, 1, 64], [1, 1, 1, 0, 1, 1, 1, 1]),
    ((1, 32, 8, 64, 16), [100_000, 777], [1, 1]),
    ((1, 32, 8, 128, 16, 0, False, True), [131_071], [1]),
    ((1, 64, 8, 64, 1, 128, True), [3001, 100, 19], [1, 1, 1]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "before", "rows"), NEW_ROWS, ids=str)
@pytest.mark.parametrize("early", [False, True])
def test_attention_of_new_rows(shape, before, rows, early, dtype):
    from row_cases import RowCase, Shape, check_new_rows

    programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    case = RowCase(Shape(*shape), before, rows, "cuda", dtype)
    check_new_rows(case, programs=programs, tolerance=TOLERANCE[dtype], early_start=early)


def test_attention_of_one_row_is_the_same_bits_beside_any_requests():
    from row_cases import RowCase, Shape

    from lowlat.layers.triton_ops import EVERY, TritonOps

    before = [40_000, 513, 64, 7, 0, 3000, 9, 1200]
    case = RowCase(Shape(1, 32, 8, 128, 16, norms=True), before, [1] * 8, "cuda", torch.bfloat16).moved()
    ops = TritonOps(torch.cuda.get_device_properties(0).multi_processor_count, early_start=True)
    older = case.run(ops)
    ops.one_row_attention = EVERY
    together, batch = case.run(ops), case.step.segments[0]
    close(together, older, torch.bfloat16)
    assert not torch.equal(together, older), "not the kernels"
    for index in range(8):
        for last in (index + 1, min(8, index + 2), min(8, index + 4)):
            parts = (batch.slots_B, batch.first_B, batch.rows_B, batch.lengths_B)
            case.step.segments = [type(batch)(*(part[index:last] for part in parts), 1, batch.longest)]
            assert torch.equal(case.run(ops)[index:last], together[index:last])


@pytest.mark.parametrize("rows", [7, 1])
def test_attention_of_new_rows_reads_what_was_written_before(rows):
    """A step's chain in a graph, replayed often with other rows: the bits of one kernel after another. What a kernel
    reads before it waits is written anew in every replay."""
    from row_cases import RowCase, Shape

    from lowlat.layers.triton.product import product
    from lowlat.layers.triton.row_attention import row_attend
    from lowlat.layers.triton.row_product import row_product
    from lowlat.layers.triton.rows import look_up

    case = RowCase(Shape(rows, 9, 3, 64, 16), [500], [rows], "cuda", torch.bfloat16).moved()
    width, packed, multiply = 9 * 64, 15 * 64, row_product if rows > 1 else product
    weights = [(torch.randn(size, width, device="cuda") / width**0.5).bfloat16() for size in (packed, width)]
    table = torch.randn(50, width, device="cuda").bfloat16()
    norm = torch.ones(width, device="cuda").bfloat16()
    tokens, lengths = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (rows, 1))
    pools = [(case.keys_SKD.clone(), case.values_SKD.clone()) for _ in range(12)]

    def chain(pause):
        # As `begin_rows` does: the lengths that all layers read are this step's.
        case.step.segments[0].lengths_B.copy_(lengths)
        pause()
        stream, x = look_up(tokens, table, early_start=True), None
        pause()
        for keys, values in pools:
            first, kept = (stream, None) if x is None else (x, stream)
            qkv, stream = multiply(first, weights[0], stream_RI=kept, norm_I=norm, eps=1e-5, early_start=True)
            pause()
            mixed = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
            where = (keys, values, case.step, case.step.segments[0], case.tables, None, case.rule, mixed)
            row_attend(qkv.view(rows, 15, 64), *where, programs=264, early_start=True)
            pause()
            x, _ = multiply(mixed, weights[1], early_start=True)
            pause()
        return x

    lengths.fill_(500 + rows)
    chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    different = set()
    for turn in range(40):
        tokens.copy_(torch.randint(0, 50, (rows,), device="cuda"))
        lengths.fill_(500 + rows - turn % 3 * 40)
        expected = chain(torch.cuda.synchronize).clone()
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        different.add(float(expected.float().sum()))
    assert len(different) > 30


CASES = [
    # lengths, rows, heads, kv heads, dim, page size, window, sinks
    ([1], [1], 32, 8, 64, 1, 0, False),
    ([1024], [1], 32, 8, 64, 16, 0, False),
    ([20011], [1], 32, 8, 128, 16, 0, False),
    ([5, 0, 2600, 64, 129, 1, 777, 4096], [1] * 8, 16, 8, 128, 16, 0, True),
    ([3000, 17], [1, 1], 9, 3, 64, 7, 700, True),
    ([1, 900], [1, 1], 8, 4, 256, 16, 0, False),
    ([700], [700], 16, 8, 128, 16, 0, False),
    ([5000, 13, 0], [130, 13, 2], 32, 8, 64, 16, 0, True),
    ([4100, 900], [512, 3], 9, 3, 64, 16, 512, False),
    ([600], [37], 4, 2, 256, 16, 0, False),
]


LLAMA = {"heads": 32, "kv_heads": 8, "dim": 64, "page_size": 16, "device": "cuda"}


def attend(case, rule, out=None):
    from lowlat.layers.triton import attention

    out = torch.full_like(case.q_RND, float("nan")) if out is None else out
    programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    paged = (case.q_RND, case.keys_SKD, case.values_SKD, case.table_TP, case.page_size)
    attention.attend(*paged, case.segments, rule, out, programs=programs)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lengths", "rows", "heads", "kv_heads", "dim", "page", "window", "sinks"), CASES)
def test_attention(lengths, rows, heads, kv_heads, dim, page, window, sinks, dtype):
    from kernel_cases import PagedCase

    from lowlat.layers.device_reference import ReferenceOps

    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page, "window": window}
    case = PagedCase(lengths, rows, dtype=dtype, device="cuda", **shape)
    rule = case.rule(window=window, sinks=sinks)
    wide = case.q_RND.double(), case.keys_SKD.double(), case.values_SKD.double()
    expected = ReferenceOps().attend(*wide, case.step, rule).view_as(case.q_RND)
    # In bfloat16 the weights are rounded before they meet the values, so errors are those of the largest value.
    close(attend(case, rule), expected, dtype)
    assert torch.equal(attend(case, rule), attend(case, rule)), "the same bits every time"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_row_is_the_same_bits_beside_any_neighbours(dim, dtype):
    """By fewer registers than alone, which four rows have with heads of 128, and without masks, with heads of 64."""
    from kernel_cases import PagedCase

    case = PagedCase(
        [3300, 64, 9, 1200], [1] * 4, heads=32, kv_heads=8, dim=dim, page_size=16, dtype=dtype, device="cuda"
    )
    together = attend(case, case.rule())
    batch = case.segments
    for index in range(4):
        parts = (batch.slots_B, batch.first_B, batch.rows_B, batch.lengths_B)
        case.segments = type(batch)(*(part[index : index + 1] for part in parts), 1, batch.longest)
        assert torch.equal(attend(case, case.rule())[index], together[index])


@pytest.mark.parametrize(("dim", "norms", "page"), [(128, False, 16), (128, True, 16), (128, True, 64)])
def test_loops_without_masks_leave_the_bits(dim, norms, page):
    """Of one request, two and many against loops with masks; the cache, too. Lengths end with a
    tile, one behind it and amid a page, one request is padding, and splits of the long ones end amid a page."""
    import msgspec
    from row_cases import RowCase, Shape

    from lowlat.layers.triton.row_attention import RowShape, row_attend

    before = [9000, 0, 63, 64, 65, 128, 129, 4567, 448, 449, 20_001, 1]
    case = RowCase(Shape(1, 32, 8, dim, page, norms=norms), before, [1] * 11 + [0], "cuda", torch.bfloat16)
    every = case.moved().step.segments[0]

    def result(first, last, *, masked=False):
        mine = case.moved()
        parts = (every.slots_B, every.first_B, every.rows_B, every.lengths_B)
        batch = type(every)(*(part[first:last].clone() for part in parts), 1, every.longest)
        shape = RowShape.of(4, 1, dim, 2, page, 0)
        assert shape.lean
        if masked:
            shape = msgspec.structs.replace(shape, lean=False, stages=5)
        out = torch.full((len(before), 32 * dim), float("nan"), dtype=torch.bfloat16, device="cuda")
        where = (mine.step, batch, mine.tables, mine.norms, mine.rule, out)
        pools = (mine.keys_SKD, mine.values_SKD)
        row_attend(mine.qkv_RYD, *pools, *where, programs=264, early_start=True, shape=shape)
        return out[first:last], *(pool.nan_to_num(9e9) for pool in pools)

    masked = result(0, 12, masked=True)
    assert not masked[0].isnan().any()
    assert not masked[0][11].any()
    assert all(map(torch.equal, result(0, 12), masked))
    for first, last in [(index, index + 1) for index in range(12)] + [(0, 2), (4, 6), (10, 12), (7, 10)]:
        assert torch.equal(result(first, last)[0], masked[0][first:last])


@pytest.mark.parametrize(("group", "page"), [(4, 16), (4, 64), (3, 1)])
def test_loops_of_many_requests_without_masks_leave_the_bits(group, page):
    """With heads of 64. Lengths as above."""
    import msgspec
    from kernel_cases import PagedCase

    from lowlat.layers.triton.attention import attend as launch
    from lowlat.layers.triton.attention_shape import AttentionShape

    lengths = [9000, 0, 63, 64, 65, 128, 129, 4567, 448, 449, 100_001, 1]
    shape = {"heads": 8 * group, "kv_heads": 8, "dim": 64, "page_size": page, "device": "cuda"}
    case = PagedCase(lengths, [1] * len(lengths), dtype=torch.bfloat16, **shape)
    chosen = AttentionShape.of(group, 1, 64, 2, segments=len(lengths), page_size=page)
    assert (chosen.lean, chosen.stages) == (2, 3)
    results = [attend(case, case.rule())]
    for other in (chosen, msgspec.structs.replace(chosen, lean=1), msgspec.structs.replace(chosen, lean=0, stages=2)):
        out = torch.full_like(case.q_RND, float("nan"))
        paged = (case.q_RND, case.keys_SKD, case.values_SKD, case.table_TP, page)
        programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
        launch(*paged, case.segments, case.rule(), out, programs=programs, shape=other)
        results.append(out)
    assert not results[0].isnan().any()
    assert not results[0][1].any()
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_one_capture_serves_every_length():
    from kernel_cases import PagedCase

    from lowlat.layers.device_reference import ReferenceOps

    case = PagedCase(
        [131072, 70000], [1, 1], heads=32, kv_heads=8, dim=64, page_size=16, dtype=torch.bfloat16, device="cuda"
    )
    rule, out = case.rule(), torch.zeros_like(case.q_RND)
    attend(case, rule, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case, rule, out)
    for lengths in ([131072, 1], [17, 70000], [0, 4097]):
        case.segments.lengths_B.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        wide = case.q_RND.double(), case.keys_SKD.double(), case.values_SKD.double()
        case.segments.longest = max(lengths)
        close(out, ReferenceOps().attend(*wide, case.step, rule).view_as(out), torch.bfloat16)
