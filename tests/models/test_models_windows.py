"""Window pages in the engine: chunk edges, run-ahead, guesses, the next turn of a chat, memory, kernels beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_kit import VOCABULARY, build, check_greedy, make_engine, random_tokens, save_random

import lowlat_plugin
from lowlat.bench.arms.base import StepCase
from lowlat.bench.arms.general import GeneralArm
from lowlat.bench.presets import DenseShape
from lowlat.cache.layout import KVLayout
from lowlat.engine.config import EngineConfig
from lowlat.engine.core import EngineCore
from lowlat.engine.pool_sizes import pool_sizes
from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.layers.step import Segment, StepInputs
from lowlat.offline import Engine
from tiny_tokenizer import byte_tokenizer

WINDOW, ANSWER = 9, 24
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3": {"head_dim": 16, "num_hidden_layers": 6},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"},
    "Mistral": {},
}
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0)


def save(path: Path, family: str) -> Any:
    reference = save_random(path, family, sliding_window=WINDOW, **FAMILIES[family])
    (path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    return reference


def answer(core: EngineCore, prompts: dict[str, list[int]]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Greedy answers and cached tokens of requests that run together."""
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    cached: dict[str, int] = {}
    for name, prompt in prompts.items():
        core.submit(GenerateRequest(id=name, prompt_ids=prompt, sampling=GREEDY))
    while core.has_work:
        for output in core.turn():
            assert output.error is None
            answers[output.id] += output.token_ids
            cached[output.id] = output.cached_tokens
        core.scheduler.check()
    return answers, cached


