"""The models against the NumPy reference, and against themselves at other widths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from deepseek_kit import Runner, load, reference, some_tokens


@pytest.mark.parametrize("length", [1, 2, 70])
def test_v41_unquantised_equals_the_reference(tiny_v41: Path, length: int) -> None:
    tokens = some_tokens(length, seed=length)
    if length > 30:
        tokens[20:24] = [198] * 4  # an image span
    expected = reference(tiny_v41, quantised=False).forward(tokens)
    logits = Runner(load(tiny_v41, quantised=False, compute=torch.float64)).prefill(0, tokens)
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-9, rtol=1e-9)
    logits = Runner(load(tiny_v41, quantised=False)).prefill(0, tokens)
    assert logits.dtype == torch.float32
    np.testing.assert_allclose(logits.numpy(), expected, atol=2e-4)


def test_the_reference_run_exercises_every_part(tiny_v41: Path) -> None:
    """Candidates, top-k and windows must really leave something out, and experts, engram and images matter."""
    ref = reference(tiny_v41, quantised=False)
    tokens = some_tokens(70)
    logits = ref.forward(tokens)
    assert 0.5 < logits.std() < 10
    config = ref.config
    late = ref.published["chosen", 5]
    assert any(set(a) != set(b) for a, b in zip(late, ref.published["chosen", 3], strict=True))
    blocks = ref.published["candidates", 3]
    assert all(len(blocks[p]) == min(3, p // 4 + 1) for p in range(70))
    full = reference(tiny_v41, quantised=False)
    full.config = config | {"candidate_topk_blocks": 100}
    assert np.abs(full.forward(tokens) - logits).max() > 1e-3, "pruning must matter here"
    assert all(len(chosen) == config["index_topk"] for chosen in late[8:])
    other = [*tokens]
    other[10] = 198
    assert np.abs(reference(tiny_v41, quantised=False).forward(other)[10:] - logits[10:]).max() > 1e-3


@pytest.mark.parametrize("length", [1, 70])
def test_v41_quantised_equals_the_reference(tiny_v41: Path, length: int) -> None:
    tokens = some_tokens(length, seed=length)
    ref = reference(tiny_v41, quantised=True)
    expected = ref.forward(tokens)
    logits = Runner(load(tiny_v41)).prefill(0, tokens)
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-9, rtol=1e-9)
    plain = reference(tiny_v41, quantised=False).forward(tokens)
    assert np.abs(plain - expected).max() > 1e-2, "quantisation must have done something"


@pytest.mark.parametrize("chunks", [[1] * 69, [7, 1, 30], [16, 16, 16, 16], [33], [34, 1, 1, 1, 20]])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("length", [69, 70])
def test_chunks_and_single_rows_equal_one_prefill(
    tiny_v41: Path, chunks: list[int], quantised: bool, length: int
) -> None:
    tokens = some_tokens(length, seed=3)
    tokens[30:33] = [198] * 3  # an image span across the edge of chunks
    model = load(tiny_v41, quantised=quantised)
    whole = Runner(model, seed=1)
    expected = whole.prefill(0, tokens)
    parts = Runner(model, seed=2)
    logits = parts.prefill(1, tokens, chunks)
    if quantised:
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [3, 75])
def test_v4_equals_the_reference(tiny_v4: Path, length: int) -> None:
    tokens = some_tokens(length, seed=length)
    expected = reference(tiny_v4, quantised=False).forward(tokens)
    model = load(tiny_v4, quantised=False, compute=torch.float64)
    np.testing.assert_allclose(Runner(model).prefill(0, tokens).numpy(), expected, atol=1e-9, rtol=1e-9)
    for chunks in ([1] * (length - 1), [2], [length // 2]):
        logits = Runner(model, seed=5).prefill(2, tokens, chunks)
        np.testing.assert_allclose(logits.numpy(), expected, atol=1e-9, rtol=1e-9)
