"""Which class implements which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.models.base import BuildContext, LoadProgress, Model, ModelFactory
from lowlat.models.config import UnsupportedModelError
from lowlat.models.llama import Llama

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

MODELS: dict[str, ModelFactory] = {"LlamaForCausalLM": Llama}


def build_model(checkpoint: Checkpoint, build: BuildContext, progress: LoadProgress) -> Model:
    """Build the model that a checkpoint's `architectures` names. Raises `UnsupportedModelError`."""
    names = checkpoint.config.get("architectures") or []
    for name in names:
        if name in MODELS:
            try:
                return MODELS[name](checkpoint, build, progress)
            except ValueError as error:
                raise UnsupportedModelError(f"{checkpoint.name}: {error}") from error
    raise UnsupportedModelError(
        f"{checkpoint.name}: architecture {', '.join(names) or '(none given)'} is not supported; "
        f"known: {', '.join(sorted(MODELS))}"
    )
