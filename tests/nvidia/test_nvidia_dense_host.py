"""The dense step's host side: shapes, plans, packing, and what the compiler reports. No GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat_nvidia import jit
from lowlat_nvidia.dense import pack as packing
from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import waits
from lowlat_nvidia.dense.reference import random_weights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table

SMALL = plans.DenseShape(1, 1024, 16, 8, 128, 1024, 1100, True)


def test_a_log_of_one_byte_is_not_written_into_pythons_own_space() -> None:
    """Python has one object for each bytes of length 1; the compiler's end of an empty log overwrote that of b" "."""

    def read(program: object, text: bytes) -> tuple[int]:
        ctypes.memset(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), 0, 1)
        return (0,)

    assert jit._text(None, lambda program: (0, 1), read, None) == ""
    assert bytes([32]) == "\N{SPACE}".encode()
    assert ord(b" ") == 32


@pytest.mark.parametrize("name", plans.PRESETS)
def test_presets_fit(name: str) -> None:
    shape = plans.PRESETS[name]
    plans.check(shape)
    plan = plans.DensePlan(shape)
    for kernel in (plan, plan.kernel(1), plan.kernel(8)):
        assert kernel.shared_bytes() <= plans.SHARED_LIMIT
        assert kernel.ring_pages >= 3
        assert kernel.page_fragments == plan.page_fragments  # either kernel reads the weights that the other does
    packed = plan.stream_pages() * plan.page_bytes * plans.BLOCKS * plans.WARPS
    # Padding of the vocabulary to whole tiles is all that is read beside the weights.
    assert shape.weight_bytes() <= packed < 1.01 * shape.weight_bytes()


CHOICES = (
    "RING_PAGES", "UNDER_WAY", "BUSY_UNDER_WAY", "UNITS", "SLOTS", "COPIES", "HOLD", "FOLD", "ROW_WARPS", "WATCH_EACH",
    "ROW_UNITS",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "one_row", "several"),
    [
        ("llama-1b", (4, 2, 2, 16, 3, 8, 1, 0, 0, 0, 0), (3, 2, 2, 16, 3, 4, 0, 0, 1, 1, 8)),
        ("qwen3-0.6b", (8, 4, 5, 8, 3, 4, 0, 1, 0, 0, 0), (7, 6, 6, 8, 3, 4, 0, 0, 2, 0, 8)),
        ("qwen3-8b", (4, 2, 2, 8, 3, 8, 1, 0, 0, 0, 0), (3, 3, 3, 8, 3, 4, 0, 0, 1, 0, 4)),
    ],
)
def test_the_defaults_are_what_was_fastest(name: str, one_row: tuple[int, ...], several: tuple[int, ...]) -> None:
    """Pages of a warp's ring, how many are asked for at once, and in busy steps, units of the cache,
    exchange buffers, how often what all blocks read is published, what is done."""
    plan = plans.DensePlan(plans.PRESETS[name])
    for rows, expected in ((1, one_row), (8, several)):
        found = plan.kernel(rows).definitions()
        assert tuple(found[choice] for choice in CHOICES) == expected


@pytest.mark.parametrize(("asked", "one_row", "several"), [(3, 4, 6), (5, 5, 6), (7, 7, 7), (99, 8, 7)])
def test_busy_steps_have_at_least_as_many_pages_under_way(asked: int, one_row: int, several: int) -> None:
    plan = plans.DensePlan(plans.QWEN3_06B, busy_under_way=asked)
    found = [plan.kernel(rows).definitions()["BUSY_UNDER_WAY"] for rows in (1, 8)]
    assert found == [one_row, several]


def test_pauses_are_a_byte_a_stage() -> None:
    how = waits.Waits({waits.SPLITS: 7}, {waits.HEADS: 1, waits.DOWN: 255}, (waits.QKV, waits.GATE_UP))
    found = plans.DensePlan(plans.QWEN3_06B, waits=how).definitions()
    assert (found["QUIET"], found["BUSY"], found["WHOLE"]) == (7 << 24, 1 << 16 | 255 << 48, 0b100001)
    for pauses in ({waits.SPLITS: 256}, {waits.SPLITS: -1}, {8: 1}):
        with pytest.raises(ValueError, match="0 to 255 hundred cycles"):
            waits.packed(pauses)


