"""A tiny target that repeats itself, and a crowd of requests whose answers must not depend on how they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from lowlat.engine.request import GenerateRequest, SamplingParams
from lowlat.offline import Engine
from lowlat.speculative.draft_files import DraftConfig, save_draft
from lowlat.speculative.draft_network import DraftNetwork
from tiny_tokenizer import byte_tokenizer

VOCABULARY = 101
PROPOSERS = ["ngram", "draft-model", "dflash", "dflash2", "dspark"]
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "kv_tokens": 512,
    "chunk_tokens": 8,
    "page_size": 4,
    "max_batch": 4,
    "dtype": "float32",
    "low_latency": "off",
    "seed": 1,
}


def save_target(path: Path, seed: int = 0, **changes: Any) -> Path:
    """A random Llama with margins between its logits that no rounding closes."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 160,
            "initializer_range": 0.3,
            "eos_token_id": None,
        }
        | changes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer(config.vocab_size))
    return path


def random_draft(path: Path, kind: str, seed: int = 0, **changes: Any) -> Path:
    """A draft of `save_target`'s model with random weights everywhere."""
    config = draft_config(kind, **changes)
    save_draft(path, config, random_network(config, seed).state_dict())
    return path


def broken_draft(path: Path, kind: str) -> Path:
    """A draft whose weights are not numbers."""
    config = draft_config(kind)
    weights = random_network(config, 0).state_dict()
    save_draft(
        path, config, {name: of * float("nan") if of.is_floating_point() else of for name, of in weights.items()}
    )
    return path


def draft_config(kind: str, **changes: Any) -> DraftConfig:
    extra: dict[str, Any] = {
        "dflash": {},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
        "dspark": {"markov_rank": 6},
    }[kind]
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "vocab_size": VOCABULARY,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 100,
        "block_size": 5,
    }
    return DraftConfig(kind=kind, **fields | extra | changes)  # type: ignore[arg-type]


def random_network(config: DraftConfig, seed: int) -> DraftNetwork:
    """All weights random: ones and zeros would hide what is left out."""
    torch.manual_seed(seed)
    network = DraftNetwork(config, 200)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * (0.5 if weight.dim() == 1 else 0.2))
    return network.requires_grad_(False)


def crowd() -> list[GenerateRequest]:
    """Greedy and drawn requests with every option, some with the same beginning, one that declines guesses."""
    shared = [(5 * k) % VOCABULARY for k in range(21)]
    prompts = [[(7 * n + k) % VOCABULARY for k in range(3 + 6 * n)] for n in range(4)]
    prompts += [[*shared, 3, 4], [*shared, 9], shared + shared]
    options: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logit_bias": ((7, 3.0),), "min_tokens": 30, "stop_token_ids": (7,)},
        {"temperature": 0.3, "seed": 5, "top_p": 0.9},
        {"temperature": 0.5, "seed": 6, "top_k": 4, "min_p": 0.05},
        {"temperature": 0, "repetition_penalty": 1.05, "frequency_penalty": 0.05},
        {"temperature": 0, "speculate": False},
        {"temperature": 0},
    ]
    return [
        GenerateRequest(
            id=f"r{n}", prompt_ids=prompt, sampling=SamplingParams(max_tokens=40, ignore_eos=True, **option)
        )
        for n, (prompt, option) in enumerate(zip(prompts, options, strict=True))
    ]


def run_all(
    engine: Engine, requests: list[GenerateRequest], late: list[GenerateRequest] | None = None
) -> dict[str, list[int]]:
    """Answers by request; `late` ones come after some steps. Books are checked after each turn."""
    core = engine._core
    answers: dict[str, list[int]] = {}
    for request in requests:
        core.submit(request)
    for turn in range(5000):
        if turn == 9:
            for request in late or []:
                core.submit(request)
        for output in core.turn():
            assert output.error is None
            answers.setdefault(output.id, []).extend(output.token_ids)
        core.scheduler.check()
        if turn > 9 and not core.has_work:
            assert core.scheduler.cache.pool.held == 0
            return answers
    raise AssertionError("the engine does not come to rest")
