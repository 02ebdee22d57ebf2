"""Kernel libraries in the runner whose state lives on the device: in its bodies, run ahead, with steps that fail late.

The device is a CPU, the bodies run eagerly; tests/gpu has the same with graphs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import torch
import transformers
from plugin_zoo import TorchKernel, zoo_spec

import lowlat_plugin
from lowlat.engine import build
from lowlat.engine.config import EngineConfig
from lowlat.offline import Engine, SamplingParams
from lowlat.platform.cpu import CpuPlatform
from lowlat_plugin import BuildContext, DeviceLimits, Mode, Plan, Registry, Shape, StepInputs, decode_shapes

WIDTHS = frozenset({1, 2, 3})
MODES = {
    "greedy": SamplingParams(max_tokens=9, temperature=0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_k=20, top_p=0.95, ignore_eos=True),
    "ruled": SamplingParams(
        max_tokens=9, temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True
    ),
    "log-probabilities": SamplingParams(max_tokens=9, temperature=0, logprobs=2, ignore_eos=True),
}


class KeepingPlatform(CpuPlatform):
    keeps_state = True


class DeviceKernel(TorchKernel):
    """Takes tables by row, chooses greedy tokens, and from a given step on leaves what a failed step leaves."""

    table_rows = True
    fails_at = -1
    fails_verified = -1
    steps = 0
    by_row = 0
    asked = 0
    verified = 0

    def probe(self, context: BuildContext) -> Plan:
        verify = {Shape(Mode.VERIFY, count, rows) for rows in context.limits_widths for count in range(1, rows)}
        return Plan(decode_shapes(context.limits_widths) | (verify if context.tokens_per_request > 1 else set()))

    def forward(self, step: StepInputs) -> torch.Tensor:
        type(self).verified += step.mode is Mode.VERIFY
        if step.table_rows_Q is not None:
            type(self).by_row += 1
            step.page_table_QP = step.page_table_QP[step.table_rows_Q.long()]
        # Whoever makes tables over all slots leaves entries of others beyond a request's own.
        logits_RV = super().forward(step)
        type(self).steps += 1
        self.failed = 0 <= self.fails_at <= self.steps or 0 <= self.fails_verified < self.verified
        if self.failed:
            logits_RV[:, 0] = float("nan")
        self._greedy = torch.full_like(step.token_ids_R, -1) if self.failed else logits_RV.argmax(-1)
        return logits_RV

    def greedy(self) -> torch.Tensor:
        return self._greedy

    def fault(self) -> Exception | None:
        type(self).asked += 1
        return RuntimeError("block 7 gave up waiting") if self.failed else None


class ThrowingKernel(DeviceKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        if 0 <= self.fails_at <= self.steps:
            raise RuntimeError("the launch was refused")
        return super().forward(step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rope_theta=10000.0, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[:90]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({token: n for n, token in enumerate(alphabet)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


class Made:
    """An engine on the device's runner with one library, and that runner."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str | None, **settings: Any) -> None:
        registry = Registry()
        if kernel is not None:
            spec = zoo_spec(
                kernel,
                devices={"*": DeviceLimits(WIDTHS)},
                implementation=f"{__name__}:{kernel}",
                accepts={"speculative.verify": 1, "speculative.ragged": 1},
            )
            registry.register(spec, "zoo")
        monkeypatch.setattr(lowlat_plugin, "discover", lambda: registry)
        monkeypatch.setattr(build, "select", lambda *_: KeepingPlatform())
        mode = "require" if kernel else "off"
        config = EngineConfig(
            model=str(path), max_batch=4, max_context=128, kv_tokens=512, page_size=4, threads=1, run_ahead=2,
            low_latency=mode, **settings,
        )  # fmt: skip
        self.engine = Engine(config)
        self.runner: Any = getattr(self.engine._core.executor, "_runner", None)
        assert (self.runner is not None) == KeepingPlatform.keeps_state

    def answer(self, requests: int, modes: list[SamplingParams]) -> list[list[int]]:
        prompts = [[(request * 13 + place * 7) % 90 for place in range(5 + 6 * request)] for request in range(requests)]
        found = self.engine.generate(prompts, [modes[request % len(modes)] for request in range(requests)])
        return [one.token_ids for one in found]

    def counts(self) -> dict[tuple[str, str], int]:
        return {(path, reason): count for path, reason, count in self.engine.stats().low_latency_steps}


@pytest.fixture
def make(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Made] = []
    for kernel in (DeviceKernel, ThrowingKernel):
        monkeypatch.setattr(kernel, "fails_at", -1, raising=False)
        monkeypatch.setattr(kernel, "fails_verified", -1, raising=False)
        monkeypatch.setattr(kernel, "steps", 0, raising=False)
        monkeypatch.setattr(kernel, "by_row", 0, raising=False)
        monkeypatch.setattr(kernel, "asked", 0, raising=False)
        monkeypatch.setattr(kernel, "verified", 0, raising=False)

    def one(kernel: str | None, **settings: Any) -> Made:
        made.append(Made(model, monkeypatch, kernel, **settings))
        return made[-1]

    yield one
    for each in made:
        each.engine.close()


