"""A trained draft on disk: a folder with config.json and model.safetensors, weights as they are or as int8 rows.

An int8 matrix NAME comes with NAME_scale, float32 [rows]: row r is the integers times scale r. `fc.weight` may come
with `fc.weight_columns`, by which its columns are multiplied then: features differ in size, and rows of int8 shall not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
"""By the name that `--spec` has for them."""


def shipped_draft(model: str, kind: str) -> str | None:
    """Folder of the draft of this kind that comes with lowlat for an embedded model; None: there is none."""
    folder = Path(__file__).parents[1] / "drafts" / f"{model}-{kind}"
    return str(folder) if re.fullmatch(r"[\w-]+", model) and (folder / "config.json").exists() else None


class DraftFileError(Exception):
    """A draft cannot be used; the text says why and what to do."""


class DraftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a draft. Embedding and head are the target's, so `hidden_size` and `vocab_size` are too."""

    kind: Literal["dflash", "dflash2", "dspark"]
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...]
    """Target layers whose outputs are the draft's features, from the lowest."""
    num_target_layers: int
    mask_token_id: int
    """Token in the places to be guessed."""
    block_size: int = 16
    """Rows of a block: the anchor and masks. DSpark guesses one token a row, the others one a mask."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    sliding_window: int = 0
    """Tokens before the block that it sees; 0: all."""
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    markov_rank: int = 0
    draft_vocab_size: int = 0
    """Tokens that it can guess, listed in the weights; 0: all of them."""

    @property
    def guessable(self) -> int:
        """Tokens that it can guess."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def proposals(self) -> int:
        """Tokens that one block guesses."""
        return self.block_size if self.kind == "dspark" else self.block_size - 1

    def check(self) -> None:
        """Raises `DraftFileError` for a shape that is none."""
        positive = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "head_dim")
        faults = [f"{name} is not above 0" for name in positive if getattr(self, name) < 1]
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            faults.append(f"{heads} query heads are not a multiple of {kv_heads} key-value heads")
        if self.sliding_window < 0:
            faults.append("sliding_window is below 0")
        if self.head_dim % 2:
            faults.append("head_dim is odd")
        if self.proposals < 1 or self.block_size > 64:
            faults.append(f"a block of {self.block_size} rows guesses nothing or more than 64")
        taps = self.target_layer_ids
        if not taps or not all(0 <= layer < self.num_target_layers for layer in taps):
            faults.append(f"target_layer_ids {list(taps)} are not layers 0 to {self.num_target_layers - 1}")
        if list(taps) != sorted(set(taps)):
            faults.append(f"target_layer_ids {list(taps)} are not in rising order, in which features come")
        if not 0 <= self.mask_token_id < self.vocab_size:
            faults.append(f"mask_token_id {self.mask_token_id} is not in the vocabulary")
        if self.kind == "dflash2":
            if self.conv_kernel_size < 1 or self.conv_group_size < 1 or self.hidden_size % self.conv_group_size:
                faults.append("conv_kernel_size and conv_group_size (a divisor of hidden_size) must be given")
            if self.selector_rank < 1 or self.selector_top_k < 1:
                faults.append("selector_rank and selector_top_k must be given")
        if self.kind == "dspark" and self.markov_rank < 1:
            faults.append("markov_rank must be given")
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            faults.append(f"draft_vocab_size {self.draft_vocab_size} is not between 0 and vocab_size")
        if self.draft_vocab_size and self.kind == "dflash2":
            faults.append("draft_vocab_size is not known for DFlash 2")
        if faults:
            raise DraftFileError(f"the draft's config.json: {'; '.join(faults)}")


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Layers to tap: the middle for one, else spread evenly from layer 1 to the fourth from the end."""
    if count == 1:
        return (target_layers // 2,)
    if target_layers < 4 + count:
        return tuple(range(min(count, target_layers)))
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


_PLAIN = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window"),
)


def to_json(config: DraftConfig) -> dict[str, Any]:
    """config.json of a draft."""
    fields: dict[str, Any] = msgspec.to_builtins(config)
    kind = fields.pop("kind")
    plain = {name: fields.pop(name) for name in _PLAIN}
    return {"architectures": [ARCHITECTURES[kind]], **plain, "dflash_config": fields}


def from_json(data: dict[str, Any]) -> DraftConfig:
    """Raises `DraftFileError`."""
    names, inner = data.get("architectures") or [], data.get("dflash_config") or {}
    if not isinstance(names, list) or not isinstance(inner, dict):
        raise DraftFileError("the draft's config.json: architectures must be a list and dflash_config an object")
    kinds = [kind for kind, name in ARCHITECTURES.items() if name in names]
    if not kinds:
        known = ", ".join(ARCHITECTURES.values())
        raise DraftFileError(f"architecture {', '.join(map(str, names)) or '(none)'} is no draft; known: {known}")
    fields = {name: data[name] for name in _PLAIN if data.get(name) is not None}
    fields |= {name: value for name, value in inner.items() if value is not None}
    known_fields = {name: value for name, value in fields.items() if name in DraftConfig.__struct_fields__}
    try:
        config = msgspec.convert({"kind": kinds[0], **known_fields}, DraftConfig)
    except msgspec.ValidationError as error:
        raise DraftFileError(f"the draft's config.json: {error}") from None
    config.check()
    return config


def save_draft(folder: Path, config: DraftConfig, weights: dict[str, torch.Tensor], *, int8: bool = False) -> None:
    """Write a draft into `folder`, which may exist. With `int8` matrices are rounded to 255 levels a row."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not weight.is_floating_point():
            stored[name] = weight.detach().to("cpu", torch.int32)
            continue
        weight = weight.detach().float().cpu()
        if int8 and weight.dim() == 2:
            scale = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
            stored[name] = (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
            stored[f"{name}_scale"] = scale
        else:
            stored[name] = weight.contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors keeps new files to their owner
    (folder / "config.json").write_text(json.dumps(to_json(config), indent=1) + "\n", encoding="utf-8")


def load_config(folder: Path) -> DraftConfig:
    """A draft's configuration alone. Raises `DraftFileError`."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _no_draft(folder, error) from None
    if not isinstance(data, dict):
        raise DraftFileError(f"{folder}/config.json does not hold an object")
    return from_json(data)


def _no_draft(folder: Path, error: Exception) -> DraftFileError:
    return DraftFileError(
        f"{folder} is no draft: {error}; give a folder with config.json and model.safetensors, as lowlat train-draft "
        "writes it"
    )


def load_draft(folder: Path) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """A draft's configuration and float32 weights. Raises `DraftFileError`."""
    config = load_config(folder)
    try:
        stored = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _no_draft(folder, error) from None
    weights = {}
    for name, weight in stored.items():
        if name.endswith(("_scale", "_columns")):
            continue
        scale = stored.get(f"{name}_scale")
        if scale is not None and scale.shape != weight.shape[:1]:
            raise DraftFileError(f"{folder}: {name}_scale must hold one number for each row of {name}")
        if weight.dtype == torch.int32:
            weights[name] = weight.long()
            continue
        weights[name] = weight.float() if scale is None else weight.float() * scale.float()[:, None]
        if f"{name}_columns" in stored:
            weights[name] *= stored[f"{name}_columns"].float()
    known = weights["draft_tokens"].flatten().tolist() if "draft_tokens" in weights else []
    if known != sorted(set(known)) or (known and not 0 <= known[0] <= known[-1] < config.vocab_size):
        raise DraftFileError(f"{folder}: draft_tokens are not tokens of the vocabulary in rising order")
    return config, weights


def load_factors(folder: Path) -> torch.Tensor:
    """By which a stored draft's features are multiplied. Raises `DraftFileError`."""
    factors_X = load_file(folder / "model.safetensors").get("fc.weight_columns")
    if factors_X is None:
        raise DraftFileError(f"{folder} has no fc.weight_columns: lowlat train-draft did not write it")
    return factors_X.float()