@pytest.mark.parametrize(
    ("name", "rows", "quiet", "busy", "whole", "busy_rows"),
    [
        ("llama-1b", 1, {0: 22, 3: 2, 5: 4, 6: 15}, {0: 22, 3: 10, 5: 4, 6: 15}, {0, 5, 6}, 8),
        ("llama-1b", 8, {0: 18, 4: 4, 5: 4}, {0: 18, 3: 8, 4: 4, 5: 4}, {0, 5}, 8),
        ("qwen3-0.6b", 1, {2: 3, 3: 4, 5: 8, 6: 4}, {2: 7, 3: 13}, {3, 5}, 8),
        ("qwen3-0.6b", 8, {4: 4, 5: 2}, {0: 6, 2: 2, 3: 9, 4: 3, 5: 4}, {0, 5}, 8),
        ("qwen3-8b", 1, {0: 22, 3: 2, 5: 4, 6: 15}, {0: 22, 3: 10, 5: 4, 6: 15}, {0, 5, 6}, 8),
        ("qwen3-8b", 8, {0: 15, 4: 22, 5: 15, 6: 27}, {0: 7, 3: 10}, set(), 2),
    ],
)
def test_every_kernel_pauses_as_measured_and_none_without(
    name: str, rows: int, quiet: dict[int, int], busy: dict[int, int], whole: set[int], busy_rows: int
) -> None:
    def pauses(packed: int) -> dict[int, int]:
        return {stage: pause for stage, pause in enumerate(packed.to_bytes(8, "little")) if pause}

    kernel = plans.DensePlan(plans.PRESETS[name]).kernel(rows)
    found = kernel.definitions()
    assert (pauses(found["QUIET"]), pauses(found["BUSY"])) == (quiet, busy)
    assert {stage for stage in range(8) if found["WHOLE"] >> stage & 1} == whole
    assert found["BUSY_ROWS"] == busy_rows
    none = dataclasses.replace(kernel, waits=waits.Waits()).definitions()
    assert (none["QUIET"], none["BUSY"], none["WHOLE"]) == (0, 0, 0)


@pytest.mark.parametrize(("hidden", "paused"), [(2048, False), (2560, False), (3072, True), (4096, True)])
def test_what_was_measured_on_the_widest_model_is_for_such_models(hidden: int, paused: bool) -> None:
    shape = dataclasses.replace(plans.QWEN3_8B, hidden=hidden)
    assert (plans.DensePlan(shape).definitions()["QUIET"] > 0) == paused


def test_layers_take_three_buffers_in_turn_at_least() -> None:
    plan = plans.DensePlan(plans.QWEN3_06B, slots=4)
    for rows in (1, 8):
        kernel = plan.kernel(rows)
        assert kernel.definitions()["SLOTS"] == 4
        assert kernel.exchange_words() == 10 * plan.layer_words()  # and one before the first layer, in each of two sets
        whole = dataclasses.replace(kernel, alone=True).definitions()
        assert whole["SLOTS"] == 28  # whole steps are read afterwards
    assert plans.DensePlan(SMALL).definitions()["SLOTS"] == 1
    for options, word in (
        ({"slots": 2}, "slots is 2"),
        ({"copies": 16}, "copies is 16"),
        ({"row_warps": 3}, "row_warps is 3"),
        ({"row_units": 9}, "row_units is 9; a row with a warp has 4 to 8"),
        ({"row_units": 3}, "row_units is 3; a row with a warp has 4 to 8"),
    ):
        with pytest.raises(plans.UnsupportedShapeError, match=word):
            dataclasses.replace(plan, **options).definitions()  # type: ignore[arg-type]


def test_memory_counts_the_exchange_buffers_of_both_kernels() -> None:
    plan = plans.DensePlan(plans.QWEN3_06B)
    more = dataclasses.replace(plan, slots=4)
    assert more.memory_bytes(100) - plan.memory_bytes(100) == 4 * 2 * 2 * plan.layer_words()


def test_a_narrow_or_folded_step_holds_no_page() -> None:
    """The head would lose the page that came into registers while its inputs were waited for."""
    assert not plans.DensePlan(plans.LLAMA_1B, fold=True).kernel(1).holds
    for options in ({"shape": plans.QWEN3_06B}, {"shape": plans.QWEN3_06B, "fold": False}, {"fold": True}):
        plan = plans.DensePlan(**{"shape": plans.LLAMA_1B, "hold": True} | options)  # type: ignore[arg-type]
        assert plan.kernel(8).definitions()["HOLD"] == 0
        with pytest.raises(plans.UnsupportedShapeError, match="hold is set"):
            plan.kernel(1).definitions()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 96}, "head_dim"),
        ({"kv_heads": 3, "q_heads": 12}, "KV heads"),
        ({"hidden": 1536}, "hidden"),
        ({"inter": 3000}, "inter"),
        ({"hidden": 5120}, "hidden"),
        ({"q_heads": 64}, "query elements"),
    ],
)
def test_other_shapes_are_refused_by_name(change: dict[str, int], word: str) -> None:
    with pytest.raises(plans.UnsupportedShapeError, match=word):
        plans.check(dataclasses.replace(plans.QWEN3_06B, **change))


