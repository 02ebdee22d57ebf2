"""A model folder with random weights: a real architecture and size to serve, whose answers mean nothing.

The tokenizer is that of a given folder (or of the embedded model), filled up with made-up tokens to the model's
vocabulary, so that every generated id has text and a client sees each token arrive.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator

from lowlat.bench.presets import DenseShape

SHARD_BYTES = 4_000_000_000
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")


def weight_names(shape: DenseShape) -> Iterator[str]:
    """Names of all weights of a dense decoder, in the order in which they are computed with."""
    yield "model.embed_tokens.weight"
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    parts += ["self_attn.q_norm", "self_attn.k_norm"] if shape.qk_norm else []
    for layer in range(shape.layers):
        yield from (f"model.layers.{layer}.{part}.weight" for part in parts)
    yield "model.norm.weight"
    if not shape.tied:
        yield "lm_head.weight"


def filled_tokenizer(source: dict[str, object], vocab: int) -> dict[str, object]:
    """A tokenizer.json whose vocabulary has `vocab` entries. Raises ValueError where it has more, or is no BPE."""
    model = source.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(words, dict):
        raise ValueError("the tokenizer is not a BPE tokenizer.json: give another with --tokenizer")
    added = source.get("added_tokens")
    known = (
        {*words.values(), *(t["id"] for t in added if isinstance(t, dict))}
        if isinstance(added, list)
        else set(words.values())
    )
    if max(known) >= vocab:
        raise ValueError(
            f"the tokenizer has {max(known) + 1} tokens, the model {vocab}: give a smaller one with --tokenizer"
        )
    extra = {f"x{token}": token for token in range(vocab) if token not in known}
    return {**source, "model": {**model, "vocab": {**words, **extra}}}


def make_folder(
    shape: DenseShape,
    folder: pathlib.Path,
    tokenizer: pathlib.Path,
    *,
    dtype: str = "bfloat16",
    max_context: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write config, tokenizer and random weights into a new `folder`, in shards of at most 4 GB.

    `tokenizer` is a folder with a tokenizer.json. Raises FileExistsError where `folder` is not empty.
    """
    import torch
    from safetensors.torch import save_file

    from lowlat.bench.arms.general import RandomCheckpoint

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name a new folder")
    source = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    filled = filled_tokenizer(source, shape.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    weights = RandomCheckpoint(shape, seed)
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
        tensor = weights.tensor(name, getattr(torch, dtype))
        if size + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
        progress(done, len(names))
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text(json.dumps(filled), encoding="utf-8")
    for file in _COPIED:
        if (tokenizer / file).is_file():
            shutil.copy(tokenizer / file, folder / file)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
