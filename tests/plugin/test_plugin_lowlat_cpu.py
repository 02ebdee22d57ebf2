"""The worked example: products against a plain reference, odd sizes, every instruction set, and the contract."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lowlat_plugin import Mode, Policy, Registry, Shape, State
from lowlat_plugin.conformance import ReferenceHost, run_checks
from lowlat_plugin.install import LowLatency
from lowlat_plugin.registry import Candidate
from lowlat_plugin.shadow import Shadow

lowlat_cpu = pytest.importorskip("lowlat_cpu.native", reason="install examples/lowlat-cpu")
from lowlat_cpu import gguf, native, weights  # noqa: E402
from lowlat_cpu.example import random_blocks, small_llama  # noqa: E402
from lowlat_cpu.specs import LLAMA  # noqa: E402

VARIANTS = native.available()


def packed(variant: str, kind: int, shape: tuple[int, int], seed: int = 0):
    library = native.Library(variant)
    raw = random_blocks(np.random.default_rng(seed), kind, shape)
    matrix = native.Matrix(format=weights.FORMATS[kind], rows=shape[0], columns=shape[1])
    out = np.full(matrix.nbytes(), 0xFF, np.uint8)
    library.pack(raw, np.arange(shape[0], dtype=np.int64), out, matrix)
    return library, matrix, out, gguf.dequantise(raw, kind, shape)


def test_variants_of_this_machine_are_found():
    assert VARIANTS[-1] == "portable"
    assert tuple(name for name in native.INSTRUCTION_SETS if name in VARIANTS) == VARIANTS, "the fastest first"
    with pytest.raises(ValueError, match="usable"):
        native.load("avx1024")


def test_an_empty_choice_of_the_instruction_set_is_none(monkeypatch: pytest.MonkeyPatch):
    for chosen, loaded in (("", VARIANTS[0]), ("portable", "portable")):
        monkeypatch.setenv("LOWLAT_CPU_ISA", chosen)
        native.load.cache_clear()
        assert native.load().instruction_set == loaded
    native.load.cache_clear()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [gguf.Q4_1, gguf.Q8_0])
@pytest.mark.parametrize("shape", [(1, 32), (17, 64), (150, 96), (192, 576)])
def test_products_equal_a_float64_reference_at_every_width(variant, kind, shape):
    library, matrix, kept, dense = packed(variant, kind, shape)
    padded = -(-shape[0] // native.LANES) * native.LANES
    x = np.random.default_rng(1).standard_normal((8, shape[1])).astype(np.float32)
    alone = []
    for rows in range(1, 9):
        y = np.full((rows, padded), np.nan, np.float32)
        library.multiply(ctypes.byref(matrix), x.ctypes.data, y.ctypes.data, rows, 1)
        expected = x[:rows].astype(np.float64) @ dense.astype(np.float64).T
        scale = np.abs(x[:rows]).astype(np.float64) @ np.abs(dense).astype(np.float64).T
        assert (np.abs(y[:, : shape[0]] - expected) <= 4e-6 * scale).all()
        assert (y[:, shape[0] :] == 0).all()
        alone.append(y[0])
        shared = np.full((rows, padded), np.nan, np.float32)
        library.multiply(ctypes.byref(matrix), x.ctypes.data, shared.ctypes.data, rows, 3)
        assert np.array_equal(shared, y), "the bits depend on the number of threads"
    assert all(np.array_equal(alone[0], row) for row in alone), "a row's bits depend on the width"
    assert len(kept) == matrix.nbytes()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [gguf.Q4_1, gguf.Q8_0])
def test_rows_of_any_size_are_multiplied_and_what_is_not_finite_is_seen(variant, kind):
    library, matrix, _kept, dense = packed(variant, kind, (40, 96))
    x = np.random.default_rng(1).standard_normal((8, 96)).astype(np.float32)
    sizes = np.array([1, 0, 1e-41, 1e-30, 1e30, 2**22 - 1, 1, 1], np.float32)
    x *= sizes[:, None]
    x[5] = np.where(x[5] > 0, sizes[5], -sizes[5])  # the largest whole numbers, all of them
    x[6, 40] = np.inf
    x[7, 70] = np.nan
    y = np.full((8, 48), np.nan, np.float32)
    library.multiply(ctypes.byref(matrix), x.ctypes.data, y.ctypes.data, 8, 1)
    exact = x[:6].astype(np.float64) @ dense.astype(np.float64).T
    scale = np.abs(x[:6]).astype(np.float64) @ np.abs(dense).astype(np.float64).T
    assert (np.abs(y[:6, :40] - exact) <= 4e-6 * scale + 2.0**-118).all(), "smaller numbers than 2^-122 may be 0"
    for row, column in ((6, 40), (7, 70)):
        reached = dense[:, column] != 0
        assert not np.isfinite(y[row, :40][reached]).any()


@pytest.mark.skipif("avx512vnni" not in VARIANTS, reason="no integer dot products here")
@pytest.mark.parametrize("kind", [gguf.Q4_1, gguf.Q8_0])
def test_whole_numbers_are_off_by_no_more_than_a_part_of_their_blocks_largest(kind):
    library, matrix, _kept, dense = packed("avx512vnni", kind, (48, 96))
    x = np.random.default_rng(1).standard_normal((8, 96)).astype(np.float32)
    x[:, 40] *= [1, 10, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7]
    y = np.full((8, 48), np.nan, np.float32)
    library.multiply(ctypes.byref(matrix), x.ctypes.data, y.ctypes.data, 8, 1)
    exact = x.astype(np.float64) @ dense.astype(np.float64).T
    largest = np.abs(x).reshape(8, 3, 32).max(-1).astype(np.float64).repeat(32, axis=1)
    rounded = 2.0**-22 * largest @ np.abs(dense).astype(np.float64).T
    summed = 4e-6 * np.abs(x).astype(np.float64) @ np.abs(dense).astype(np.float64).T
    assert (np.abs(y - exact) <= rounded + summed).all()


@pytest.mark.skipif("avx512vnni" not in VARIANTS, reason="no integer dot products here")
def test_whole_numbers_have_22_bits():
    library, matrix, _kept, dense = packed("avx512vnni", gguf.Q8_0, (16, 32))
    x, y = np.zeros((1, 32), np.float32), np.empty((1, 16), np.float32)
    for last, stays in ((0, 0), (1, 0), (3, 4), (4, 4), (5, 4), (7, 8)):
        x[0, 7] = 1 + last * 2.0**-23
        library.multiply(ctypes.byref(matrix), x.ctypes.data, y.ctypes.data, 1, 1)
        expected = dense[:, 7].astype(np.float64) * (1 + stays * 2.0**-23)
        assert np.allclose(y[0], expected, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", [gguf.Q4_1, gguf.Q8_0])
def test_weights_are_the_files_weights_to_the_bit(variant, kind):
    library, matrix, _kept, dense = packed(variant, kind, (33, 64))
    for row in range(33):
        out = np.full(64, np.nan, np.float32)
        library.read_row(ctypes.byref(matrix), row, out.ctypes.data)
        assert np.array_equal(out, dense[row])
    unit = np.zeros((1, 64), np.float32)
    unit[0, 41] = 1
    y = np.full((1, 48), np.nan, np.float32)
    library.multiply(ctypes.byref(matrix), unit.ctypes.data, y.ctypes.data, 1, 1)
    assert np.array_equal(y[0, :33], dense[:, 41])


def test_all_matrices_lie_in_one_piece_of_the_size_that_was_told(tmp_path):
    path = small_llama(0, tmp_path).checkpoint
    file = gguf.GGUFFile(path)
    memory = np.empty(weights.packed_bytes(file), np.uint8)
    native.ask_for_huge_pages(memory)
    allocate, parts = weights.in_one_piece(memory), []

    def take(count: int) -> np.ndarray:
        parts.append(allocate(count))
        assert len(parts[-1]) == count
        return parts[-1]

    weights.PackedModel(path, native.load(), take, 1)
    begins = [part.ctypes.data for part in parts]
    assert len(parts) > 7
    assert all(begin % weights.ALIGNED == 0 for begin in begins)
    ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_floats_include_subnormals_and_signs(variant):
    raw = np.zeros(16 * 34, np.uint8).reshape(16, 34)
    halves = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1, -2, 0.1, 1e-7, 3e-5, 2, 4, 8, 16], np.float16)
    raw[:, :2] = halves[:, None].view(np.uint8)
    raw[:, 2:] = 1
    library = native.Library(variant)
    matrix = native.Matrix(format=native.Q8_0, rows=16, columns=32)
    out = np.empty(matrix.nbytes(), np.uint8)
    library.pack(raw.reshape(-1), np.arange(16, dtype=np.int64), out, matrix)
    found = np.empty(32, np.float32)
    for row in range(16):
        library.read_row(ctypes.byref(matrix), row, found.ctypes.data)
        assert found[0] == np.float32(halves[row])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_exponential_is_within_two_units(variant):
    x = np.linspace(-87, 88, 16 * 4000, dtype=np.float32)
    out = np.empty_like(x)
    native.Library(variant).exponential(x.ctypes.data, out.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2.5 * np.spacing(exact.astype(np.float32))).all()


def test_every_conformance_check_passes():
    results = run_checks(Candidate("lowlat-cpu", "0", LLAMA))
    assert [r for r in results if r.status == "failed"] == []
    assert {r.check for r in results if r.status == "skipped"} == {"deadline", "precision"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instruction_set_keeps_the_promise(variant):
    source = (
        "from lowlat_plugin.conformance import run_check; from lowlat_plugin.registry import Candidate;"
        "from lowlat_cpu.specs import LLAMA; r = run_check(Candidate('x', '0', LLAMA), 'outputs'); print(r);"
        "from lowlat_cpu import native; print(native.load().instruction_set); assert r.status == 'passed'"
    )
    env = os.environ | {"LOWLAT_CPU_ISA": variant, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == variant


SHAPES = [
    {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "hidden_size": 128},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 80, "vocab_size": 33},
    {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_head_shapes_page_sizes_and_long_contexts(changes, page_size, tmp_path):
    case = small_llama(3, tmp_path, **changes)
    case.page_size = page_size
    host = ReferenceHost(case, pages=1200 // page_size)
    registry = Registry()
    registry.register(LLAMA, "lowlat-cpu")
    low = LowLatency(host, registry, Policy.REQUIRE)
    low.choose()
    low.build()
    low.bind()
    low.prove(lengths=(1, 15, 200))
    assert low.state is State.ACTIVE
    assert len(low.results) == 15


def test_a_row_has_the_same_bits_at_every_width_and_beside_any_neighbours():
    host = ReferenceHost(small_llama(4))
    registry = Registry()
    registry.register(LLAMA, "lowlat-cpu")
    low = LowLatency(host, registry, Policy.REQUIRE)
    low.choose()
    low.build()
    low.bind()
    low.prove()
    with torch.inference_mode():
        shadow = Shadow(host, [Shape(Mode.DECODE, 8, 8)], seed=9)
        whole = shadow.step(Shape(Mode.DECODE, 8, 8))
        together = low.forward(whole).clone()
        for row in range(8):
            part = type(whole)(
                Mode.DECODE,
                whole.token_ids_R[row : row + 1],
                whole.positions_R[row : row + 1],
                torch.tensor([0, 1], dtype=torch.int32),
                whole.lengths_Q[row : row + 1],
                whole.page_table_QP[row : row + 1],
                whole.write_slots_R[row : row + 1],
            )
            assert torch.equal(low.forward(part)[0], together[row])


@pytest.mark.parametrize(
    ("metadata", "kind", "said"),
    [
        ({"general.architecture": "gemma3"}, gguf.F32, "'gemma3'"),
        ({"general.architecture": "llama"}, 12, "type 12"),
        ({"general.architecture": "llama"}, gguf.Q4_1, "multiple of 32"),
    ],
)
def test_files_that_are_not_covered_are_refused_with_every_fault(metadata, kind, said, tmp_path):
    path = tmp_path / "odd.gguf"
    gguf.write(path, metadata, {"blk.0.ffn_up.weight": (kind, (3, 33), b"\0" * 4096), "a.b": (1, (7,), b"")})
    faults = weights.file_faults(gguf.GGUFFile(path))
    assert any(said in fault for fault in faults)
    assert len(faults) >= 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.block_count": 3}, "blk.2.attn_q.weight is None"),
        ({"llama.feed_forward_length": 192}, "wanted (192, 96)"),
        ({"llama.attention.head_count": 12}, "blk.0.attn_q.weight is (96, 96), wanted (192, 96)"),
        ({"llama.attention.head_count_kv": 4}, "do not make a model"),
        ({"llama.attention.head_count": 0}, "do not make a model"),
        ({"llama.embedding_length": "wide"}, "no usable"),
    ],
)
def test_files_whose_shapes_disagree_with_their_metadata_never_reach_compiled_code(changes, said, tmp_path):
    case = small_llama(0, tmp_path)
    file = gguf.GGUFFile(case.checkpoint)
    tensors = {name: (i.kind, i.shape, file.raw(name).tobytes()) for name, i in file.tensors.items()}
    path = tmp_path / "odd.gguf"
    gguf.write(path, file.metadata | changes, tensors)
    with pytest.raises(weights.UnsupportedFile) as refusal:
        weights.PackedModel(path, native.load(), lambda n: np.empty(n, np.uint8), 1)
    assert any(said in fault for fault in refusal.value.faults), refusal.value.faults


def test_damaged_files_say_so(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(gguf.GGUFError, match="middle of a value"):
        gguf.GGUFFile(path)
    path.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(gguf.GGUFError, match="not a GGUF file"):
        gguf.GGUFFile(path)


def test_a_file_with_other_weights_than_the_model_is_refused():
    case, other = small_llama(0), small_llama(1)
    case.checkpoint = other.checkpoint
    registry = Registry()
    registry.register(LLAMA, "lowlat-cpu")
    low = LowLatency(ReferenceHost(case), registry)
    low.choose()
    low.build()
    assert low.state is State.FAILED
    assert any("other numbers" in str(reason) for reason in low.report().reasons)


def test_an_examples_file_goes_with_its_process():
    program = "from lowlat_cpu.example import small_llama; path = small_llama().checkpoint; print(path.is_file(), path)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    was_there, path = done.stdout.split()
    assert was_there == "True"
    assert not Path(path).parent.exists()
