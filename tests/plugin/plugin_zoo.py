"""Kernels for tests: one that works, written with the reference engine's own forward, and many that do not."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lowlat_plugin import (
    Binding,
    Bound,
    BuildContext,
    Candidate,
    DeviceLimits,
    Kernel,
    KernelSpec,
    LowLatency,
    Metric,
    Mode,
    Numerics,
    Plan,
    Policy,
    Registry,
    Requirements,
    StepInputs,
    decode_shapes,
    verify_shapes,
)
from lowlat_plugin.conformance import Case, ReferenceHost

WIDTHS = frozenset({1, 2, 3, 4})


def zoo_spec(kernel: str = "TorchKernel", **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": kernel.lower(),
        "vendor": "cpu",
        "architectures": frozenset({"LlamaForCausalLM", "Qwen3ForCausalLM"}),
        "devices": {"x86-64": DeviceLimits(WIDTHS)},
        "numerics": Numerics(
            {"logits": Bound(Metric.MAX_ABS, 1e-4), "kv": Bound(Metric.RELATIVE, 1e-5)}, tie_margin=1e-4
        ),
        "implementation": f"plugin_zoo:{kernel}",
        "modes": frozenset({Mode.DECODE, Mode.VERIFY}),
        "requires": Requirements(dtypes=frozenset({"float32"})),
        "accepts": {"speculative.verify": 1},
        "example": "plugin_zoo:zoo_case",
    }
    return KernelSpec(**(fields | changes))


def candidate(kernel: str = "TorchKernel", **changes: Any) -> Candidate:
    return Candidate("zoo", "1.0", zoo_spec(kernel, **changes))


def zoo_case(seed: int = 0, **changes: Any) -> Case:
    """A Llama of two layers with random weights."""
    fields: dict[str, Any] = {"page_size": 4, "tokens_per_request": 2}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return Case(zoo_spec(), config, llama_weights(config, seed), "x86-64", **(fields | changes))


def narrow_case(seed: int = 0) -> Case:
    """The same in bfloat16."""
    case = zoo_case(seed, dtype="bfloat16")
    case.weights = {name: tensor.to(torch.bfloat16) for name, tensor in case.weights.items()}
    return case


def llama_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return {name: torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def installed(
    kernel: str = "TorchKernel", host: ReferenceHost | None = None, policy: Policy = Policy.AUTO, **changes: Any
) -> LowLatency:
    """Choose, build, bind and prove one kernel of the zoo."""
    registry = Registry()
    registry.register(zoo_spec(kernel, **changes), "zoo")
    low = LowLatency(host or ReferenceHost(zoo_case()), registry, policy)
    low.choose()
    low.build()
    low.bind()
    low.prove()
    return low


class TorchKernel(Kernel):
    """Works. Everything below breaks one thing of it."""

    def probe(self, context: BuildContext) -> Plan:
        each = context.tokens_per_request
        return Plan(decode_shapes(context.limits_widths) | verify_shapes(context.limits_widths - {1}, each))

    def build(self, context: BuildContext) -> None:
        weights = {name: context.weights.get(name).clone() for name in context.weights.names()}
        case = Case(self.spec, dict(context.config), weights, "x86-64", page_size=context.layout.page_size)
        self.engine = ReferenceHost(case, pages=1)

    def bind(self, binding: Binding) -> None:
        self.engine.layers = binding.layers

    def forward(self, step: StepInputs) -> torch.Tensor:
        return self.engine.general(step).logits_RV


class RefreshingKernel(TorchKernel):
    def refresh(self, context: BuildContext) -> None:
        self.build(context)

    def suspend(self) -> None:
        del self.engine

    def resume(self, context: BuildContext) -> None:
        self.build(context)


class RaisesInConstructor(TorchKernel):
    def __init__(self, spec: KernelSpec) -> None:
        raise OSError("libmissing.so.1: cannot open shared object file")


class RaisesInGuard(TorchKernel):
    def config_reasons(self, facts: Any) -> list[Any]:
        raise KeyError("rope_scaling")


class WordyGuard(TorchKernel):
    def config_reasons(self, facts: Any) -> list[Any]:
        return ["hidden size is odd", "the moon is full"]


class ProbeRaisesOnRank1(TorchKernel):
    def probe(self, context: BuildContext) -> Plan:
        if context.rank == 1:
            raise RuntimeError("rank 1 has no peer access")
        return super().probe(context)


class BuildRaisesOnRank1(TorchKernel):
    def build(self, context: BuildContext) -> None:
        if context.rank == 1:
            raise MemoryError("no memory left on rank 1")
        super().build(context)


class WidthsDiffer(TorchKernel):
    def probe(self, context: BuildContext) -> Plan:
        return Plan(decode_shapes(range(1, 3 + context.rank)))


class ShadowRaisesOnRank1(TorchKernel):
    def build(self, context: BuildContext) -> None:
        super().build(context)
        self.rank = context.rank

    def forward(self, step: StepInputs) -> torch.Tensor:
        if self.rank == 1:
            raise RuntimeError("illegal instruction on rank 1")
        return super().forward(step)


class MissesOnRank1(ShadowRaisesOnRank1):
    def forward(self, step: StepInputs) -> torch.Tensor:
        logits = TorchKernel.forward(self, step)
        return logits + 1 if self.rank == 1 and step.shape.rows == 2 else logits


class OutOfBounds(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        logits = super().forward(step)
        return logits * 1.5 if step.shape.rows == 3 else logits


class NeverRight(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        return super().forward(step) + 1


class Coarse(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        return (super().forward(step) * 4).round() / 4


class ChoosesOthers(TorchKernel):
    """Its logits are right, its greedy tokens are those of the row before."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        logits = super().forward(step)
        self.tokens = logits.argmax(-1).roll(1) + (len(logits) == 1)
        return logits

    def greedy(self) -> torch.Tensor:
        return self.tokens


