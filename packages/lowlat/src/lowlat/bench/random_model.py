"""A model folder with random weights: a real architecture and size to serve, whose answers mean nothing.

The tokenizer is that of a given folder (or of the embedded model), filled up with made-up tokens to the model's
vocabulary, so that every generated id has text and a client sees each token arrive.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import msgspec

from lowlat.bench.presets import DenseShape

SHARD_BYTES = 4_000_000_000
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def _known_tokens(source: dict[str, Any]) -> set[int]:
    words = (source.get("model") or {}).get("vocab")
    if not isinstance(words, dict):
        raise ValueError("the tokenizer.json holds no vocabulary with ids: give another with --tokenizer")
    return {*words.values(), *(token["id"] for token in source.get("added_tokens") or [])}


def tokenizer_size(source: dict[str, Any]) -> int:
    """Tokens of a tokenizer.json: its largest id and one. Raises ValueError where its model has no table of ids."""
    return max(_known_tokens(source)) + 1


def filled_tokenizer(source: dict[str, Any], vocab: int) -> dict[str, Any]:
    """A tokenizer.json in which every id below `vocab` has a token."""
    known = _known_tokens(source)
    extra = {f"x{token}": token for token in range(vocab) if token not in known}
    return {**source, "model": {**source["model"], "vocab": {**source["model"]["vocab"], **extra}}}


def make_folder(
    shape: DenseShape,
    folder: pathlib.Path,
    tokenizer: pathlib.Path,
    *,
    dtype: str = "bfloat16",
    max_context: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write config, tokenizer and random weights into a new `folder`, in shards of at most 4 GB.

    Weights are drawn on `device`, and differ between a CPU and a GPU. `tokenizer` is a folder with a tokenizer.json; a
    shape with fewer tokens gets a larger vocabulary. Raises FileExistsError where
    `folder` is not empty.
    """
    import torch
    from safetensors.torch import save_file

    from lowlat.bench.random_checkpoint import RandomCheckpoint, weight_names

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    source = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    if shape.vocab < tokenizer_size(source):
        shape = msgspec.structs.replace(shape, vocab=-(-tokenizer_size(source) // 64) * 64)
    filled = filled_tokenizer(source, shape.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    weights = RandomCheckpoint(shape, seed, device)
    config = {**shape.config(), "torch_dtype": dtype}
    if max_context is not None:
        config["max_position_embeddings"] = max_context
    names = list(weight_names(shape))
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    total = number = size = 0

    def flush() -> None:
        nonlocal shard, size, number
        if shard:
            number += 1
            file = f"model-{number:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            where.update(dict.fromkeys(shard, file))
            shard, size = {}, 0

    for done, name in enumerate(names, 1):
        tensor = weights.tensor(name, getattr(torch, dtype)).cpu()
        if size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        progress(done, len(names))
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _copy_tokenizer(tokenizer, folder, filled)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _copy_tokenizer(tokenizer: pathlib.Path, folder: pathlib.Path, filled: dict[str, Any]) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(filled), encoding="utf-8")
    for file in _COPIED:
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, folder / file)


def make_family_folder(
    source: pathlib.Path,
    folder: pathlib.Path,
    tokenizer: pathlib.Path,
    *,
    layers: int | None = None,
    dtype: str = "bfloat16",
    max_context: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """The same for the config.json in `source` of a family that is no dense decoder: transformers draws the weights.

    Raises ValueError where the tokenizer has more tokens than the model or `layers` is more than the model has, and
    FileExistsError where `folder` is not empty.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    changes = {} if max_context is None else {"max_position_embeddings": max_context}
    config = AutoConfig.from_pretrained(source, **changes)
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ValueError(f"{source} has {config.num_hidden_layers} layers, not {layers}")
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    words = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    if config.vocab_size < tokenizer_size(words):
        raise ValueError(f"{source} has {config.vocab_size} tokens, the tokenizer {tokenizer_size(words)}")
    torch.manual_seed(seed)
    make: Any = AutoModelForCausalLM.from_config
    with torch.device(device):
        model = make(config, dtype=getattr(torch, dtype))
    model.cpu().save_pretrained(folder, max_shard_size="4GB")
    _copy_tokenizer(tokenizer, folder, filled_tokenizer(words, config.vocab_size))
