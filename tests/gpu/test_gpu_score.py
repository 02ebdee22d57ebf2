"""Scores on a GPU: items in one sequence equal one sequence an item, in graphs, beside answers, in float32 to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowlat.engine.request import GenerateRequest, SamplingParams

pytestmark = pytest.mark.gpu

SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
}
LENGTHS = (1, 8, 3, 1, 20, 8, 40, 2)


@pytest.fixture(scope="module", params=SHAPES)
def scorer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Requests of a tiny random model, and a function that makes an engine for them on the GPU."""
    from device_kit import EngineSize, make_engine
    from family_kit import save_random
    from test_models_score import Scorer

    from lowlat.engine.device_build import device_ops
    from lowlat.engine.graphs import CudaGraphs
    from lowlat.models.base import BuildContext
    from lowlat.models.loading.checkpoint import open_checkpoint
    from lowlat.models.registry import build_model
    from lowlat.parallel.group import SingleRank
    from lowlat.platform import select

    class DeviceScorer(Scorer):
        def __init__(self, path: Path) -> None:
            save_random(path, request.param, initializer_range=0.08, **SHAPES[request.param])
            self.platform = select("cuda")
            context = BuildContext(self.platform, SingleRank(), torch.float32, 512)
            self.model = build_model(open_checkpoint(path), context, lambda done, total: None)
            self.names = 0

        def device_engine(self, **size: Any) -> Any:
            ops, fused = device_ops(self.platform.device)
            assert fused
            sized = EngineSize(**{"pages": 400, "page_size": 4, "chunk_tokens": 256, "max_batch": 8, **size})
            options: dict[str, Any] = {"bodies": CudaGraphs(self.platform.device), "device": self.platform.device}
            return make_engine(self.model, sized, 2, ops=ops, **options)

    return DeviceScorer(tmp_path_factory.mktemp(request.param))


def scores(scorer: Any, core: Any, query: list[int], items: list[list[int]]) -> torch.Tensor:
    from test_models_score import together

    return together(scorer, core, query, items)


def items_of(*lengths: int) -> list[list[int]]:
    from family_kit import random_tokens

    return [random_tokens(length, 60 + place) for place, length in enumerate(lengths)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [256, 24])
def test_items_together_equal_items_alone(scorer: Any, chunk_tokens: int):
    """All in one step, and cut at item boundaries; cold, from the cache, and once more from graphs."""
    from family_kit import random_tokens
    from test_models_score import one_by_one

    query, items, core = random_tokens(50, 51), items_of(*LENGTHS), scorer.device_engine(chunk_tokens=chunk_tokens)
    runner = core.executor._runner
    expected = one_by_one(scorer, scorer.device_engine(), query, items)
    for turn in range(4):
        close(scores(scorer, core, query, items), expected)
        other = random_tokens(50, 90 + turn)  # a new query: the same kinds of steps, other numbers
        close(scores(scorer, core, other, items), one_by_one(scorer, scorer.device_engine(), other, items))
    assert runner.bodies.captured > 0, "no step was captured"
    assert core.scheduler.stats.cached_tokens > 0
    assert not runner.fallbacks


def test_order_and_neighbours_do_not_matter(scorer: Any):
    from family_kit import random_tokens

    query, items, core = random_tokens(37, 52), items_of(*LENGTHS), scorer.device_engine()
    first = scores(scorer, core, query, items)
    order = [4, 0, 5, 7, 2, 1, 6, 3]
    close(scores(scorer, core, query, [items[place] for place in order]), first[order])
    changed = [*items[:2], random_tokens(5, 99), *items[3:]]
    others = [0, 1, 3, 4, 5, 6, 7]
    moved = scores(scorer, core, query, changed)
    close(moved[others], first[others])
    assert (moved[2] - first[2]).abs().max() > 1e-3


def test_scores_beside_answers(scorer: Any):
    """One step has items and decode rows; both say what they say alone."""
    from family_kit import random_tokens
    from test_models_score import run

    items = items_of(*LENGTHS)
    sampling = SamplingParams(max_tokens=24, temperature=0)
    plain = GenerateRequest(id="plain", prompt_ids=random_tokens(12, 80), sampling=sampling)
    queries = [random_tokens(length, length) for length in (5, 19, 30)]
    alone = scorer.device_engine()
    tokens = run(alone, [plain])["plain"]
    expected = [scores(scorer, alone, query, items) for query in queries]
    core = scorer.device_engine(chunk_tokens=48)
    asked = [scorer.request(query, items) for query in queries]
    before = core.scheduler.stats.step
    found = run(core, [plain, *asked])
    assert found["plain"] == tokens
    for one, wanted in zip(asked, expected, strict=True):
        close(torch.tensor(found[one.id]), wanted)
    assert core.scheduler.stats.step - before < 24 + 9, "scores had steps of their own"
    assert not core.executor._runner.fallbacks


def test_a_launch_of_scores_never_waits(scorer: Any):
    from test_models_device_score import score_step

    core = scorer.device_engine()
    runner = core.executor._runner
    for step in range(4):
        runner.run(score_step(step, step % 2, step < 2))  # the second time captures
    captured = runner.bodies.captured
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [runner.launch(score_step(4 + step, step % 2, False)) for step in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    results = [one.wait().label_logprobs for one in pending]
    assert results[0] == results[2] != results[1]
    assert runner.bodies.captured == captured > 0


CASES = [
    # lengths, rows, items of each segment, heads, kv heads, dim, page size, window, sinks
    ([1152], [128], [[8] * 16], 16, 8, 128, 16, 0, False),
    ([1152, 1024, 0], [128, 1024, 5], [[8] * 16, [], []], 16, 8, 128, 16, 0, False),
    ([900, 70, 300], [200, 70, 131], [[100, 1, 99], [35, 35], [7] * 18], 9, 3, 64, 16, 0, True),
    ([2600, 300], [80, 300], [[40, 40], []], 32, 8, 64, 16, 600, True),
    ([700], [33], [[33]], 4, 2, 256, 16, 20, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "rows", "items", "heads", "kv_heads", "dim", "page", "window", "sinks"), CASES)
def test_attention_of_items(lengths, rows, items, heads, kv_heads, dim, page, window, sinks, dtype):
    from kernel_cases import PagedCase

    from lowlat.layers.device_reference import ReferenceOps
    from lowlat.layers.triton import attention

    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page, "window": window}
    case = PagedCase(lengths, rows, dtype=dtype, device="cuda", items=items, **shape)
    rule = case.rule(window=window, sinks=sinks)
    wide = case.q_RND.double(), case.keys_SKD.double(), case.values_SKD.double()
    expected = ReferenceOps().attend(*wide, case.step, rule).view_as(case.q_RND)
    out = torch.full_like(case.q_RND, float("nan"))
    paged = (case.q_RND, case.keys_SKD, case.values_SKD, case.table_TP, case.page_size)
    programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    attention.attend(*paged, case.segments, rule, out, programs=programs)
    tolerance = 3e-5 if dtype == torch.float32 else 1.2e-2
    assert not out.isnan().any()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
