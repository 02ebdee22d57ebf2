"""What this library declares. Importing this needs neither torch nor CUDA."""

from __future__ import annotations

from lowlat_plugin import Bound, Condition, DeviceLimits, KernelSpec, Metric, Mode, Numerics, Requirements

# Bounds of the deepest model that was measured, 36 layers; `DenseKernel.numerics` narrows them for others.
DENSE = KernelSpec(
    name="dense-hopper",
    description="Llama, Qwen2 and Qwen3 decode and verify steps in one persistent launch, bfloat16, 1 to 8 rows",
    vendor="nvidia",
    architectures=frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}),
    devices={"sm_90": DeviceLimits(widths=frozenset(range(1, 9)), resident_blocks=128, shared_memory=227 * 1024)},
    needs=frozenset({"kv.paged"}),
    modes=frozenset({Mode.DECODE, Mode.VERIFY}),
    requires=Requirements(
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset({"bfloat16"}),
        weight_formats=frozenset({"plain"}),
        page_sizes=frozenset(2**i for i in range(9)),
        config={
            "hidden_act": Condition(one_of=("silu",), present=False),
            "hidden_size": Condition(multiple_of=1024, at_most=4096),
            "intermediate_size": Condition(multiple_of=1024),
            "head_dim": Condition(one_of=(64, 128), present=False),
            "attention_bias": Condition(one_of=(False,), present=False),
            "mlp_bias": Condition(one_of=(False,), present=False),
            "use_sliding_window": Condition(one_of=(False,), present=False),
        },
    ),
    accepts={"deterministic": 1, "grammar": 1, "speculative.ragged": 1, "speculative.verify": 1},
    numerics=Numerics(
        bounds={"logits": Bound(Metric.RELATIVE, 7.6e-2), "kv": Bound(Metric.RELATIVE, 0.108)}, tie_margin=0.1
    ),
    implementation="lowlat_nvidia.dense.kernel:DenseKernel",
    example="lowlat_nvidia.dense.example:small_qwen3",
)

SPECS = (DENSE,)
