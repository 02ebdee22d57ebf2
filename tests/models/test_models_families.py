"""Every family's logits equal those of transformers: whole prompts, in chunks, token by token, and ragged batches, with
windows that are crossed; two ranks compute what one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_kit import (
    GREEDY,
    ThreadRanks,
    build,
    check_equal,
    check_one_request,
    check_ragged_batch,
    expected_logits,
    make_runner,
    random_tokens,
    save_random,
)

from lowlat.engine.batch import PrefillChunk, StepPlan
from lowlat.models.base import BuildContext
from lowlat.models.config import UnsupportedModelError
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import Communicator, SingleRank
from lowlat.platform import select

_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "attn_implementation": "eager",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2 window above": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 biased, window": (
        "Qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
    "gemma3 scaled, capped": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 64,
            "num_key_value_heads": 1,
            "rope_parameters": _GEMMA_ROPE,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3 window of one": ("Gemma3", {"head_dim": 16, "sliding_window": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window, one expert": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 12},
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3 moe, some dense": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "gpt-oss": ("GptOss", {**_GPT_OSS, "sliding_window": 10}),
    "gpt-oss wide window": ("GptOss", {**_GPT_OSS, "sliding_window": 61, "swiglu_limit": 0.5, "swiglu_alpha": 1.5}),
}

Pairs = dict[str, tuple[Path, Any, Any]]
"""By case: the checkpoint's folder, transformers' model and lowlat's."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Each case's folder, reference and model, made once."""
    made = {}
    for case, (family, changes) in CASES.items():
        path = tmp_path_factory.mktemp("family")
        made[case] = (path, save_random(path, family, **changes), build(path))
    return made


@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_equal_transformers(case: str, pairs: Pairs):
    _, reference, model = pairs[case]
    check_one_request(reference, model)


@pytest.mark.parametrize("case", CASES)
def test_ragged_batches_equal_transformers(case: str, pairs: Pairs):
    _, reference, model = pairs[case]
    check_ragged_batch(reference, model, min_rows=8)


# Two key-value heads or more: a rank needs a whole one.
SHARED = [case for case in CASES if case not in ("gemma3 scaled, capped", "qwen2 tied")]


@pytest.mark.parametrize("case", SHARED)
def test_two_ranks_compute_what_one_does(case: str, pairs: Pairs):
    path, reference, _ = pairs[case]
    tokens = random_tokens(40, 5)
    expected = expected_logits(reference, tokens)
    group = ThreadRanks(2)

    def work(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        model = build(path, communicator)
        runner, recorder = make_runner(model, communicator=communicator)
        runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, [*range(14)])], [PrefillChunk(0, 0, tokens[:39], True)], []))
        prefilled = recorder.logits[0]
        runner._tokens[0] = tokens[39]
        runner.run(StepPlan(1, [], [], [], [0]))
        assert runner.kv.layout.kv_heads == 1
        return prefilled, recorder.logits[0]

    for prefilled, decoded in group.run(work):
        check_equal(prefilled, expected[38])
        check_equal(decoded, expected[39])
    assert group.sums == 2 * 2 * reference.config.num_hidden_layers


@pytest.mark.parametrize("case", ["qwen2", "gemma3", "mixtral", "qwen3 moe", "gpt-oss"])
def test_bfloat16_stays_near_float32(case: str, pairs: Pairs):
    path, reference, _ = pairs[case]
    tokens = random_tokens(30, 9)
    expected = expected_logits(reference, tokens)
    model = build(path, dtype=torch.bfloat16)
    assert model.layers[0].input_norm_H.dtype == model.embedding_VH.dtype == torch.bfloat16
    runner, recorder = make_runner(model)
    runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, [*range(10)])], [PrefillChunk(0, 0, tokens[:29], True)], []))
    logits = [recorder.logits[0]]
    runner._tokens[0] = tokens[29]
    runner.run(StepPlan(1, [], [], [], [0]))
    logits.append(recorder.logits[0])
    assert logits[0].dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(torch.stack(logits), expected[28:])
    assert similarity.min() > 0.97


def test_windows_matter_and_are_crossed(pairs: Pairs):
    """The comparisons above would pass without windows if nothing lay beyond them."""
    path, reference, _ = pairs["gemma3"]
    tokens = random_tokens(70, 1)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["sliding_window"] == 10
    reference.config.sliding_window = 70
    try:
        wide = expected_logits(reference, tokens)
    finally:
        reference.config.sliding_window = 10
    narrow = expected_logits(reference, tokens)
    check_equal(wide[:10], narrow[:10])
    assert (wide[10:] - narrow[10:]).abs().amax(-1).min() > 1e-3


def test_windows_read_no_key_outside_them(pairs: Pairs):
    """Keys that no layer may see any more are poisoned between steps; decode rows, chunks and batches go on."""
    _, reference, model = pairs["mistral"]
    window, tokens = 11, random_tokens(70, 6)
    expected = expected_logits(reference, tokens)
    runner, recorder = make_runner(model, page_size=1, max_pages=70)
    pages = torch.randperm(120, generator=torch.Generator().manual_seed(7)).tolist()
    runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, pages[:70])], [PrefillChunk(0, 0, tokens[:40], True)], []))

    def poison(seen_from: int) -> None:
        span, owned = runner.spans[0]
        passed = [runner.windows._attached[page] for page in owned[span.first : seen_from]]
        assert passed, "the page before the window is still there"
        for tensor in runner.kv.keys + runner.kv.values:
            tensor[passed] = float("nan")

    poison(40 - window + 1)
    runner.run(StepPlan(1, [], [], [PrefillChunk(0, 40, tokens[40:50], True)], []))
    check_equal(recorder.logits[0], expected[49])
    for position in range(50, 60):
        poison(position - window + 1)
        runner._tokens[0] = tokens[position]
        runner.run(StepPlan(2, [], [], [], [0]))
        check_equal(recorder.logits[0], expected[position])


@pytest.mark.parametrize("case", ["mistral", "gemma3", "gpt-oss"])
def test_windows_in_the_pages_of_other_layers(case: str, pairs: Pairs):
    """Where no window pages are given, as kernel libraries expect that know one page table."""
    _, reference, model = pairs[case]
    check_one_request(reference, model, own_pages=False)


@pytest.mark.parametrize("case", ["mistral", "qwen2 window above", "gemma3", "gemma3 window of one", "gpt-oss"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_chunks_of_every_size_around_the_window(case: str, page_size: int, pairs: Pairs):
    """Chunks that end before, at and after a window and a page, and rows behind each; the window moves on many times
    its own length, over window pages that were used before."""
    _, reference, model = pairs[case]
    window = model.config.windows[-1] or model.config.windows[0]
    for size in (1, window - 1, window, window + 1, 2 * window + 1):
        if size < 1:
            continue
        tokens = random_tokens(max(6 * window, 3 * size) + 5, size)
        expected = expected_logits(reference, tokens)
        runner, recorder = make_runner(model, page_size=page_size, max_pages=110, span=size)
        pages = torch.randperm(120, generator=torch.Generator().manual_seed(size))[: -(-len(tokens) // page_size)]
        plan = StepPlan(0, [(0, GREEDY)], [(0, 0, pages.tolist())], [], [])
        for start in range(0, len(tokens) - 4, size):
            end = min(start + size, len(tokens) - 4)
            plan.chunks = [PrefillChunk(0, start, tokens[start:end], True)]
            runner.run(plan)
            check_equal(recorder.logits[0], expected[end - 1])
            plan = StepPlan(1, [], [], [], [])
        for position in range(len(tokens) - 4, len(tokens)):
            runner._tokens[0] = tokens[position]
            runner.run(StepPlan(2, [], [], [], [0]))
            check_equal(recorder.logits[0], expected[position])
        assert runner.windows.in_use < len(pages), "window pages were given back"


def test_window_layers_hold_a_window_and_no_more(pairs: Pairs):
    _, _, model = pairs["gemma3"]
    runner, _ = make_runner(model, page_size=4, pages=240, span=16)
    layer_bytes = [keys.numel() * keys.element_size() for keys in runner.kv.keys]
    windows = model.config.windows
    assert windows.count(0) == 1
    for size, window in zip(layer_bytes, windows, strict=True):
        # Six requests with 9 tokens before a row, a page and 16 rows, which touch at most 8 pages; one is padding.
        pages = 6 * 8 + 1 if window else 240 + 1
        assert size == pages * 4 * 2 * 16 * 4
    groups = {group.name: group for group in model.cache_groups()}
    assert (groups["kv.window"].lifetime, groups["kv.window"].window) == ("window", 10)
    assert groups["kv"].bytes_per_entry * 6 == groups["kv.window"].bytes_per_entry == 6 * 2 * 2 * 16 * 4


def test_long_windowed_prefills_go_block_by_block(pairs: Pairs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowlat.layers.attention._MASK_ENTRIES", 900)
    for case in ("gemma3", "gpt-oss", "gemma3 window of one"):
        _, reference, model = pairs[case]
        check_one_request(reference, model, length=60)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types for 1 layers"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ("gemma3", {"layer_types": "full_attention"}, "layer_types must be a list"),
        ("qwen2 window above", {"sliding_window": "wide"}, "windows"),
        ("qwen2 window above", {"sliding_window": -4}, "sliding_window -4"),
        ("qwen3", {"rope_parameters": ["yarn"]}, "rope_parameters must be an object"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts must be a whole number"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts a row cannot be chosen out of 5"),
        ("qwen3 moe", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("gpt-oss", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ],
)
def test_unsupported_variants_say_why(case: str, changes: dict[str, Any], message: str, pairs: Pairs):
    checkpoint = open_checkpoint(pairs[case][0])
    checkpoint.config.update(changes)
    context = BuildContext(select("cpu"), SingleRank(), torch.float32, 256)
    with pytest.raises(UnsupportedModelError, match=message):
        build_model(checkpoint, context, lambda done, total: None)
