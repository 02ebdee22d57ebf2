"""Steps, bytes and ceilings: counts against figures worked out elsewhere and against real tensors."""

import json
import pathlib
import re
import subprocess
import sys
import time
import types

import msgspec
import pytest
import torch

from lowlat.bench import busy, random_v41
from lowlat.bench.arms import peers
from lowlat.bench.arms.base import ArmUnavailableError, StepCase, build_arm
from lowlat.bench.arms.general import GeneralArm
from lowlat.bench.arms.torch_step import TorchStep
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.presets import PRESETS
from lowlat.bench.results import Row, load, problems
from lowlat.bench.roofline import dense_step_bytes, v41_step_bytes
from lowlat.bench.step import StepOptions, run_step, step_bytes
from lowlat.engine import build
from lowlat.engine.device_results import PendingStep
from lowlat.engine.device_runner import DeviceRunner
from lowlat.platform.cpu import CpuPlatform

TINY = PRESETS["tiny"]


pytestmark = pytest.mark.usefixtures("one_thread")


# --- arms


def test_read_ceiling_is_a_bandwidth_of_this_machine():
    got = measure_ceiling("cpu", gigabytes=0.05, repeats=3)
    assert 0.0005 < got.tb_s < 5
    assert got.bytes == 50_000_000


def reference_tokens(step, case):
    """The step's own weights through plain transformers-style attention over the visible cache, in float64."""
    shape = case.shape
    x = step.embedding[step.tokens].double()

    def norm(values, weight):
        return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + shape.eps) * weight.double()

    def rotate(values):
        half = shape.head_dim // 2
        turned = torch.cat((-values[..., half:], values[..., :half]), -1)
        return values * step.cos_D.double() + turned * step.sin_D.double()

    for layer in step.layers:
        h = norm(x, layer["attention_norm"]) @ layer["qkv"].double().T
        q, k, v = h.split([shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2, -1)
        q = q.view(-1, shape.heads, shape.head_dim)
        k, v = (t.view(-1, shape.kv_heads, shape.head_dim) for t in (k, v))
        if shape.qk_norm:
            q, k = norm(q, layer["query_norm"]), norm(k, layer["key_norm"])
        q, k = rotate(q), rotate(k)
        keys = torch.cat((layer["keys"][:, :, : case.context].double(), k.unsqueeze(2)), 2)
        values = torch.cat((layer["values"][:, :, : case.context].double(), v.unsqueeze(2)), 2)
        group = shape.heads // shape.kv_heads
        scores = torch.einsum("bnd,bncd->bnc", q, keys.repeat_interleave(group, 1)) / shape.head_dim**0.5
        mixed = torch.einsum("bnc,bncd->bnd", scores.softmax(-1), values.repeat_interleave(group, 1))
        x = x + mixed.reshape(len(x), -1) @ layer["out"].double().T
        gate, up = (norm(x, layer["mlp_norm"]) @ layer["gate_up"].double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer["down"].double().T
    return (norm(x, step.norm) @ step.head.double().T).argmax(-1)


@pytest.mark.parametrize("name", ["tiny", "qwen"])
def test_the_plain_step_computes_a_decoder(name):
    shape = TINY if name == "tiny" else msgspec.structs.replace(TINY, qk_norm=True, tied=True, kv_heads=1)
    case = StepCase(shape=shape, requests=3, context=21, dtype="float32", seed=5)
    step = TorchStep(case)
    step.tokens.copy_(torch.tensor([3, 7, 200]))
    for layer in step.layers:  # what lies beyond the context must not matter
        layer["keys"][:, :, case.context + 1 :] = 1e4
        layer["values"][:, :, case.context + 1 :] = 1e4
    expected = reference_tokens(step, case)
    assert torch.equal(step(), expected)
    assert torch.equal(step(), expected), "a step leaves its context as it was"


def test_arms_alternate_and_those_that_cannot_run_are_named():
    said = []
    options = StepOptions(
        model="tiny", arms=("general", "torch-eager-graph", "transformers", "vllm", "read-floor"), rows=(1, 3),
        contexts=(40,), rounds=2, steps=2, ceiling_gb=0.02,
    )  # fmt: skip
    outcome = run_step(options, said.append, command="lowlat bench step --model tiny")
    result = outcome.result
    order = [text.rpartition(": ")[2] for text in said if text.startswith("round 1 of")]
    assert order[:6] == ["general", "torch-eager-graph", "transformers", "transformers", "torch-eager-graph", "general"]
    assert "not installed" in outcome.unavailable["vllm"]
    found = {(row.arm, row.rows): row for row in result.rows}
    arms = ("general", "torch-eager-graph", "transformers", "read-floor")
    assert set(found) == {(arm, rows) for arm in arms for rows in (1, 3)}
    for row in result.rows:
        assert row.bytes == dense_step_bytes(TINY, requests=row.rows, context=40, dtype="float32").total
        assert row.samples == (1 if row.arm == "read-floor" else 8)
        assert 0 < row.ceiling_fraction <= 1.0
        assert (row.arm == "read-floor") != (0 < row.details.get("cpu_share", 0) <= 1.1)
    assert problems(result) == []
    assert result.simulated.weights


def test_a_busy_machine_is_said():
    clock = busy.CpuShare()
    assert clock(lambda: [time.sleep(0.05) or 1.0]) == [1.0]
    share = clock.of(1)
    assert share < 0.5
    row = Row(workload="w", arm="general", metric="step_us", median=1, low=1, high=1, samples=1, note="n")
    said = []
    busy.mark_busy(row, share, said.append)
    assert "busy" in row.note
    assert "busy" in said[0]
    quiet = Row(workload="w", arm="general", metric="step_us", median=1, low=1, high=1, samples=1, note="n")
    busy.mark_busy(quiet, 0.99, said.append)
    assert quiet.note == "n"
    assert len(said) == 1


def test_the_general_arm_decodes_at_the_context_asked_for():
    arm = build_arm("general", StepCase(shape=TINY, requests=2, context=33, dtype="float32", steps=3))
    for _ in range(2):
        arm.rewind()
        assert arm.runner._lengths == [33, 33]
        assert len(arm.measure()) == 3
        assert arm.runner._lengths == [36, 36]
    arm.close()


class KeepingPlatform(CpuPlatform):
    keeps_state = True


def test_the_general_arm_runs_ahead_where_state_lives_on_the_device(monkeypatch):
    monkeypatch.setattr(build, "select", lambda *_: KeepingPlatform())
    arm = build_arm("general", StepCase(shape=TINY, requests=2, context=46, dtype="float32", steps=3))
    runner = arm.runner
    assert isinstance(runner, DeviceRunner)
    assert "run ahead" in arm.note
    in_flight = []
    monkeypatch.setattr(
        PendingStep, "wait", lambda step, wait=PendingStep.wait: (in_flight.append(unread(runner)), wait(step))[1]
    )
    for _ in range(2):
        in_flight.clear()
        samples = arm.measure()
        assert len(samples) == 3
        assert min(samples) > 0
        # the rewind is waited for alone; every step that counts had two launched behind it; the last two are drained
        assert in_flight == [1, 3, 3, 3, 3, 2, 1]
        assert runner._slots.lengths == [46 + 3 + 1 + 2] * 2
    arm.close()


def unread(runner):
    return sum(not flight.pending.known for flight in runner._in_flight)


@pytest.mark.parametrize("arm", ["plugin:lowlat-nothing", "plugin:nothing"])
def test_a_kernel_library_that_does_not_take_over_is_named(arm):
    outcome = run_step(
        StepOptions(model="tiny", arms=(arm, "read-floor"), contexts=(8,), rounds=1, steps=1, ceiling_gb=0.01)
    )
    assert "nothing" in outcome.unavailable[arm]
    assert [row.arm for row in outcome.result.rows] == ["read-floor"]


def test_deepseek_has_a_floor():
    options = StepOptions(model="deepseek-v41", arms=("general", "read-floor"), rows=(6,), contexts=(131072,), tp=4)
    with pytest.raises(ValueError, match="tp"):
        run_step(options)
    options = StepOptions(model="deepseek-v41", arms=("read-floor",), rows=(6,), contexts=(131072,), ceiling_gb=0.01)
    (row,) = run_step(options).result.rows
    assert row.bytes == v41_step_bytes(rows=6, context=131072, tp=1).total
    assert row.dtype == "fp8+fp4"


def test_the_draft_counts_with_all_layers_alone():
    options = StepOptions(model="deepseek-v41", layers=1)
    assert step_bytes(options, 1, 8) == v41_step_bytes(rows=1, context=8, tp=1, layers=1, draft=False)
    assert step_bytes(StepOptions(model="deepseek-v41"), 1, 8) == v41_step_bytes(rows=1, context=8, tp=1)


def test_deepseek_of_the_published_sizes_is_refused_where_the_disk_is_too_small():
    outcome = run_step(
        StepOptions(model="deepseek-v41", arms=("general", "read-floor"), contexts=(1024,), ceiling_gb=0.01)
    )
    assert re.search(r"501\.4 GB are needed, but .* free; --layers", outcome.unavailable["general"])
    assert [row.arm for row in outcome.result.rows] == ["read-floor"]
    with pytest.raises(ValueError, match="40 layers, not 41"):
        run_step(StepOptions(model="deepseek-v41", layers=41))


def test_the_first_layers_of_a_tiny_deepseek_are_a_step_of_the_general_arm(monkeypatch):
    folders, lengths = [], []
    made = random_v41.make_v41

    def watched(*arguments):
        folders.append(made(*arguments))
        return folders[-1]

    monkeypatch.setattr(random_v41, "make_v41", watched)
    original = GeneralArm.measure

    def measure(arm):
        samples = original(arm)
        lengths.append(list(arm.runner._lengths))
        return samples

    monkeypatch.setattr(GeneralArm, "measure", measure)
    options = StepOptions(
        model="deepseek-v41-tiny", layers=3, arms=("general", "torch-eager-graph"), rows=(2,), contexts=(20,), rounds=1,
        steps=2, warmup=0, ceiling_gb=0.01,
    )  # fmt: skip
    outcome = run_step(options)
    (row,) = outcome.result.rows
    assert (row.workload, row.arm, row.samples, row.bytes) == ("deepseek-v41-tiny-3l", "general", 4, None)
    assert outcome.result.simulated.weights
    assert "only lowlat's own runner" in outcome.unavailable["torch-eager-graph"]
    assert lengths == [[22, 22], [22, 22]], "the context is computed again before each series of steps"
    assert not pathlib.Path(folders[0].name).exists()
    with pytest.raises(RuntimeError, match="read-floor: nothing counts the bytes of deepseek-v41-tiny-3l"):
        run_step(msgspec.structs.replace(options, arms=("read-floor",)))


def test_step_runs_with_torch_and_msgspec_alone(tmp_path):
    absent = [
        "typer",
        "rich",
        "click",
        "httpx",
        "numpy",
        "tokenizers",
        "safetensors",
        "transformers",
        "fastapi",
        "zmq",
        "matplotlib",
        "jinja2",
    ]
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from lowlat.bench import step\n"
        "arguments = '--model tiny --context 8 --rounds 1 --ceiling-gb 0.01 --results'.split()\n"
        f"step.main([*arguments, {str(tmp_path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    assert str(path) in done.stdout
    assert {row.arm for row in load(path).rows} == {"torch-eager-graph", "read-floor"}
    assert "general is left out" in done.stderr


# --- other engines, played by stand-ins


class StandIn:
    """An engine whose generations take a fixed time to start and a fixed time for each token, on a clock of its own."""

    START_S, TOKEN_S = 0.03, 0.0005
    clock = 0.0
    __version__ = "0"

    def __init__(self, **settings):
        self.settings = settings
        folder = pathlib.Path(settings.get("model") or settings["model_path"])
        self.config = json.loads((folder / "config.json").read_text())
        self.prompts = []
        self.closed = False

    def work(self, prompts, tokens):
        self.prompts += prompts
        StandIn.clock += self.START_S + self.TOKEN_S * tokens

    # vLLM's names
    def generate(self, prompts=None, sampling=None, use_tqdm=None, *, input_ids=None, sampling_params=None):
        if input_ids is not None:
            assert sampling_params["ignore_eos"]
            return self.work(input_ids, sampling_params["max_new_tokens"])
        assert sampling["ignore_eos"]
        return self.work([p["prompt_token_ids"] for p in prompts], sampling["max_tokens"])

    # SGLang's
    def shutdown(self):
        self.closed = True


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_step_of_another_engine_is_the_difference_of_two_generations(name, monkeypatch):
    fake = types.SimpleNamespace(LLM=StandIn, Engine=StandIn, SamplingParams=dict, __version__="0", __spec__=object())
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(peers, "time", types.SimpleNamespace(perf_counter=lambda: StandIn.clock))
    arm = build_arm(name, StepCase(shape=TINY, requests=2, context=40, device="cuda"))
    (sample,) = arm.measure()
    assert sample == pytest.approx(500), "neither the start nor the prefill is in it"
    engine = arm._engine
    assert engine.config["hidden_size"] == TINY.hidden
    assert engine.settings["load_format"] == "dummy"
    assert {len(prompt) for prompt in engine.prompts} == {40}
    assert len({tuple(prompt) for prompt in engine.prompts}) == len(engine.prompts), "no prompt is found in a cache"
    folder = pathlib.Path(arm._folder.name)
    arm.close()
    assert not folder.exists()
    assert engine.closed == (name == "sglang")
    with pytest.raises(ArmUnavailableError, match="GPU"):
        build_arm(name, StepCase(shape=TINY, device="cpu"))
