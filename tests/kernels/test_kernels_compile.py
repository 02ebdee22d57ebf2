"""The Triton kernels of the general path compile for GPUs that are not here, within their registers and memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements/triton.txt")

from compile_kit import CUOBJDUMP, SHARED, TARGETS, compiled, resources

from lowlat.bench import read_kernel
from lowlat.layers.triton import (
    activation,
    attention,
    drawing,
    experts,
    filtering,
    history,
    host,
    norm,
    product,
    rope_write,
    row_product,
    rows,
    slots,
    verify,
)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("width", "gate", "norm", "outputs"),
    [(576, -1, True, 16), (576, 0, True, 16), (1536, -1, False, 16), (2304, -1, False, 16), (576, -1, True, 32)],
)
def test_products_of_rows_fit(width, gate, norm, outputs, target, tmp_path):
    pointers = ["x_ptr", "stream_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "out_ptr", "sum_ptr"]
    types = dict.fromkeys(pointers, "*bf16") | {"rows": "i32", "outputs": "i32", "eps": "fp32"}
    parts, part, piece = row_product.parts_of(width, gated=gate >= 0)
    constants = {
        "WIDTH": width, "ADD": norm, "NORM": norm, "GATE": gate, "BIAS": False, "PARTS": parts,
        "PART": part, "PIECE": piece, "BLOCK_N": outputs, "BLOCK_R": 8, "EARLY": target != "gfx950",
    }  # fmt: skip
    kernel = compiled(row_product.row_product_kernel, target, types, constants, num_warps=parts)
    registers, spilled, shared = resources(kernel, target, tmp_path)
    assert shared <= SHARED[target]
    if target == "sm_90":  # measured and used there alone so far
        assert spilled == 0
        # Two kernels have room beside each other, so that one starts while the other runs.
        assert registers * 32 * parts <= 32768
        assert shared <= SHARED[target] // 2
        before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
        assert before.count("ld.global") >= outputs * width * (2 if gate >= 0 else 1) * 2 // (16 * 32 * parts)
        assert "mma.sync" in after
        # Norm and weights before the wait, and behind it all rows before the first barrier: memory is waited for once.
        loads, rest = after.split("bar.sync", 1)
        assert loads.count("ld.global") == -(-part // piece) * piece * 8 // (8 * 32) * (2 if norm else 1)
        assert "ld.global" not in rest


def test_kernels_behind_a_look_up_start_when_all_before_it_is_done(tmp_path):
    """Attention of new rows reads lengths and the cache before it waits."""
    types = {"places_ptr": "*i64", "table_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32"}
    text = compiled(rows.look_up_kernel, "sm_90", types, {"BLOCK": 1024, "EARLY": True}, num_warps=4).asm["ptx"]
    assert text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch_dependents")


def draws_and_checks() -> list[tuple[Any, dict[str, str], dict[str, Any], int]]:
    """The kernels around a step's forward."""
    wide = dict.fromkeys(
        ["slots_ptr", "positions_ptr", "seeds_ptr", "tokens_ptr", "lengths_ptr", "ends_ptr", "widths_ptr", "best_ptr",
         "others_ptr",
         "guesses_ptr", "counts_ptr", "wide_ptr", "ids_ptr", "before_ptr", "chosen_ptr", "forced_ptr",
         "result_ptr"], "*i64",
    )  # fmt: skip
    types = wide | dict.fromkeys(["where_ptr", "pages_ptr", "narrow_ptr", "rows_ptr", "history_ptr"], "*i32")
    types |= dict.fromkeys(["logits_ptr", "largest_ptr", "temperatures_ptr", "last_largest_ptr"], "*fp32")
    types |= dict.fromkeys(["score_ptr", "last_score_ptr"], "*fp64") | {"last_where_ptr": "*i32", "last_ptr": "*i64"}
    types |= dict.fromkeys(["embed_ptr", "head_ptr"], "*bf16")
    types |= dict.fromkeys(
        [
            "tokens_stride",
            "last_stride",
            "history_stride",
            "stride",
            "parts",
            "vocabulary",
            "chunks",
            "requests",
            "pages_stride",
            "most_pages",
            "padding_place",
        ],
        "i32",
    )

    def job(kernel: Any, warps: int, **constants: Any) -> tuple[Any, dict[str, str], dict[str, Any], int]:
        return kernel, {name: types[name] for name in kernel.arg_names if name in types}, constants, warps

    return [
        job(
            drawing.best_kernel,
            4,
            CHUNK=128,
            SHARPNESS=1.25,
            DRAWS=True,
            IDS=True,
            EARLY=False,
            RANK=48,
            BLOCK_E=64,
            FOLLOWS=True,
            BLOCK_C=256,
        ),
        job(drawing.finish_kernel, 4, BROKEN=0, BLOCK_C=512, EARLY=False),
        job(history.seek_kernel, 4, SHORTEST=3, LONGEST=6, BLOCK=1024, EARLY=False),
        job(history.follow_kernel, 1, COUNT=7, OTHERS=True, BLOCK_G=8, BLOCK_P=128, EARLY=False),
        job(verify.begin_kernel, 1, PAGE=16, WIDTH=8, COUNTS=True, HISTORY=True, BLOCK_W=8, EARLY=False),
        job(verify.accept_kernel, 1, WIDTH=8, FORCED=True, HISTORY=True, BLOCK_W=8, EARLY=False),
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_small_kernels_fit(target, tmp_path):
    bf16, floats, integers = "*bf16", "*fp32", "*i32"
    jobs: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
        (
            norm.rms_norm_kernel,
            dict.fromkeys(["x_ptr", "residual_ptr", "weight_ptr", "out_ptr"], bf16) | {"width": "i32", "eps": "fp32"},
            {"ADD": True, "BLOCK": 4096, "EARLY": target != "gfx950"},
            norm.warps_for(4096),
        ),
        (
            activation.gate_kernel,
            {"packed_ptr": bf16, "out_ptr": bf16, "width": "i32"},
            {"KIND": 0, "BLOCK": 1024, "EARLY": target != "gfx950"},
            4,
        ),
        (
            rope_write.rope_write_kernel,
            dict.fromkeys(["qkv_ptr", "q_ptr", "keys_ptr", "values_ptr", "query_norm_ptr", "key_norm_ptr"], bf16)
            | {"positions_ptr": "*i64", "slots_ptr": "*i64", "cos_ptr": floats, "sin_ptr": floats, "eps": "fp32",
               "layer_slots": "i32"},
            {"QUERY_HEADS": 32, "LAYERS": 1, "KV_HEADS": 8, "DIM": 128, "NORM": True, "BLOCK_D": 128, "EARLY": False,
             "BLOCK_Y": 8, "LATE": True},
            4,
        ),
        (
            attention.combine_kernel,
            dict.fromkeys(["first_ptr", "rows_ptr", "lengths_ptr"], integers)
            | {"partial_ptr": floats, "sums_ptr": floats, "sinks_ptr": bf16, "out_ptr": bf16},
            {
                "WINDOW": 0, "MOST": 33, "KV_HEADS": 8, "GROUP": 4, "DIM": 128, "SINKS": True, "BLOCK_Q": 1,
                "BLOCK_M": 16, "BLOCK_L": 64, "BLOCK_D": 128, "MIN_CHUNK": 64, "BLOCK_S": 64, "EARLY": False,
            },
            4,
        ),
        (
            attention.combine_rows_kernel,
            dict.fromkeys(["first_ptr", "rows_ptr", "lengths_ptr"], integers)
            | {"partial_ptr": floats, "sums_ptr": floats, "sinks_ptr": bf16, "out_ptr": bf16, "segments": "i32"},
            {
                "WINDOW": 0, "MOST": 17, "KV_HEADS": 8, "GROUP": 4, "DIM": 128, "SINKS": True, "BLOCK_Q": 32,
                "BLOCK_M": 128, "BLOCK_L": 64, "BLOCK_D": 128, "MIN_CHUNK": 64, "BLOCK_B": 16, "BLOCK_N": 16,
                "EARLY": False,
            },
            4,
        ),
        (
            rows.look_up_kernel,
            {"places_ptr": "*i64", "table_ptr": bf16, "out_ptr": bf16, "width": "i32"},
            {"BLOCK": 1024, "EARLY": target != "gfx950"},
            4,
        ),
        (
            rows.add_rows_kernel,
            dict.fromkeys(["x_ptr", "y_ptr", "out_ptr"], bf16) | {"width": "i32", "out_stride": "i32"},
            {"BLOCK": 1024, "EARLY": target != "gfx950"},
            4,
        ),
        (
            slots.take_slots_kernel,
            dict.fromkeys(["slots_ptr", "tokens_ptr", "lengths_ptr", "token_ptr", "place_ptr", "write_ptr"], "*i64")
            | {"pages_ptr": integers, "after_ptr": integers, "row_ptr": integers, "count": "i32", "width": "i32"},
            {"PAGE": 16, "BLOCK": 8, "EARLY": target != "gfx950"},
            1,
        ),
        (
            filtering.count_kernel,
            {"scores_ptr": floats, "best_ptr": floats, "temperature_ptr": floats, "found_ptr": "*i64"}
            | {"counts_ptr": integers, "masses_ptr": "*fp64", "vocabulary": "i32", "chunks": "i32", "shift": "i32"},
            {"BINS": 16, "CHUNK": 512},
            8,
        ),
        (
            filtering.pick_kernel,
            dict.fromkeys(["found_ptr", "above_ptr", "ties_ptr", "top_k_ptr", "first_found_ptr"], "*i64")
            | dict.fromkeys(["first_above_ptr", "first_ties_ptr"], "*i64")
            | dict.fromkeys(["masses_ptr", "mass_ptr", "total_ptr", "top_p_ptr", "first_mass_ptr"], "*fp64")
            | {"counts_ptr": integers, "chunks": "i32"},
            {"BY_MASS": True, "FIRST": False, "BINS": 16, "BLOCK_C": 512},
            8,
        ),
        (
            filtering.keep_kernel,
            dict.fromkeys(["scores_ptr", "best_ptr", "temperature_ptr", "out_ptr"], floats)
            | dict.fromkeys(["top_k_ptr", "k_found_ptr", "k_above_ptr", "k_ties_ptr", "p_found_ptr"], "*i64")
            | dict.fromkeys(["top_p_ptr", "min_p_ptr", "total_ptr", "k_mass_ptr", "p_mass_ptr"], "*fp64")
            | {"ties_ptr": integers, "vocabulary": "i32", "chunks": "i32"},
            {"CHUNK": 512, "BLOCK_C": 512},
            4,
        ),
        (
            slots.put_tokens_kernel,
            dict.fromkeys(["slots_ptr", "chosen_ptr", "tokens_ptr", "lengths_ptr"], "*i64")
            | {"count": "i32", "padding": "i32"},
            {"BLOCK": 8, "EARLY": target != "gfx950"},
            1,
        ),
        (host.store_kernel, {"source_ptr": "*i64", "target_ptr": "*i64", "count": "i32"}, {"BLOCK": host.MOST}, 4),
        *draws_and_checks(),
    ]  # fmt: skip
    for kernel, types, constants, warps in jobs:
        registers, spilled, shared = resources(
            compiled(kernel, target, types, constants, num_warps=warps), target, tmp_path
        )
        assert spilled == 0, kernel.__name__
        assert registers <= 168, kernel.__name__
        assert shared <= 32 * 1024, kernel.__name__


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("outputs", "width", "rows", "gated"),
    [
        (3072, 1024, 1, True),
        (4096, 1024, 4, False),
        (1024, 2048, 4, False),
        (151936, 1024, 1, False),
        (8192, 2048, 1, True),
        (128256, 2048, 4, False),
        (2048, 8192, 2, False),
        (12288, 4096, 1, True),
        (4096, 12288, 1, False),
    ],
)
def test_products_fit_and_ask_for_weights_first(outputs, width, rows, gated, target, tmp_path):
    names = ["x_ptr", "stream_ptr", "norm_ptr", "weight_ptr", "bias_ptr", "out_ptr", "sum_ptr"]
    types = dict.fromkeys(names, "*bf16") | {"rows": "i32", "outputs": "i32", "eps": "fp32"}
    shape = product.ProductShape.of(outputs, width, 2, gated=gated, rows=rows)
    early = target != "gfx950"
    constants = {
        "ROWS": rows, "WIDTH": width, "ADD": gated, "NORM": gated, "GATE": 0 if gated else -1, "BIAS": False,
        "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k, "EARLY": early,
    }  # fmt: skip
    kernel = compiled(product.product_kernel, target, types, constants, num_warps=shape.warps)
    registers, spilled, shared = resources(kernel, target, tmp_path)
    assert spilled == 0
    assert registers <= 255
    assert shared <= 2048
    if early:
        before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
        weights = shape.block_n * shape.block_k * (2 if gated else 1) * 2 // (16 * 32 * shape.warps)
        loads = len(re.findall(r"ld\.global\S*\.v4", before))
        assert loads >= weights * width // shape.block_k, "weights are read after the wait"
        assert "ld.global" in after