@pytest.mark.parametrize("run_ahead", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_around_the_window_and_the_next_turn(family: str, run_ahead: int, tmp_path: Path):
    reference, model = save(tmp_path, family), build(tmp_path)
    for chunk_tokens in (WINDOW - 1, WINDOW + 1, 40):
        core = make_engine(
            model,
            pages=100,
            page_size=2,
            chunk_tokens=chunk_tokens,
            max_batch=3,
            run_ahead=run_ahead,
            window_requests=3,
        )
        first = {str(n): random_tokens(5 + 17 * n, 60 + n) for n in range(3)}
        answers, _ = answer(core, first)
        turns = {f"{name} again": [*prompt, *answers[name], 7, 8, 9] for name, prompt in first.items()}
        later, cached = answer(core, turns)
        core.close()
        for name, prompt in first.items():
            check_greedy(reference, prompt, answers[name])
            check_greedy(reference, turns[f"{name} again"], later[f"{name} again"])
            # Of an answer's last token nothing was computed.
            assert cached[f"{name} again"] == (len(prompt) + ANSWER - 1) // 2 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_guesses_leave_nothing_behind(family: str, tmp_path: Path):
    """A text that repeats itself is guessed from, and at random weights most guesses are wrong."""
    reference = save(tmp_path, family)
    prompts = [random_tokens(4, 70 + n) * 7 for n in range(3)]
    settings = {"model": str(tmp_path), "threads": 1, "kv_tokens": 400, "chunk_tokens": 8, "page_size": 2}
    with Engine(**settings, low_latency="off", max_batch=3, spec="ngram", spec_width=6) as engine:
        generations = engine.generate(prompts, GREEDY)
        stats = engine._core.stats()
        total = engine._core.scheduler.cache.windows.total
        assert total < 200
    assert stats.guessed_tokens > stats.accepted_tokens
    # Steps launched ahead of the last answer's end may hold some still.
    assert stats.window_pages_cached + stats.window_pages_free + stats.window_pages_held == total
    assert stats.window_pages_cached > 0
    for prompt, generation in zip(prompts, generations, strict=True):
        check_greedy(reference, prompt, generation.token_ids)


def test_the_smallest_pools_that_serve(tmp_path: Path):
    """Steps are timed and the first one is run on few pages: one request, one token a chunk, a window of one."""
    reference = save_random(tmp_path, "Gemma3", sliding_window=1, **FAMILIES["Gemma3"])
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    settings = {"model": str(tmp_path), "threads": 1, "kv_tokens": 60, "chunk_tokens": 1, "page_size": 1}
    with Engine(
        **settings, low_latency="off", max_batch=1, run_ahead=0, prefix_cache=False, spec="ngram", spec_width=2
    ) as engine:
        assert engine._core.scheduler.cache.windows.total == 3
        prompt = [5, 6, 7] * 4
        check_greedy(reference, prompt, engine.generate(prompt, GREEDY).token_ids)


def test_two_ranks_give_window_pages_back(tmp_path: Path):
    reference = save(tmp_path, "GptOss")
    prompts = [random_tokens(7 + 11 * n, 40 + n) for n in range(3)]
    settings = {"model": str(tmp_path), "threads": 1, "kv_tokens": 512, "chunk_tokens": 8, "page_size": 2}
    with Engine(**settings, tensor_parallel=2, low_latency="off", max_batch=2) as engine:
        generations = engine.generate(prompts, GREEDY)
        again = engine.generate(prompts[2], GREEDY)
        windows = engine._core.scheduler.cache.windows
        assert windows.most < (len(prompts[2]) + ANSWER) // 2 < windows.total < 256
        assert engine._core.scheduler.stats.cached_tokens > WINDOW
    for prompt, generation in zip([*prompts, prompts[2]], [*generations, again], strict=True):
        check_greedy(reference, prompt, generation.token_ids)


def pool_bytes(engine: Engine) -> int:
    kv = engine._core.executor.run.__self__.kv
    return sum(tensor.numel() * tensor.element_size() for tensor in kv.keys + kv.values)


def test_the_pool_is_as_small_as_windows_allow(tmp_path: Path):
    """Five of Gemma 3's six layers hold windows; tokens are those of 16 requests of 250 tokens."""
    save(tmp_path, "Gemma3")
    settings = {"model": str(tmp_path), "low_latency": "off", "threads": 1, "kv_tokens": 4000}
    token = 2 * 2 * 16 * 4  # keys and values, heads, dimension, float32
    with Engine(**settings, max_batch=4, chunk_tokens=16, prefix_cache=False) as engine:
        # 8 tokens before a row, a page and 16 rows touch four pages; a page in each layer is for padding.
        assert pool_bytes(engine) == token * (4000 + 16 + 5 * (4 * 4 * 16 + 16))
        assert pool_bytes(engine) < 0.25 * 6 * 4000 * token
    with Engine(**settings, max_batch=4, chunk_tokens=16) as engine:
        assert pool_bytes(engine) == token * (4000 + 16 + 5 * (3 * 4 * 4 * 16 + 16))


@pytest.mark.parametrize("memory_mib", [1, 20, 400, 10_000])
@pytest.mark.parametrize("family", ["Gemma3", "Mistral", "Llama"])
def test_the_pools_fill_memory_and_never_more(family: str, memory_mib: int, tmp_path: Path):
    window = {} if family == "Llama" else {"sliding_window": WINDOW}
    save_random(tmp_path, family, **window, **FAMILIES.get(family, {}))
    model, memory = build(tmp_path), memory_mib << 20
    config = EngineConfig(max_batch=8, chunk_tokens=64)
    sizes = pool_sizes(config, model.cache_groups(), memory, max_context=4096)
    layout: KVLayout = model.kv_layout(sizes.pages, 16)
    windowed = len(layout.window_layers)
    used = 16 * layout.bytes_per_layer * ((layout.layers - windowed) * sizes.pages + windowed * sizes.window_pages)
    page = 16 * layout.bytes_per_layer * layout.layers
    whole_batch = sizes.pages == 8 * 4096 // 16
    assert used <= memory
    assert whole_batch or used > memory - page
    assert sizes.window_pages <= sizes.pages
    assert (sizes.windows() is None) == (family == "Llama") == (sizes.window_pages == 0)
    if memory_mib == 10_000:
        assert whole_batch
        assert family == "Llama" or sizes.window_pages == 3 * 8 * sizes.window_pages_each < sizes.pages


def test_the_benchmark_of_steps_decodes_over_window_pages(tmp_path: Path):
    changes = {"sliding_window": WINDOW, "max_position_embeddings": 2048, **FAMILIES["Gemma3"]}
    reference = save_random(tmp_path, "Gemma3", **changes)
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer(VOCABULARY))
    shape = DenseShape(
        name="tiny", layers=6, hidden=48, heads=6, kv_heads=2, head_dim=16, intermediate=80, vocab=VOCABULARY,
        max_context=2048,
    )  # fmt: skip
    arm = GeneralArm(StepCase(shape=shape, requests=2, context=1300, dtype="float32", model=str(tmp_path), steps=20))
    assert arm._windows is not None
    assert arm._windows.most < 1300 // 16
    for _ in range(2):
        assert len(arm.measure()) >= 20
    arm.rewind()
    answer = [arm.runner._tokens[1]]
    for _ in range(20):
        arm.decode()
        answer.append(arm.runner._tokens[1])
    prompt = [n % (VOCABULARY - 3) + 3 for n in range(1299)] + [3]
    check_greedy(reference, prompt, answer)


