"""Writes random checkpoints in the published format and names, of any size, as a stream.

python -m lowlat.models.deepseek_v4.make_checkpoint --config tiny-v41 --seed 0 PATH
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.config import DeepseekConfig, read_deepseek_config
from lowlat.models.deepseek_v4.names import TensorSpec, WeightSpec, stored_tensors, weight_specs
from lowlat.models.deepseek_v4.presets import preset, preset_names
from lowlat.models.deepseek_v4.random_weights import tensor_pieces
from lowlat.models.deepseek_v4.shards import plan_shards, write_shards
from lowlat.models.deepseek_v4.tiny_tokenizer import write_tiny_tokenizer
from lowlat.models.deepseek_v4.token_map import build_token_map, write_token_map

_LARGEST_TINY_VOCABULARY = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

Progress = Callable[[int, int], None]


class MakeCheckpointError(Exception):
    """A checkpoint cannot be written; the text says why and what to do. Nothing was left behind."""


def make_checkpoint(
    config: str | dict[str, Any],
    path: Path,
    *,
    seed: int = 0,
    tokenizer: Path | None = None,
    shard_bytes: int = 8 << 30,
    progress: Progress | None = None,
) -> int:
    """Write a random checkpoint; returns the bytes of its weights.

    Args:
        config: a preset's name (see `presets.preset_names`), or a whole config.json.
        path: a folder that does not exist yet, or is empty.
        seed: same seed, same bytes; a tensor depends on the seed and its own name alone.
        tokenizer: folder whose tokenizer is copied and whose texts make the Engram token map, with the map's count
            written into the configuration. None: a character tokenizer for tiny vocabularies, else no tokenizer, and
            a map that counts ids modulo the configuration's compressed count (tiny: the identity).
        shard_bytes: size of a weights' file.
        progress: called with (bytes written, bytes in all).

    Raises:
        MakeCheckpointError: unknown preset, a folder that holds something, too little disk, a bad configuration.
    """
    settings = _settings(config)
    token_map = None
    try:
        parsed = read_deepseek_config(settings)
        if parsed.engram_layer_ids:
            token_map, count = _token_map(parsed, tokenizer)
            settings.get("text_config", settings)["engram_compressed_vocab_size"] = count
            parsed = read_deepseek_config(settings)
    except UnsupportedModelError as error:
        raise MakeCheckpointError(str(error)) from error
    owner = {t.name: spec for spec in weight_specs(parsed) for t in stored_tensors(spec, parsed.weight_block)}
    tensors = [t for spec in weight_specs(parsed) for t in stored_tensors(spec, parsed.weight_block)]
    total = sum(tensor.bytes for tensor in tensors)
    created = _prepare(path, total)
    try:
        _write(path, parsed, settings, tensors, owner, seed, shard_bytes, progress or (lambda done, total: None))
        _write_tokenizer(path, parsed, tokenizer)
        if token_map is not None:
            write_token_map(path, token_map)
    except BaseException as error:
        _clean(path, created)
        if isinstance(error, (OSError, ValueError)):
            raise MakeCheckpointError(f"writing {path} failed: {error}") from error
        raise
    return total


def _write(
    path: Path,
    parsed: DeepseekConfig,
    settings: dict[str, Any],
    tensors: list[TensorSpec],
    owner: dict[str, WeightSpec],
    seed: int,
    shard_bytes: int,
    progress: Progress,
) -> None:
    shards = plan_shards(tensors, shard_bytes)
    write_shards(path, shards, lambda tensor: tensor_pieces(owner[tensor.name], tensor, parsed, seed), progress)
    text = json.dumps(settings, indent=2) + "\n"
    (path / "config.json").write_text(text, encoding="utf-8")
    generation = {name: settings[name] for name in ("bos_token_id", "eos_token_id") if name in settings}
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _settings(config: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(config, dict):
        return json.loads(json.dumps(config))  # type: ignore[no-any-return]
    if config not in preset_names():
        raise MakeCheckpointError(f"there is no configuration {config!r}; known: {', '.join(preset_names())}")
    return preset(config)


def _token_map(config: DeepseekConfig, tokenizer: Path | None) -> tuple[np.ndarray, int]:
    if tokenizer is None:
        count = config.engram_compressed_vocab_size
        return np.arange(config.vocab_size, dtype=np.int32) % count, min(count, config.vocab_size)
    from tokenizers import Tokenizer

    file = tokenizer / "tokenizer.json"
    if not file.is_file():
        raise MakeCheckpointError(f"{tokenizer} has no tokenizer.json")
    token_map = build_token_map(Tokenizer.from_file(str(file)), config.vocab_size)
    return token_map, int(token_map.max()) + 1


def _prepare(path: Path, total: int) -> bool:
    """Make the folder; true when it is new."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MakeCheckpointError(f"{path} exists and is not an empty folder: choose another place")
    created = not path.exists()
    parent = path
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if total + (64 << 20) > free:
        raise MakeCheckpointError(f"{total / 1e9:.1f} GB are needed, but {parent} has {free / 1e9:.1f} GB free")
    path.mkdir(parents=True, exist_ok=True)
    return created


def _clean(path: Path, created: bool) -> None:
    for file in path.iterdir():
        file.unlink()
    if created:
        path.rmdir()


def _write_tokenizer(path: Path, config: DeepseekConfig, tokenizer: Path | None) -> None:
    if tokenizer is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, path / name)
    elif config.vocab_size <= _LARGEST_TINY_VOCABULARY:
        write_tiny_tokenizer(path, config.vocab_size)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry: returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lowlat make-checkpoint",
        description="Write a random DeepSeek-V4 or V4.1 checkpoint in the published format, for tests and benchmarks. "
        "tiny-v41 takes seconds and 9 MB; v41-flash needs 510 GB.",
    )
    parser.add_argument("path", type=Path, help="folder to write; must be new or empty")
    parser.add_argument("--config", default="tiny-v41", help=f"one of {', '.join(preset_names())}, or a config.json")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    parser.add_argument("--tokenizer", type=Path, help="folder with the tokenizer to copy and to build Engram's map of")
    parser.add_argument("--shard-gb", type=float, default=8.0, help="size of a weights' file in GB (default 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args(arguments)
    config: str | dict[str, Any] = options.config
    shown = [-1]

    def progress(done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if percent != shown[0] and sys.stderr.isatty():
            print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr, flush=True)
        shown[0] = percent

    try:
        if options.config.endswith(".json"):
            config = json.loads(Path(options.config).read_text(encoding="utf-8"))
        total = make_checkpoint(
            config,
            options.path,
            seed=options.seed,
            tokenizer=options.tokenizer,
            shard_bytes=int(options.shard_gb * 1e9),
            progress=progress,
        )
    except (MakeCheckpointError, OSError, ValueError) as error:
        print(f"make-checkpoint: {error}", file=sys.stderr)
        return 1
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.json:
        print(json.dumps({"path": str(options.path), "weight_bytes": total, "seed": options.seed}))
    else:
        print(f"{options.path}: {total / 1e6:.1f} MB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
