"""Which class implements which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowlat.models.base import BuildContext, LoadProgress, Model, ModelFactory
from lowlat.models.config import UnsupportedModelError
from lowlat.models.deepseek_v4.serving import ServedDeepseek
from lowlat.models.gemma3 import gemma3
from lowlat.models.gpt_oss import gpt_oss
from lowlat.models.llama import llama
from lowlat.models.mixtral import mixtral
from lowlat.models.qwen2 import qwen2
from lowlat.models.qwen3 import qwen3
from lowlat.models.qwen3_moe import qwen3_moe

if TYPE_CHECKING:
    from lowlat.models.loading.checkpoint import Checkpoint

MODELS: dict[str, ModelFactory] = {
    "DeepseekV41ForCausalLM": ServedDeepseek,
    "DeepseekV4ForCausalLM": ServedDeepseek,
    "Gemma3ForCausalLM": gemma3,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "MixtralForCausalLM": mixtral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


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