class FailsOnTheDevice(TorchKernel):
    """Its forward returns, and what it launched fails after that."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        logits = super().forward(step)
        logits[:, 0] = float("nan")
        return logits

    def fault(self) -> Exception | None:
        return RuntimeError("block 3 gave up waiting")


class WrongSlot(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        logits = super().forward(step)
        layer = self.engine.layers[0]
        slot = int(step.write_slots_R[0])
        layer.k_SHD[slot ^ 1] = layer.k_SHD[slot]
        return logits


class ForgetsKV(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        kept = self.engine.layers[1].v_SHD.clone()
        logits = super().forward(step)
        self.engine.layers[1].v_SHD.copy_(kept)
        return logits


class WritesForPadding(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        step.write_slots_R = step.write_slots_R.clamp(min=0)
        return super().forward(step)


class ReadsBeyondLength(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        step.positions_R = step.positions_R + 1
        step.lengths_Q = step.lengths_Q + 1
        return super().forward(step)


class ChangesPlan(TorchKernel):
    asked = 0

    def probe(self, context: BuildContext) -> Plan:
        self.asked += 1
        return Plan(decode_shapes(range(1, 3 if self.asked > 1 else 5)))


class WaitsForEver(TorchKernel):
    over = threading.Event()
    """Set when the test ends: the thread that was given up ends too."""

    def close(self) -> None:
        self.engine = None

    def forward(self, step: StepInputs) -> torch.Tensor:
        self.over.wait()
        raise RuntimeError("nobody waits for this any more")


class TakesMemoryLate(TorchKernel):
    def forward(self, step: StepInputs) -> torch.Tensor:
        self.late = torch.ones(16 << 20)
        return super().forward(step)


class UsesClosedWorkspace(TorchKernel):
    def build(self, context: BuildContext) -> None:
        super().build(context)
        self.workspace = context.workspace

    def forward(self, step: StepInputs) -> torch.Tensor:
        self.workspace.empty((4, 4), torch.float32)
        return super().forward(step)


class IgnoresRebind(TorchKernel):
    bound = False

    def bind(self, binding: Binding) -> None:
        if not self.bound:
            super().bind(binding)
        self.bound = True


class FailsAtStep(TorchKernel):
    """Well until told otherwise."""

    error: Exception | None = None

    def forward(self, step: StepInputs) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().forward(step)


class CoversTooMuch(TorchKernel):
    def probe(self, context: BuildContext) -> Plan:
        return Plan(decode_shapes([1, 999]))


class BrokenRefresh(TorchKernel):
    def refresh(self, context: BuildContext) -> None:
        raise RuntimeError("cannot pack these weights")


class KeepsOldTokens(TorchKernel):
    """Copies what it should read from the step's buffers."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self.seen: dict[int, torch.Tensor] = {}

    def forward(self, step: StepInputs) -> torch.Tensor:
        step.token_ids_R = self.seen.setdefault(step.token_ids_R.data_ptr(), step.token_ids_R.clone())
        return super().forward(step)


class ForgetsWeights(TorchKernel):
    """Computes with the weights of seed 0, whatever it was given."""

    def build(self, context: BuildContext) -> None:
        super().build(context)
        self.engine.case.weights = zoo_case(0).weights
