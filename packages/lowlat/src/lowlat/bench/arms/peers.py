"""`vllm` and `sglang`: other engines in this process, where they are installed.

An engine has no call for one step, so a step is the difference of two generations that differ in length only, over the
difference in tokens. This includes the engine's host time, as its users see it. Needs a GPU.
"""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from typing import Any

from lowlat.bench.arms.base import ArmUnavailableError, StepCase

_SHORT, _LONG = 16, 144
MEMORY_FRACTION = 0.4
"""Of the GPU: arms live side by side, since they are measured in alternation."""


def _config_folder(case: StepCase) -> tempfile.TemporaryDirectory[str]:
    """A folder with nothing but config.json: the engines fill in dummy weights."""
    folder = tempfile.TemporaryDirectory(prefix="lowlat-bench-")
    (pathlib.Path(folder.name) / "config.json").write_text(json.dumps(case.dense.config()))
    return folder


def _prompts(case: StepCase, salt: int) -> list[list[int]]:
    """Prompts that share no prefix with those of another salt, so that no cache shortens a prefill."""
    size = case.dense.vocab - 3
    return [
        [(salt * 7919 + request * 104729 + i * 31) % size + 3 for i in range(case.context)]
        for request in range(case.requests)
    ]


class _PeerArm:
    """What both engines share: two lengths, one difference."""

    note = ""
    weight_bytes: int | None = None

    def __init__(self, case: StepCase) -> None:
        if case.device != "cuda":
            raise ArmUnavailableError("this engine is measured on a GPU only")
        self._case = case
        self._salt = 0
        self._generate(_SHORT)

    def _run(self, prompts: list[list[int]], tokens: int) -> None:
        raise NotImplementedError

    def _generate(self, tokens: int) -> float:
        self._salt += 1
        prompts = _prompts(self._case, self._salt)
        start = time.perf_counter()
        self._run(prompts, tokens)
        return time.perf_counter() - start

    def measure(self) -> list[float]:
        """Microseconds of a step: one sample from one long and one short generation."""
        short, long = self._generate(_SHORT), self._generate(_LONG)
        return [(long - short) / (_LONG - _SHORT) * 1e6]


class VllmArm(_PeerArm):
    """vLLM's offline engine with its defaults: compiled, full graphs, prefix cache."""

    def __init__(self, case: StepCase) -> None:
        import vllm

        self._folder = None if case.model else _config_folder(case)
        self._vllm: Any = vllm
        self._engine: Any = vllm.LLM(
            model=case.model or (self._folder.name if self._folder else ""),
            load_format="auto" if case.model else "dummy",
            dtype=case.dtype,
            skip_tokenizer_init=True,
            max_model_len=case.context + _LONG + 16,
            max_num_seqs=max(8, case.requests),
            gpu_memory_utilization=MEMORY_FRACTION,
            seed=case.seed,
        )
        self.note = f"vLLM {vllm.__version__} in this process, generations of {_SHORT} and {_LONG} tokens"
        super().__init__(case)

    def _run(self, prompts: list[list[int]], tokens: int) -> None:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)

    def close(self) -> None:
        """Free the engine and the folder."""
        del self._engine
        if self._folder is not None:
            self._folder.cleanup()


class SglangArm(_PeerArm):
    """SGLang's offline engine with its defaults."""

    def __init__(self, case: StepCase) -> None:
        import sglang

        self._folder = None if case.model else _config_folder(case)
        self._engine: Any = sglang.Engine(
            model_path=case.model or (self._folder.name if self._folder else ""),
            load_format="auto" if case.model else "dummy",
            dtype=case.dtype,
            skip_tokenizer_init=True,
            context_length=case.context + _LONG + 16,
            mem_fraction_static=MEMORY_FRACTION,
            random_seed=case.seed,
        )
        self.note = f"SGLang {sglang.__version__}, generations of {_SHORT} and {_LONG} tokens"
        super().__init__(case)

    def _run(self, prompts: list[list[int]], tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        self._engine.generate(input_ids=prompts, sampling_params=sampling)

    def close(self) -> None:
        """End the engine's processes and remove the folder."""
        self._engine.shutdown()
        if self._folder is not None:
            self._folder.cleanup()