class GemmaKernel(lowlat_plugin.Kernel):
    """Computes by the model's own forward, on the pools it was bound to and the page table it was given."""

    def probe(self, context: lowlat_plugin.BuildContext) -> lowlat_plugin.Plan:
        return lowlat_plugin.Plan(lowlat_plugin.decode_shapes(context.limits_widths))

    def build(self, context: lowlat_plugin.BuildContext) -> None:
        self.model = context.model

    def bind(self, binding: lowlat_plugin.Binding) -> None:
        self.keys = [layer.k_SHD for layer in binding.layers]
        self.values = [layer.v_SHD for layer in binding.layers]
        self.size = binding.layout.page_size

    def forward(self, step: lowlat_plugin.StepInputs) -> torch.Tensor:
        real = int((step.lengths_Q > 0).sum())
        segments = []
        for row, length in enumerate(step.lengths_Q[:real].tolist()):
            places = torch.arange(length)
            slots_L = step.page_table_QP[row].long()[places // self.size] * self.size + places % self.size
            segments.append(Segment(row, 1, length, slots_L, -1))
        rows = torch.arange(len(step.token_ids_R))
        writes = step.write_slots_R[:real]
        inputs = StepInputs(step.token_ids_R, step.positions_R, writes, real, segments, [], rows)
        return self.model.forward(inputs, self)


KERNEL = lowlat_plugin.KernelSpec(
    name="gemma",
    vendor="cpu",
    architectures=frozenset({"Gemma3ForCausalLM"}),
    devices={"*": lowlat_plugin.DeviceLimits(frozenset({1, 2, 3}))},
    numerics=lowlat_plugin.Numerics(
        {
            "logits": lowlat_plugin.Bound(lowlat_plugin.Metric.MAX_ABS, 1e-4),
            "kv": lowlat_plugin.Bound(lowlat_plugin.Metric.RELATIVE, 1e-4),
        },
        tie_margin=1e-3,
    ),
    implementation="test_models_windows:GemmaKernel",
)


def test_kernels_find_windows_in_the_one_page_table_they_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reference = save(tmp_path, "Gemma3")
    registry = lowlat_plugin.Registry()
    registry.register(KERNEL, "here")
    monkeypatch.setattr(lowlat_plugin, "discover", lambda: registry)
    prompts = [random_tokens(20 + n, 90 + n) for n in range(3)]
    settings = {"model": str(tmp_path), "threads": 1, "kv_tokens": 400, "max_batch": 3, "page_size": 2}
    with Engine(**settings, low_latency="require") as engine:
        generations = engine.generate(prompts, GREEDY)
        assert engine._core.scheduler.cache.windows is None
        assert pool_bytes(engine) == 6 * 402 * 2 * 2 * 16 * 4
        steps = {(path, reason): count for path, reason, count in engine._core.stats().low_latency_steps}
        assert steps["plugin", "covered"] >= ANSWER - 1
    for prompt, generation in zip(prompts, generations, strict=True):
        check_greedy(reference, prompt, generation.token_ids)
    with Engine(**settings, low_latency="off") as engine:
        assert engine._core.scheduler.cache.windows is not None
