"""Speculation on a GPU: its kernels, and SmolLM2's answers with every proposer beside plain ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lowlat.engine.config import EngineConfig
from lowlat.engine.request import SamplingParams
from lowlat.offline import Engine

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parent.parent / "data"
CASES = [
    case
    for name in ("", "_long")
    for case in json.loads((DATA / f"smollm2_135m_instruct_fp32_greedy{name}.json").read_text())["cases"]
]
TOKENS = 200
SURE_MARGIN = 0.003
"""Beyond the first token with a smaller distance between the two best logits, rounding may decide."""
SETTINGS: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_context": 4096, "kv_tokens": 20_000, "run_ahead": 2,
    "low_latency": "off",
}  # fmt: skip


@pytest.mark.parametrize("vocabulary", [40, 1024, 2500, 49152, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws(vocabulary, dtype):
    from verify_cases import check_draws

    from lowlat.layers.triton.drawing import draw

    check_draws(draw, vocabulary, dtype, "cuda", rows=64)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_walks(dtype, early):
    from verify_cases import check_walks

    from lowlat.layers.triton.drawing import walk

    for _ in range(20 if early else 1):  # a launch that reads what is not there yet would do so now and then
        check_walks(partial(walk, early_start=early), 49152, dtype, "cuda")


@pytest.mark.parametrize("count", [1, 7])
def test_finds(count):
    from verify_cases import check_finds

    from lowlat.layers.triton.history import find_again

    check_finds(find_again, count, "cuda")


@pytest.mark.parametrize("rows", [2, 7, 16])
@pytest.mark.parametrize(
    ("width", "outputs", "gated"), [(576, 960, False), (576, 1536, True), (1536, 576, False), (576, 49152, False)]
)
@pytest.mark.parametrize("early", [False, True])
def test_products_of_rows(rows, width, outputs, gated, early):
    from lowlat.layers.activation import GATED
    from lowlat.layers.triton.row_product import fits, fits_head, row_product

    weight = torch.randn(outputs * (1 + gated), width, device="cuda").bfloat16() * 0.05
    x, stream, norm = (torch.randn(*shape, width, device="cuda").bfloat16() for shape in ((rows,), (rows,), ()))
    assert fits(rows, weight) or fits_head(rows, weight)
    activation = "silu" if gated else None
    before = {"stream_RI": stream, "norm_I": norm, "eps": 1e-5, "activation": activation}
    got, total = row_product(x, weight, **before, early_start=early)
    assert torch.equal(total, x + stream)
    normed = torch.nn.functional.rms_norm((x + stream).double(), (width,), norm.double(), 1e-5)
    expected = normed @ weight.double().t()
    if gated:
        expected = GATED["silu"](*expected.chunk(2, -1))
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("width", [1, 2, 4, 5, 8])
@pytest.mark.parametrize(("counts", "forced"), [(False, False), (True, False), (True, True)])
def test_verification(width, counts, forced):
    from verify_cases import check_verification

    from lowlat.layers.device_reference import ReferenceOps
    from lowlat.layers.triton_ops import TritonOps

    check_verification(TritonOps(132), ReferenceOps(), width, "cuda", counts=counts, forced=forced)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.bfloat16, 1.2e-2)])
@pytest.mark.parametrize(
    ("lengths", "block", "window"), [([1], 6, 0), ([3000, 0, 33], 6, 0), ([1500, 7, 640], 8, 200), ([900], 16, 0)]
)
def test_blocks_of_a_draft(lengths, block, window, dtype, tolerance):
    from verify_cases import block_case, blocks_by_hand

    from lowlat.layers.triton_ops import TritonOps

    shape = {"heads": 9, "kv_heads": 3, "dim": 64, "page_size": 16}
    case, step, rule = block_case(lengths, block, "cuda", dtype, window=window, **shape)
    expected = blocks_by_hand(case, step, rule)
    got = TritonOps(132).attend(case.q_RND, case.keys_SKD, case.values_SKD, step, rule).view_as(expected)
    real = torch.cat([torch.full((block,), length > 0) for length in lengths])
    torch.testing.assert_close(got.double().cpu()[real], expected[real], rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def plain() -> list[tuple[list[int], int]]:
    """Plain greedy answers to the oracle's prompts, and up to where they are sure."""
    with Engine(EngineConfig(max_batch=8, **SETTINGS)) as engine:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=2)
        found = engine.generate([case["input_ids"] for case in CASES], sampling)
    sure = []
    for one in found:
        margins = [entry.top[0].logprob - entry.top[1].logprob for entry in one.logprobs]
        sure.append(next((place for place, margin in enumerate(margins) if margin < SURE_MARGIN), TOKENS))
    assert sum(sure) > 500
    return [(one.token_ids, count) for one, count in zip(found, sure, strict=True)]


def smollm2_draft(folder: Path, kind: str) -> str:
    """A draft of SmolLM2's shape with random weights."""
    from spec_kit import random_draft

    shape = {
        "hidden_size": 576, "vocab_size": 49152, "intermediate_size": 1024, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "target_layer_ids": (1, 14, 27), "num_target_layers": 30,
        "mask_token_id": 49151, "block_size": 6, "markov_rank": 48, "rope_theta": 100000.0,
    }  # fmt: skip
    if kind == "dflash2":
        shape |= {"conv_group_size": 16, "selector_rank": 48, "selector_top_k": 16}
    if kind != "dspark":
        shape.pop("markov_rank")
    return str(random_draft(folder / kind, kind, **shape))


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("spec", ["ngram", "dspark", "dflash", "dflash2", "draft-model"])
def test_greedy_answers_are_plain_ones(spec, batch, plain, tmp_path):
    """With prefix hits: every prompt twice. The small model is the target itself, so all of its guesses are right."""
    options: dict[str, Any] = {"spec": spec, "spec_width": 5 if batch == 8 else None}
    if spec != "ngram":
        options["draft"] = "smollm2" if spec == "draft-model" else smollm2_draft(tmp_path, spec)
    with Engine(EngineConfig(max_batch=batch, **options, **SETTINGS)) as engine:
        runner = engine._core.executor._runner
        assert runner.bodies.captured > 0
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        prompts = [case["input_ids"] for case in CASES]
        for _ in range(2):
            for got, (tokens, sure) in zip(engine.generate(prompts, sampling), plain, strict=True):
                assert got.token_ids[:sure] == tokens[:sure]
                assert len(got.token_ids) == TOKENS
        assert not runner.fallbacks
        report = engine.speculation()
        assert report.guessed > 100
        assert engine._core.stats().cached_tokens > 3000
        if spec == "draft-model":
            assert report.accepted > 0.9 * report.guessed