def test_config_of_a_checkpoint() -> None:
    config = {
        "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert plans.shape_from_config(config) == plans.QWEN3_06B
    for change in ({"model_type": "mixtral"}, {"attention_bias": True}, {"hidden_act": "gelu"}):
        with pytest.raises(plans.UnsupportedShapeError, match=next(iter(change))):
            plans.shape_from_config({**config, **change})


@settings(max_examples=15, deadline=None)
@given(
    tiles=st.integers(1, 3),
    inputs=st.sampled_from([512, 1024, 2048, 3072, 4096, 8192]),
    fragments=st.sampled_from([2, 4]),
)
def test_packing_round_trip(tiles: int, inputs: int, fragments: int) -> None:
    if (inputs // 256) % fragments:
        return
    outputs = plans.BLOCKS * 8 * tiles
    matrix = torch.arange(outputs * inputs, dtype=torch.int32).reshape(outputs, inputs)
    pages = packing.pack_matrix(matrix, fragments)
    assert pages.shape[1] == plans.BLOCKS * plans.WARPS * fragments * 256
    assert torch.equal(packing.unpack_matrix(pages, outputs, inputs, fragments), matrix)


def test_a_lane_holds_the_operand_of_a_matrix_instruction() -> None:
    matrix = torch.arange(128 * 24 * 1024, dtype=torch.int32).reshape(128 * 24, 1024)
    pages = packing.pack_matrix(matrix, 4)
    block, warp, lane = 5, 3, 22
    row, first = block * 24 + lane // 4, warp * 128 + lane % 4 * 8

    def words(page: int, fragment: int) -> list[int]:
        at = ((block * plans.WARPS + warp) * 4 + fragment) * 256 + lane * 8
        return pages[page, at : at + 8].tolist()

    def inputs(row: int, first: int) -> list[int]:
        return matrix[row, first : first + 2].tolist()

    # Of 16 outputs: fragment 3 is the second half of the second 32 inputs; outputs g and g + 8 alternate.
    at = first + 32 + 4
    assert words(0, 3) == inputs(row, at) + inputs(row + 8, at) + inputs(row, at + 2) + inputs(row + 8, at + 2)
    # Of the 8 that are left: halves of the lane's 8 inputs alternate.
    at, row = first + 64, row + 16
    assert words(2, 2) == inputs(row, at) + inputs(row, at + 4) + inputs(row, at + 2) + inputs(row, at + 6)


def test_the_stream_is_all_matrices_in_order() -> None:
    weights = random_weights(SMALL, 3, "cpu")
    plan = plans.DensePlan(SMALL)
    width = plans.BLOCKS * plans.WARPS * plan.page_fragments * 256
    stream = torch.full((plan.stream_pages(), width), float("nan"), dtype=torch.bfloat16)
    packing.pack(plan, weights, stream)
    assert not stream.isnan().any()
    at = 0
    for matrix in packing.stages(SMALL, weights):
        pages = packing.pack_matrix(matrix, plan.page_fragments)
        assert torch.equal(stream[at : at + len(pages)], pages)
        at += len(pages)
    # Gate and up alternate; the queries of a KV head stand before its key and value.
    layer = weights.layers[0]
    assert torch.equal(packing.order_gate_up(layer.gate, layer.up)[7], layer.up[3])
    assert torch.equal(packing.order_qkv(SMALL, layer.q, layer.k, layer.v)[SMALL.head_rows], layer.q[256])


def test_rotary_table_is_a_rotation() -> None:
    table = rotary_table(frequencies({}, 64), 50, "cpu")
    assert table.shape == (50, 2, 32)
    assert torch.allclose(table.square().sum(1), torch.ones(50, 32), atol=1e-6)
    assert torch.equal(table[0, 0], torch.ones(32))


ROOM = {"llama-1b": 4, "qwen3-0.6b": 4, "qwen3-8b": 2}


@pytest.mark.parametrize("name", plans.PRESETS)
@pytest.mark.parametrize(("rows", "form"), [(1, ""), (8, ""), (8, "no sums wait"), (8, "rows take turns")])
def test_compiles_within_its_registers(name: str, rows: int, form: str) -> None:
    """By default, and with half as many units of a row that has a warp, or no such rows."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing: pip install 'lowlat-nvidia[cuda]'")
    plan = plans.DensePlan(plans.PRESETS[name]).kernel(rows)
    if form:
        options = {"row_units": ROOM[name]} if form == "no sums wait" else {"row_warps": 0}
        default, plan = plan.definitions(), dataclasses.replace(plan, **options)
        assert plan.definitions() != default
    try:
        cubin, log = jit.compile_cubin("dense_step.cu", plan.definitions(), cache=False, verbose=True)
    except (RuntimeError, OSError) as error:
        if isinstance(error, jit.BuildError):
            raise
        pytest.skip(f"NVRTC is missing: {error}")
    assert len(cubin) > 20_000
    spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
    assert spilled
    assert max(spilled) == 0
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    assert registers * 384 <= 65536


def test_a_broken_source_names_the_log() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is missing: pip install 'lowlat-nvidia[cuda]'")
    definitions = {**plans.DensePlan(SMALL).definitions(), "HEAD_DIM": 0}
    with pytest.raises(jit.BuildError, match=r"dense_step\.cu did not compile"):
        jit.compile_cubin("dense_step.cu", definitions, cache=False)
