"""Attention compiles for GPUs that are not here, in each of its shapes, within its registers and memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements/triton.txt")

from compile_kit import CUOBJDUMP, SHARED, TARGETS, compiled, resources  # noqa: E402

from lowlat.layers.attention import AttentionRule  # noqa: E402
from lowlat.layers.device_step import DeviceStep, ItemSegments, RowSegments  # noqa: E402
from lowlat.layers.triton import attention, attention_shape, row_attention  # noqa: E402


def attend_arguments(
    dtype: str, group: int, dim: int, most_rows: int, lanes: int, kind: str, segments: int = 1
) -> tuple[dict[str, str], dict[str, Any], Any]:
    size, tight = 4 if dtype == "fp32" else 2, kind in ("checks", "draft")
    given = {"segments": segments, "lanes": lanes, "tight": tight, "page_size": 16 if kind == "plain" else 0}
    shape = attention_shape.AttentionShape.of(group, most_rows, dim, size, **given)
    pointers = ["q_ptr", "keys_ptr", "values_ptr", "out_ptr"]
    types = dict.fromkeys(pointers, f"*{dtype}") | {"sinks_ptr": f"*{dtype}", "partial_ptr": "*fp32"}
    integers = ["table_ptr", "slots_ptr", "first_ptr", "rows_ptr", "lengths_ptr", "prefix_ptr", "begins_ptr"]
    types |= dict.fromkeys(integers, "*i32") | {"sums_ptr": "*fp32", "scale": "fp32"}
    types |= {"segments": "i32", "table_stride": "i32", "block_base": "i32"}
    constants = {
        "WINDOW": 0, "MOST": 33, "KV_HEADS": 8, "GROUP": group, "DIM": dim, "PAGE": 16, "SINKS": False,
        "ITEMS": kind == "items", "SINGLE": most_rows == 1 or tight,
        "BLOCK_B": 8, "BLOCK_Q": shape.block_q, "BLOCK_M": shape.block_m, "BLOCK_L": shape.block_l,
        "BLOCK_D": triton.next_power_of_2(dim), "MIN_CHUNK": attention.MIN_CHUNK, "DRAFT": kind == "draft",
        "SIFTED": kind != "draft" and most_rows > shape.block_q, "LEAN": shape.lean,
        "STAGES": shape.masked_stages, "EARLY": lanes == 32,
    }  # fmt: skip
    return types, constants, shape


ATTENTION = [
    # dtype, heads of a group, head dimension, rows of a segment, kind of step, targets
    ("bf16", 4, 64, 1, "plain", ["sm_90", "sm_100", "gfx950"]),
    ("bf16", 4, 128, 1, "plain", ["sm_90", "sm_100", "gfx950"]),
    ("bf16", 4, 128, 512, "plain", ["sm_90", "sm_100", "gfx950"]),
    ("bf16", 4, 128, 512, "items", ["sm_90", "gfx950"]),
    ("bf16", 2, 128, 512, "plain", ["sm_90"]),
    ("bf16", 2, 128, 512, "items", ["sm_90"]),
    ("bf16", 2, 256, 1, "plain", ["sm_90"]),
    ("bf16", 2, 256, 512, "items", ["sm_90"]),
    ("fp32", 3, 64, 1, "plain", ["sm_90"]),
    ("fp32", 3, 64, 512, "items", ["sm_90"]),
    ("bf16", 3, 64, 8, "checks", ["sm_90", "sm_100", "gfx950"]),
    ("bf16", 4, 128, 8, "checks", ["sm_90"]),
    ("bf16", 3, 64, 6, "draft", ["sm_90", "sm_100", "gfx950"]),
    ("fp32", 3, 64, 8, "draft", ["sm_90"]),
]


@pytest.mark.parametrize(
    ("dtype", "group", "dim", "rows", "kind", "target"),
    [(*case, target) for *case, targets in ATTENTION for target in targets],
)
def test_attention_fits(dtype, group, dim, rows, kind, target, tmp_path):
    types, constants, shape = attend_arguments(dtype, group, dim, rows, TARGETS[target].warp_size, kind)
    kernel = compiled(attention.attend_kernel, target, types, constants, num_warps=shape.warps, num_stages=shape.stages)
    registers, spilled, shared = resources(kernel, target, tmp_path)
    assert spilled <= (8 if (kind == "items" and dim > 128) or (rows == 1 and target == "sm_100") else 0)
    if target != "gfx950":
        # A processor has 65,536 registers, and decode wants two programs on each.
        assert registers * 32 * shape.warps * (2 if rows == 1 else 1) <= 65536
    assert shared <= SHARED[target] // (2 if rows == 1 else 1)
    if dtype == "bf16":
        text = kernel.asm["amdgcn" if target == "gfx950" else "ptx"]
        assert re.search(r"v_mfma_f32\S*bf16|(mma|wgmma|tcgen05)\S*\.sync\S*bf16|tcgen05\.mma", text), "no matrix unit"


def four_programs(group: int, dim: int, target: str, folder: Path) -> tuple[dict[str, Any], int, int, int]:
    """Attention of three requests, of which four programs have room on a processor, and whose loop over tokens has all
    that it needs in registers: its constants, its limit of registers, bytes that spill elsewhere, shared memory."""
    types, constants, shape = attend_arguments("bf16", group, dim, 1, 32, "plain", segments=3)
    limit = attention_shape.register_limit(some_segments(3), shape, dim, 2)
    options = {"num_warps": shape.warps, "num_stages": shape.stages} | ({"maxnreg": limit} if limit else {})
    kernel = compiled(attention.attend_kernel, target, types, constants, **options)
    registers, spilled, shared = resources(kernel, target, folder)
    assert registers * 32 * shape.warps * 4 <= 65536
    assert (shared + 1024) * 4 <= 228 * 1024
    assert not spills_of_tokens(folder / "kernel.cubin")
    return constants, limit, spilled, shared


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("group", "dim"), [(2, 128), (4, 128), (8, 128), (16, 128), (4, 80)])
def test_attention_of_many_requests_fits(group, dim, target, tmp_path):
    constants, limit, spilled, _ = four_programs(group, dim, target, tmp_path)
    assert (constants["LEAN"], limit) == (0, 128)
    assert spilled <= (8 if dim == 128 else 16)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("group", [2, 3, 4, 8])
def test_attention_of_many_requests_without_masks_fits(group, target, tmp_path):
    """Of heads of 64: a tile is under way besides the one that is looked at."""
    constants, limit, spilled, shared = four_programs(group, 64, target, tmp_path)
    assert (constants["LEAN"], limit) == (2, 0)
    assert shared >= 2 * 2 * 64 * 64 * 2
    assert spilled <= (0 if target == "sm_90" else 8)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (3, 2)),
        ({"segments": 256}, (3, 2)),
        ({"page_size": 1}, (3, 2)),
        ({"page_size": 64}, (3, 2)),
        # With masks: windows, items and drafts (0), pages that end amid a tile, few requests, and what has no room.
        ({"page_size": 0}, (2, 0)),
        ({"page_size": 12}, (2, 0)),
        ({"page_size": 128}, (2, 0)),
        ({"segments": 2}, (5, 0)),
        ({"dim": 128}, (2, 0)),
        ({"dim": 32}, (2, 0)),
        ({"group": 32}, (2, 0)),
        ({"size": 4}, (2, 0)),
        ({"lanes": 64}, (2, 0)),
        ({"rows": 2, "tight": True}, (2, 0)),
    ],
)
def test_shapes_of_many_requests(changed, expected):
    case = {"group": 4, "rows": 1, "dim": 64, "size": 2, "segments": 3, "page_size": 16} | changed
    sizes = [case.pop(name) for name in ("group", "rows", "dim", "size")]
    shape = attention_shape.AttentionShape.of(*sizes, **case)
    assert (shape.stages, shape.lean) == expected


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({}, 128),
        ({"segments": 256}, 128),
        ({"dim": 80}, 128),
        ({"segments": 2}, 0),
        ({"dim": 64}, 0),
        ({"dim": 256}, 0),
        ({"group": 32}, 0),
        ({"rows": 2}, 0),
        ({"size": 4}, 0),
        ({"plain": False}, 0),
        ({"lanes": 64}, 0),
    ],
)
def test_limits_of_registers(changed, limit):
    case = {"group": 4, "dim": 128, "size": 2, "segments": 3, "rows": 1, "lanes": 32, "plain": True} | changed
    group, dim, size, segments, rows, lanes, plain = case.values()
    shape = attention_shape.AttentionShape.of(group, rows, dim, size, segments=segments, lanes=lanes)
    found = attention_shape.register_limit(some_segments(segments, rows), shape, dim, size, plain=plain, lanes=lanes)
    assert found == limit


class Launches:
    """Stands for a kernel and notes what it is launched with."""

    def __init__(self, *options: str) -> None:
        self.options, self.found = options, []

    def __getitem__(self, grid):
        return lambda *args, **given: self.found.append(tuple(given.get(option) for option in self.options))


@pytest.mark.parametrize(
    ("dim", "requests", "changed", "expected"),
    [
        (128, 3, {}, (128, 2, 0)),
        (128, 2, {}, (None, 5, 0)),
        (64, 3, {}, (None, 3, 2)),
        (64, 2, {}, (None, 5, 0)),
        (64, 3, {"window": 70}, (None, 2, 0)),
        (64, 3, {"items": True}, (None, 2, 0)),
        (64, 3, {"block_base": 0}, (None, 2, 0)),
        (64, 3, {"page": 12}, (None, 2, 0)),
        # A compiler for warps of 64 lanes refuses a limit of registers; two programs with five stages have no room.
        (128, 3, {"hip": "7.0"}, (None, 2, 0)),
        (128, 2, {"hip": "7.0"}, (None, 3, 0)),
        (64, 3, {"hip": "7.0"}, (None, 2, 0)),
    ],
)
def test_what_attention_is_launched_with(monkeypatch, dim, requests, changed, expected):
    """Registers, stages, and from how many tiles on there are no masks: none where a row does not see all before it."""
    kernel = Launches("maxnreg", "num_stages", "LEAN")
    monkeypatch.setattr(torch.version, "hip", changed.get("hip"))
    monkeypatch.setattr(attention, "attend_kernel", kernel)
    q_RND, keys_SKD = (torch.zeros(requests, heads, dim, dtype=torch.bfloat16) for heads in (8, 2))
    segments, each = some_segments(requests), torch.zeros(requests, dtype=torch.int32)
    if "items" in changed:
        segments = msgspec.structs.replace(segments, items=ItemSegments(each, each))
    given = (q_RND, keys_SKD, keys_SKD, torch.zeros(requests, 1, dtype=torch.int32), changed.get("page", 16), segments)
    rule = AttentionRule(window=changed.get("window", 0))
    attention.attend(*given, rule, q_RND, programs=2, block_base=changed.get("block_base", -1))
    assert kernel.found == [expected]


def test_only_rows_that_see_all_before_them_go_without_masks():
    q_RND, keys_SKD = (torch.zeros(3, heads, 64, dtype=torch.bfloat16) for heads in (8, 2))
    shape = attention_shape.AttentionShape.of(4, 1, 64, 2, segments=3, page_size=16)
    given = (q_RND, keys_SKD, keys_SKD, torch.zeros(3, 1, dtype=torch.int32), 16, some_segments(3))
    with pytest.raises(AssertionError):
        attention.attend(*given, AttentionRule(window=70), q_RND, programs=2, shape=shape)


@pytest.mark.parametrize(("hip", "expected"), [(None, (6, True)), ("7.0", (3, False))])
def test_what_attention_of_new_rows_is_launched_with(monkeypatch, hip, expected):
    kernel = Launches("num_stages", "LEAN")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(row_attention, "row_attend_kernel", kernel)
    monkeypatch.setattr(row_attention, "join_kernel", Launches())
    qkv_RYD, pool_SKD = (torch.zeros(1, heads, 64, dtype=torch.bfloat16) for heads in (12, 2))
    one, tables = torch.zeros(1, dtype=torch.int64), (torch.zeros(1, 64), torch.zeros(1, 64))
    step = DeviceStep(one, one, one, [some_segments(1)], one.view(1, 1).int(), 16, None)
    out_RX = torch.zeros(1, 8 * 64, dtype=torch.bfloat16)
    given = (qkv_RYD, pool_SKD, pool_SKD, step, some_segments(1), tables, None, AttentionRule(), out_RX)
    row_attention.row_attend(*given, programs=8)
    assert kernel.found == [expected]


def some_segments(count: int, rows: int = 1) -> RowSegments:
    each = torch.zeros(count, dtype=torch.int32)
    return RowSegments(each, each, each, each, most_rows=rows, longest=9)


def new_rows_arguments(
    dtype: str, group: int, dim: int, rows: int, block_l: int, **constants: Any
) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
    """Types of arguments, constants of both kernels, and those of the first alone."""
    floats = ["qkv_ptr", "keys_ptr", "values_ptr", "query_norm_ptr", "key_norm_ptr", "sinks_ptr", "out_ptr"]
    integers = ["table_ptr", "slots_ptr", "first_ptr", "rows_ptr", "lengths_ptr"]
    types = dict.fromkeys(floats, f"*{dtype}") | dict.fromkeys(integers, "*i32") | {"places_ptr": "*i64"}
    types |= dict.fromkeys(["cos_ptr", "sin_ptr", "partial_ptr", "sums_ptr"], "*fp32")
    types |= {"table_stride": "i32", "eps": "fp32", "scale": "fp32"}
    common = {
        "WINDOW": 0, "MOST": 64, "KV_HEADS": 8, "GROUP": group, "DIM": dim,
        "BLOCK_M": max(16, triton.next_power_of_2(group * rows)), "BLOCK_L": block_l, "BLOCK_D": dim,
        "MIN_CHUNK": attention.MIN_CHUNK, "EARLY": True,
    }  # fmt: skip
    more = {"PAGE": 16, "NORM": False, "DRAFT": False, "LEAN": False, "BLOCK_R": row_attention.MOST_ROWS}
    common |= {name: value for name, value in constants.items() if name in common}
    return types, common, more | {name: value for name, value in constants.items() if name in more}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "rows", "norm", "window", "draft"),
    [
        ("bf16", 9, 3, 64, 7, False, 0, False),
        ("bf16", 32, 8, 64, 1, False, 0, False),
        ("bf16", 32, 8, 64, 1, True, 128, False),
        ("bf16", 9, 3, 64, 6, True, 257, True),
        ("bf16", 32, 8, 128, 8, True, 0, False),
        ("bf16", 64, 8, 64, 8, False, 128, False),
        ("fp32", 9, 3, 64, 8, False, 0, False),
    ],
)
def test_attention_of_new_rows_fits(dtype, heads, kv_heads, dim, rows, norm, window, draft, target, tmp_path):
    group, block_l = heads // kv_heads, 32 if dtype == "fp32" else 64
    types, common, more = new_rows_arguments(
        dtype, group, dim, rows, block_l, KV_HEADS=kv_heads, NORM=norm, WINDOW=window, DRAFT=draft,
        EARLY=target != "gfx950",
    )  # fmt: skip
    block_m = common["BLOCK_M"]
    kernel = row_attention.row_attend_kernel
    mine = {name: types[name] for name in kernel.arg_names if name in types}
    shape = row_shape(
        group, dim, 4 if dtype == "fp32" else 2, rows=rows, lanes=TARGETS[target].warp_size, window=window
    )
    assert shape.block_l == block_l
    threads = 32 * shape.warps
    built = compiled(
        kernel, target, mine, common | more | {"LEAN": shape.lean}, num_warps=shape.warps, num_stages=shape.stages
    )
    registers, spilled, shared = resources(built, target, tmp_path)
    assert shared <= SHARED[target] // 2
    join = row_attention.join_kernel
    mine = {name: types[name] for name in join.arg_names if name in types}
    joined = compiled(
        join, target, mine, common | {"SINKS": True, "PARTS": row_attention._PARTS, "FIRST": rows > 1}, num_warps=1
    )
    assert resources(joined, target, tmp_path)[1] == 0
    if target == "sm_90":
        assert spilled == 0
        assert registers * threads <= 32768
        before, after = built.asm["ptx"].split("griddepcontrol.wait")
        # Keys and values of the cache before the wait, and behind it all of the new rows before the first barrier.
        assert len(re.findall(r"ld\.global\S*\.v4", before)) >= 2 * block_l * dim // (8 * threads)
        new = after.split("bar.sync", 1)[0].count("ld.global")
        assert new >= (2 * block_m + 3 * 16) * dim // (8 * threads)
        assert joined.asm["ptx"].count("bar.sync") <= 1


@pytest.mark.parametrize(("dim", "norm", "programs"), [(128, False, 3), (128, True, 2), (64, False, 2), (64, True, 2)])
@pytest.mark.parametrize("group", [2, 4, 8])
def test_loops_without_masks_fit(group, dim, norm, programs, tmp_path):
    """A turn has one wait and one set of barriers, and as many programs have room on a processor; of those with heads
    of 64, which are small, no more than two."""
    shape, kernel = row_shape(group, dim, 2), row_attention.row_attend_kernel
    assert shape.lean
    types, common, more = new_rows_arguments("bf16", group, dim, 1, shape.block_l, NORM=norm, LEAN=True)
    mine = {name: types[name] for name in kernel.arg_names if name in types}
    built = compiled(kernel, "sm_90", mine, common | more, num_warps=shape.warps, num_stages=shape.stages)
    registers, spilled, shared = resources(built, "sm_90", tmp_path)
    assert not spilled
    assert registers * 32 * 4 * programs <= 65536
    assert (shared + 1024) * programs <= 228 * 1024
    assert dim > 64 or (shared + 1024) * 3 > 228 * 1024
    turn = first_loop(built.asm["ptx"])
    assert turn.count("cp.async.wait_group") == 1
    assert turn.count("bar.sync") <= 9


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (True, 3)),
        ({"dim": 80}, (True, 3)),
        ({"page_size": 1}, (True, 3)),
        ({"page_size": 64}, (True, 3)),
        ({"dim": 64}, (True, 6)),
        # With masks: pages that end amid a tile, windows, several rows, wide groups, float32, 64 lanes.
        ({"page_size": 12}, (False, 5)),
        ({"page_size": 128}, (False, 5)),
        ({"window": 300}, (False, 5)),
        ({"rows": 2}, (False, 5)),
        ({"rows": 8}, (False, 3)),
        ({"group": 32}, (False, 3)),
        ({"size": 4}, (False, 2)),
        ({"lanes": 64}, (False, 3)),
    ],
)
def test_shapes_of_new_rows(changed, expected):
    shape = row_shape(**{"group": 4, "dim": 128, "size": 2} | changed)
    assert (shape.lean, shape.stages) == expected


def row_shape(
    group: int, dim: int, size: int, *, rows: int = 1, page_size: int = 16, window: int = 0, lanes: int = 32
) -> row_attention.RowShape:
    return row_attention.RowShape.of(group, rows, dim, size, page_size, window, lanes)


def first_loop(ptx: str) -> str:
    """The body of the first loop that multiplies."""
    lines, labels = ptx.splitlines(), {}
    for place, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = place
        jump = re.search(r"\sbra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if jump and jump[1] in labels:
            body = "\n".join(lines[labels[jump[1]] : place])
            if "mma.sync" in body:
                return body
    raise AssertionError("no loop multiplies")


def spills_of_tokens(cubin: Path) -> list[str]:
    """Instructions that store or load spilled registers in the innermost loops that multiply."""
    text = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    lines = [(int(place, 16), line) for place, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", text)]
    jumps = [
        (int(jump[1], 16), place) for place, line in lines if (jump := re.search(r"\bBRA\b.*\s(0x[0-9a-f]+)", line))
    ]
    multiplying = [place for place, line in lines if "MMA" in line]
    loops = [loop for loop in jumps if any(loop[0] <= place <= loop[1] for place in multiplying)]
    inner = [loop for loop in loops if not any(loop[0] < other[0] and other[1] < loop[1] for other in loops)]
    assert inner
    bodies = [line for first, last in inner for place, line in lines if first <= place <= last]
    return [line for line in bodies if re.search(r"\b(STL|LDL)\b", line)]
