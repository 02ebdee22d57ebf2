"""Opening a model by name or path: configuration, weights, tokenizer and chat template behind one object."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowlat.models.loading.conversion import Progress, convert_once
from lowlat.models.loading.errors import CheckpointError
from lowlat.models.loading.gguf import GGUFFile
from lowlat.models.loading.gguf_model import GGUFModel
from lowlat.models.loading.registry import EMBEDDED, embedded_path
from lowlat.models.loading.safetensors_folder import SafetensorsFolder
from lowlat.text.chat import ChatTemplate
from lowlat.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a checkpoint comes from. `path` is the user's file or folder, not the cache's."""

    path: Path
    kind: Literal["safetensors", "gguf"]

    def gguf(self) -> GGUFModel:
        """The original GGUF file, whose blocks a kernel library may read (`GGUFFile.raw`).

        Raises:
            CheckpointError: the checkpoint does not come from a GGUF file.
        """
        if self.kind != "gguf":
            raise CheckpointError(f"{self.path} is not a GGUF file")
        return GGUFModel(GGUFFile(self.path))


class Checkpoint:
    """A model's files in the Hugging Face form, read lazily: opening reads no weights.

    Attributes:
        name: what the user asked for.
        config: config.json. `tie_word_embeddings` is always set.
        generation_config: generation_config.json, or {} (end-of-sequence ids are on the tokenizer).
        source: the user's file or folder and its kind.
        folder: the folder that is read: the user's, or the cache's for a GGUF file.
        fingerprint: changes when the files change; made of sizes, times and heads, not of all content.
    """

    def __init__(self, name: str, folder: Path, source: Source, fingerprint: str | None = None) -> None:
        """Raises CheckpointError for a missing or damaged configuration or missing weights."""
        self.name = name
        self.folder = folder
        self.source = source
        self.config = _read_object(folder / "config.json")
        self.generation_config = _read_object(folder / "generation_config.json", optional=True)
        tied = self.config.get("tie_word_embeddings")
        # Families differ in the default, so where the configuration is silent the files decide.
        self._weights = SafetensorsFolder(folder, tied_head=tied is not False)
        if tied is None:
            self.config["tie_word_embeddings"] = "lm_head.weight" not in self._weights.names()
            self._weights = SafetensorsFolder(folder, tied_head=self.config["tie_word_embeddings"])
        self.fingerprint = fingerprint or self._make_fingerprint()

    def names(self) -> list[str]:
        """Names of the stored weights, sorted. A tied `lm_head.weight` is not listed, but can be read."""
        return self._weights.names()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointError when there is no such weight."""
        return self._weights.shape(name)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> torch.Tensor:
        """A weight as a new contiguous CPU tensor, or the part that one tensor-parallel rank needs.

        Args:
            name: Hugging Face name, such as `model.layers.0.self_attn.q_proj.weight`.
            dtype: of the result; None: as stored (float32 for quantised GGUF files).
            rows: part of the first dimension (output features), None: all.
            columns: part of the second dimension (input features), None: all.

        Raises:
            CheckpointError: no such weight, columns of a vector, or a damaged file.
        """
        return self._weights.tensor(name, dtype, rows, columns)

    def tokenizer(self) -> Tokenizer:
        """Raises CheckpointError when the folder has no tokenizer.json."""
        try:
            return Tokenizer.from_folder(self.folder)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error

    def chat_template(self) -> str | None:
        """Source of the chat template: chat_template.jinja, chat_template.json or tokenizer_config.json, or None."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            template = _read_object(self.folder / name, optional=True).get("chat_template")
            if isinstance(template, list):
                named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
                template = named.get("default")
            if isinstance(template, str) and template:
                return template
        return None

    def chat(self, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The chat template, ready to use with this checkpoint's tokenizer.

        Raises ChatTemplateError when the template cannot be parsed.
        """
        source = self.chat_template()
        return None if source is None else ChatTemplate(source, tokenizer.special_tokens)

    def weight_bytes(self) -> int:
        """Size of the weights' files on disk."""
        return sum(path.stat().st_size for path in self._weights.files)

    def _make_fingerprint(self) -> str:
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path in self._weights.files:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:32]


def open_checkpoint(model: str | Path, *, progress: Progress | None = None) -> Checkpoint:
    """Opens a model.

    Args:
        model: `smollm2` (the embedded default), a Hugging Face style folder with safetensors, or a .gguf file.
        progress: called while a GGUF file is converted (once a file; later opens find it in the cache) with bytes
            done, bytes in all (0: unknown) and what is being done.

    Raises:
        CheckpointError: there is no such model, or its files are missing, damaged or unsupported.
    """
    name = str(model)
    if name in EMBEDDED:
        path = embedded_path(name)
    else:
        path = Path(name).expanduser()
        if not path.exists():
            known = ", ".join(EMBEDDED)
            raise CheckpointError(
                f"there is no model {name!r}: give one of {known}, a folder with config.json and safetensors files, "
                "or a .gguf file. Models are not downloaded: fetch them first"
            )
    if path.is_dir():
        return Checkpoint(name, path, Source(path, "safetensors"))
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    folder, mark = convert_once(path, progress)
    return Checkpoint(name, folder, Source(path, "gguf"), mark)


def _read_object(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return data