@pytest.mark.parametrize("kernel", ["TorchKernel", "DeviceKernel"])
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_the_general_path(make: Any, kernel: str, mode: str) -> None:
    expected = make(None).answer(3, [MODES[mode]])
    kernels = make(kernel)
    assert kernels.answer(3, [MODES[mode]]) == expected
    counts = kernels.counts()
    assert counts["plugin", "covered"] >= 8
    assert counts["general", "prefill"] >= 1
    assert not kernels.runner.fallbacks
    assert kernels.runner.kernels is not None
    assert (DeviceKernel.by_row > 0) == (kernel == "DeviceKernel")


def test_four_requests_are_too_wide_and_three_are_not(make: Any) -> None:
    modes = [SamplingParams(max_tokens=4 + 5 * n, temperature=0, ignore_eos=True) for n in range(4)]
    expected = make(None).answer(4, modes)
    kernels = make("DeviceKernel")
    assert kernels.answer(4, modes) == expected
    counts = kernels.counts()
    assert counts["general", "too-wide"] >= 3
    assert counts["plugin", "covered"] >= 10


@pytest.mark.parametrize("kernel", ["DeviceKernel", "ThrowingKernel"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_step_that_fails_runs_again_on_the_general_path(make: Any, kernel: str, mode: str, after: int) -> None:
    """Two steps are launched beyond the one that fails: all three run again, and no token is lost or repeated."""
    modes = [MODES[mode], MODES["greedy"]]
    expected = make(None).answer(3, modes)
    kernels = make(kernel)
    cls = globals()[kernel]
    cls.fails_at = cls.steps + after + 1
    assert kernels.answer(3, modes) == expected
    counts = kernels.counts()
    assert counts["general", "failed"] >= 3
    low = kernels.engine._core.low_latency
    assert low.state.value == "failed"
    said = "block 7 gave up waiting" if kernel == "DeviceKernel" else "the launch was refused"
    assert any(said in str(reason) for reason in low.report().reasons)
    assert kernels.answer(2, modes) == expected[:2], "the engine goes on"


REPEATING = [[3, 14, 15, 9, 26, 5] * 4, [2, 7, 1, 8, 2, 8] * 3 + [2, 7]]


@pytest.mark.parametrize("mode", ["greedy", "drawn", "ruled"])
@pytest.mark.parametrize("fails", [False, True])
def test_guesses_are_checked_on_the_library(make: Any, mode: str, fails: bool) -> None:
    """Prompts that repeat themselves, so that there are guesses; steps that fail run again with their guesses."""
    sampling = [msgspec.structs.replace(MODES[mode], max_tokens=24)] * 2
    expected = [one.token_ids for one in make(None).engine.generate(REPEATING, sampling)]
    kernels = make("DeviceKernel", spec="ngram", spec_width=3)
    assert kernels.runner.verifier is not None
    DeviceKernel.verified = 0
    if fails:
        DeviceKernel.fails_verified = 2
    # One by one: two requests of three rows are wider than the library goes.
    found = [kernels.engine.generate([prompt], sampling[:1])[0].token_ids for prompt in REPEATING]
    assert found == expected
    counts = kernels.counts()
    assert DeviceKernel.verified > 2
    assert (counts.get(("general", "failed"), 0) > 3) == fails
    assert counts["plugin", "covered"] >= 3
    assert kernels.engine.generate(REPEATING, sampling)[1].token_ids == expected[1]


def test_a_model_whose_logits_are_nan_is_not_the_librarys_fault(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = make("DeviceKernel")
    original = DeviceKernel.forward

    def broken(self: DeviceKernel, step: StepInputs) -> torch.Tensor:
        logits_RV = original(self, step)
        logits_RV[:, 3] = float("nan")
        self._greedy = torch.full_like(step.token_ids_R, -1)
        return logits_RV

    monkeypatch.setattr(DeviceKernel, "forward", broken)
    with pytest.raises(Exception, match="contain NaN"):
        kernels.answer(1, [MODES["greedy"]])
    assert DeviceKernel.asked > 0
    assert kernels.engine._core.low_latency.state.value == "active"


def test_the_hosts_runner_asks_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = make(None).answer(2, [MODES["greedy"]])
    monkeypatch.setattr(KeepingPlatform, "keeps_state", False)
    kernels = make("DeviceKernel")
    assert kernels.runner is None
    DeviceKernel.fails_at = DeviceKernel.steps + 4
    assert kernels.answer(2, [MODES["greedy"]]) == expected
    counts = kernels.counts()
    assert counts["plugin", "covered"] == 3
    assert counts["general", "failed"] >= 5


def test_the_switch(make: Any) -> None:
    expected = make(None).answer(2, [MODES["greedy"]])
    kernels = make("DeviceKernel")
    kernels.engine._core.low_latency.switch(False)
    assert kernels.answer(2, [MODES["greedy"]]) == expected
    counts = kernels.counts()
    assert counts["general", "switched-off"] >= 8
    assert ("plugin", "covered") not in counts
    kernels.engine._core.low_latency.switch(True)
    assert kernels.answer(2, [MODES["greedy"]]) == expected
    assert kernels.counts()["plugin", "covered"] >= 8