@pytest.mark.parametrize(
    ("outputs", "width", "norm", "rows"),
    [
        # Qwen3-0.6B: every product of four rows is one of the launches that overlap, but the head.
        (4096, 1024, False, 4), (1024, 2048, False, 4), (6144, 1024, False, 4), (1024, 3072, False, 4),
        (151936, 1024, False, 2),
        # Llama-3.2-1B and Qwen3-8B
        (2048, 2048, False, 2), (3072, 2048, False, 2), (2048, 8192, False, 2), (4096, 12288, False, 1),
        (3072, 2048, True, 1),
    ],
)  # fmt: skip
def test_rows_that_go_without_cublas(outputs, width, norm, rows):
    assert product.most_rows(outputs, width, norm=norm) == rows


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_experts_fit(target, tmp_path):
    pointers = {"x_ptr": "*bf16", "out_ptr": "*bf16", "experts_ptr": "*i64", "weights_ptr": "*i64"}
    pointers |= {"biases_ptr": "*i64", "outputs": "i32"}
    common = {"CHOSEN": 8, "WIDTH": 2048, "BIAS": True, "EARLY": target == "sm_90"}
    for kernel, gated, extra in (
        (experts.expert_gate_kernel, True, {"KIND": 2, "ALPHA": 1.7, "LIMIT": 7.0}),
        (experts.expert_down_kernel, False, {}),
    ):
        shape = product.ProductShape.of(2048, 2048, 2, gated=gated)
        sizes = {"BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k}
        types = pointers if gated else pointers | {"shares_ptr": "*fp32"}
        built = compiled(kernel, target, types, common | extra | sizes, num_warps=shape.warps)
        registers, spilled, _ = resources(built, target, tmp_path)
        assert spilled == 0
        assert registers <= 255
        if target == "sm_90":
            assert len(re.findall(r"ld\.global\S*\.v4", built.asm["ptx"])) >= 8, "weights are read in small pieces"


def test_the_read_ceilings_kernel_reads_16_bytes_at_a_time_and_runs_at_once(tmp_path):
    types = {"source_ptr": "*i32", "sums_ptr": "*i32", "count": "i32"}
    constants = {"BLOCK": read_kernel.BLOCK}
    kernel = compiled(read_kernel.read_kernel, "sm_90", types, constants, num_warps=read_kernel.WARPS)
    registers, spilled, _ = resources(kernel, "sm_90", tmp_path)
    assert spilled == 0
    assert registers * 32 * read_kernel.WARPS * read_kernel.PROGRAMS <= 65536
    assert kernel.asm["ptx"].count("ld.global.v4.b32") >= 4


def test_tools_are_there():
    assert shutil.which(CUOBJDUMP), "triton's wheel has no cuobjdump: resources would not be checked"


def test_kernels_are_compiled_before_they_come(tmp_path):
    """A rehearsal finds every kernel that the steps need, for just what they need it."""
    (tmp_path / "model").mkdir()
    program = str(Path(__file__).with_name("compiled_ahead.py"))
    run = subprocess.run(
        [sys.executable, program, str(tmp_path / "model")],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "compiled with triton" in run.stdout


@pytest.mark.parametrize("by_rows", [0, 1, 8], ids=["older", "of one request", "of all"])
def test_requests_wait_for_no_kernel(by_rows, tmp_path):
    """What requests beside each other need was compiled when the engine started, whatever attention it chose."""
    (tmp_path / "model").mkdir()
    program = str(Path(__file__).with_name("compiled_ready.py"))
    run = subprocess.run(
        [sys.executable, program, str(tmp_path / "model"), str(by_rows)],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "kernels serve them" in run.stdout
