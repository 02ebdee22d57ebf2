"""The dense step behind the contract: checks the model, packs its weights, translates steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.pack import DenseWeights, LayerWeights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.stamps import read_parts, stamped
from lowlat_nvidia.dense.step import DenseStep, StepTensors
from lowlat_plugin import (
    Binding,
    Bound,
    BuildContext,
    Code,
    Kernel,
    KernelSpec,
    KVLayout,
    Mode,
    Numerics,
    Part,
    Plan,
    Reason,
    Shape,
    StepInputs,
    decode_shapes,
)

SCRATCH_LIMIT = 64 << 20


class DenseKernel(Kernel):
    """Decode and verify steps of Llama, Qwen2 and Qwen3 in one persistent launch."""

    table_rows = True

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self._step: DenseStep | None = None
        self._stamped: DenseStep | None = None

    def model_reasons(self, context: BuildContext) -> Iterable[Reason]:
        try:
            plans.DensePlan(plans.shape_from_config(context.config)).definitions()
            frequencies(context.config, 64)
        except (plans.UnsupportedShapeError, KeyError) as error:
            return [Reason(Code.LIBRARY, "configuration", str(error), "a shape that the dense step computes")]
        layout = context.layout
        if layout.slot_stride % 8 or layout.head_stride % 8:
            strides = f"strides {layout.slot_stride} and {layout.head_stride}"
            return [Reason(Code.KV_LAYOUT, "layout", strides, "multiples of 8 elements")]
        if scratch_elements(layout) * 2 > SCRATCH_LIMIT:
            found = f"heads {layout.head_stride} elements apart"
            return [Reason(Code.KV_LAYOUT, "layout", found, "the heads of a slot near one another")]
        return []

    def probe(self, context: BuildContext) -> Plan:
        shapes = decode_shapes(context.limits_widths)
        if context.tokens_per_request > 1:
            shapes |= {Shape(Mode.VERIFY, count, rows) for rows in context.limits_widths for count in range(1, rows)}
        plan = plans.DensePlan(plans.shape_from_config(context.config))
        return Plan(
            shapes, workspace_bytes=plan.memory_bytes(_positions(context)) + 2 * scratch_elements(context.layout)
        )

    def build(self, context: BuildContext) -> None:
        shape = plans.shape_from_config(context.config)
        frequency = frequencies(context.config, shape.head_dim)
        rotary = context.workspace.empty((_positions(context), 2, shape.head_dim // 2), torch.float32)
        rotary.copy_(rotary_table(frequency, len(rotary), context.device))
        weights = read_weights(shape, context)
        self._step = DenseStep(
            plans.DensePlan(shape),
            weights,
            rotary,
            context.device,
            context.workspace.empty,
            scratch_elements(context.layout),
        )

    def bind(self, binding: Binding) -> None:
        assert self._step is not None, "bind follows build"
        self._step.bind([(layer.k_SHD, layer.v_SHD) for layer in binding.layers], binding.layout.page_size)
        self._stamped = None  # it knows the old pools

    def numerics(self) -> Numerics:
        """Bounds of the distance from the general path: `shadow_limits` of the model."""
        assert self._step is not None, "numerics follow build"
        limits, bounds = shadow_limits(self._step.plan.shape), self.spec.numerics.bounds
        return Numerics(
            bounds={name: Bound(bound.metric, min(bound.limit, limits[name])) for name, bound in bounds.items()},
            tie_margin=self.spec.numerics.tie_margin,
        )

    def forward(self, step: StepInputs) -> Tensor:
        assert self._step is not None, "forward follows build"
        inputs = _tensors(step)
        if step.logits_RV is not None and not step.logits_RV.is_contiguous():
            inputs.logits_RV = None
            return step.logits_RV.copy_(self._step.run(inputs))
        return self._step.run(inputs)

    def greedy(self) -> Tensor:
        assert self._step is not None, "greedy follows forward"
        return self._step.next_token_R

    def fault(self) -> Exception | None:
        return None if self._step is None else self._step.error()

    def parts(self, step: StepInputs) -> Sequence[Part]:
        assert self._step is not None, "parts follows build"
        if self._stamped is None:
            self._stamped = stamped(self._step)
        self._stamped.run(dataclasses.replace(_tensors(step), logits_RV=None))
        torch.cuda.synchronize()
        return read_parts(self._stamped.stamps)

    def close(self) -> None:
        for built in (self._stamped, self._step):
            if built is not None:
                built.close()
        self._stamped = self._step = None


def _tensors(step: StepInputs) -> StepTensors:
    return StepTensors(
        step.token_ids_R,
        step.positions_R,
        step.query_start_Q1,
        step.page_table_QP,
        step.write_slots_R,
        step.table_rows_Q,
        step.logits_RV,
    )


def shadow_limits(shape: plans.DenseShape) -> dict[str, float]:
    """How far logits, and keys and values, may be from the general path's, as the start's check measures them.

    The two are rounded apart, so that a limit is about the sum of what each of them was measured to be off from
    float32, most of which is the general path's own (docs/kernels/dense.md). With random weights that grows with the
    layers, but hardly where they are narrow and add little to what they are given.
    """
    layers = shape.layers
    if shape.hidden <= 1024:
        return {"logits": 1.4e-2 + 1e-4 * layers, "kv": 2.2e-2 + 6e-4 * layers}
    return {"logits": 1.6e-2 + 1.65e-3 * layers, "kv": 2e-2 + 2.4e-3 * layers}


def scratch_elements(layout: KVLayout) -> int:
    """From the first to the last element of one slot."""
    return (layout.kv_heads - 1) * layout.head_stride + layout.head_dim


def _positions(context: BuildContext) -> int:
    return int(context.config["max_position_embeddings"])


def read_weights(shape: plans.DenseShape, context: BuildContext) -> DenseWeights:
    """The loaded model's tensors, by the names of Hugging Face files, bfloat16 on the step's device."""

    def get(name: str, part: str = ".weight") -> Tensor:
        return context.weights.get(name + part).detach().to(context.device, torch.bfloat16)

    def bias(name: str) -> Tensor | None:
        return get(name, ".bias") if shape.qkv_bias else None

    layers = []
    for index in range(shape.layers):
        block = f"model.layers.{index}."
        attention, mlp = block + "self_attn.", block + "mlp."
        layers.append(
            LayerWeights(
                q=get(attention + "q_proj"),
                k=get(attention + "k_proj"),
                v=get(attention + "v_proj"),
                o=get(attention + "o_proj"),
                gate=get(mlp + "gate_proj"),
                up=get(mlp + "up_proj"),
                down=get(mlp + "down_proj"),
                norm1=get(block + "input_layernorm"),
                norm2=get(block + "post_attention_layernorm"),
                q_norm=get(attention + "q_norm") if shape.qk_norm else None,
                k_norm=get(attention + "k_norm") if shape.qk_norm else None,
                q_bias=bias(attention + "q_proj"),
                k_bias=bias(attention + "k_proj"),
                v_bias=bias(attention + "v_proj"),
            )
        )
    embedding = get("model.embed_tokens")
    head = embedding if context.config.get("tie_word_embeddings") else get("lm_head")
    return DenseWeights(embedding, head, get("model.norm"), layers)
