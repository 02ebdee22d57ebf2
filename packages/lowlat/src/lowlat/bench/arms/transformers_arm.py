"""`transformers`: the step that Hugging Face transformers computes with a dynamic cache and SDPA attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from lowlat.bench.arms.base import ArmUnavailableError, StepCase
from lowlat.bench.arms.torch_step import time_cpu, time_cuda


class TransformersArm:
    """One row for each request with `context` tokens in the cache; the cache is cropped back after every step."""

    weight_bytes: int | None = None
    note = "dynamic cache, SDPA, eager"

    def __init__(self, case: StepCase) -> None:
        if case.dense and case.model is not None:
            raise ArmUnavailableError("the transformers arm runs random weights: leave out --model-folder")
        from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

        fields = case.dense.config()
        del fields["torch_dtype"]
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(case.seed)
        with torch.device(case.device):
            make: Any = AutoModelForCausalLM.from_config
            self._model = make(config, attn_implementation="sdpa", dtype=getattr(torch, case.dtype)).eval()
        accepted = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        shape = case.dense
        self._cache: Any = DynamicCache()
        for layer in range(shape.layers):
            size = (case.requests, shape.kv_heads, case.context, shape.head_dim)
            keys = torch.randn(size, device=case.device, dtype=self._model.dtype) * 0.02
            self._cache.update(keys, keys.clone(), layer)
        self._case = case
        self._tokens = torch.full((case.requests, 1), 3, device=case.device)
        with torch.inference_mode():
            for _ in range(2):
                self._decode()

    def _decode(self) -> torch.Tensor:
        out = self._model(input_ids=self._tokens, use_cache=True, **{self._cache_argument: self._cache})
        token: torch.Tensor = out.logits[:, -1].argmax(-1)
        self._cache.crop(-1)
        return token

    def measure(self) -> list[float]:
        """Microseconds of each step."""
        timed = time_cuda if self._case.device == "cuda" else time_cpu
        with torch.inference_mode():
            return timed(self._decode, self._case.steps)

    def close(self) -> None:
        """Drop the model."""
        del self._model, self._cache
