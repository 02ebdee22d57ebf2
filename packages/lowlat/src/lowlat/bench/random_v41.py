"""A DeepSeek-V4.1 of random weights in a temporary folder: of the published sizes or tiny, all layers or the first."""

from __future__ import annotations

import pathlib
import tempfile
from typing import Any

from lowlat.bench.arms.base import ArmUnavailableError
from lowlat.bench.presets import V41_NAMES, FolderShape

_PRESETS = dict(zip(V41_NAMES, ("v41-flash", "tiny-v41"), strict=True))


def first_layers(model: str, layers: int | None, *, draft: bool = False) -> dict[str, Any]:
    """The config.json of a preset cut to its first `layers` layers; its draft reads the last ones, so it needs all.

    Raises ValueError for a number of layers that the model does not have, or that has no draft.
    """
    from lowlat.models.deepseek_v4.presets import preset

    text = preset(_PRESETS[model])["text_config"]
    whole = text["num_hidden_layers"]
    count = whole if layers is None else layers
    if not 1 <= count <= whole:
        raise ValueError(f"{model} has {whole} layers, not {count}")
    if draft:
        if count < whole:
            raise ValueError(f"the draft of {model} needs all of its {whole} layers")
        return preset(_PRESETS[model])
    changes: dict[str, Any] = {
        "num_hidden_layers": count,
        "compress_ratios": text["compress_ratios"][:count],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        changes[name] = [layer for layer in text[name] if layer < count]
    changes["engram_num_embeddings"] = text["engram_num_embeddings"][: len(changes["engram_layer_ids"])]
    if text["candidate_source_layer_id"] >= count:
        changes["candidate_source_layer_id"] = -1
    return preset(_PRESETS[model], **changes)


def v41_shape(model: str, layers: int | None) -> FolderShape:
    """Name, vocabulary and context of `deepseek-v41` or `deepseek-v41-tiny`. Raises ValueError for a wrong `layers`."""
    text = first_layers(model, layers)["text_config"]
    name = model if layers is None else f"{model}-{layers}l"
    return FolderShape(name, text["vocab_size"], text["max_position_embeddings"])


def make_v41(model: str, layers: int | None, seed: int, *, draft: bool = False) -> tempfile.TemporaryDirectory[str]:
    """Write it; the folder goes with the object. Raises ArmUnavailableError where it does not fit on the disk."""
    from lowlat.models.deepseek_v4.make_checkpoint import MakeCheckpointError, make_checkpoint

    folder = tempfile.TemporaryDirectory(prefix="lowlat-bench-")
    try:
        make_checkpoint(first_layers(model, layers, draft=draft), pathlib.Path(folder.name), seed=seed)
    except MakeCheckpointError as error:
        folder.cleanup()
        raise ArmUnavailableError(f"{model} cannot be written: {error}; --layers keeps fewer of them") from error
    return folder
