"""What this library declares. Importing this needs neither torch nor the compiled code."""

from __future__ import annotations

from lowlat_plugin import Bound, Condition, DeviceLimits, KernelSpec, Metric, Mode, Numerics, Requirements, VersionRange

LLAMA = KernelSpec(
    name="llama-gguf",
    description="Llama decode and verify steps straight from GGUF's Q4_1 and Q8_0 blocks, float32 activations",
    vendor="cpu",
    architectures=frozenset({"LlamaForCausalLM"}),
    devices={"*": DeviceLimits(widths=frozenset(range(1, 9)))},
    contract=VersionRange(1, 1),
    needs=frozenset({"kv.paged"}),
    modes=frozenset({Mode.DECODE, Mode.VERIFY}),
    requires=Requirements(
        dtypes=frozenset({"float32"}),
        kv_dtypes=frozenset({"float32"}),
        weight_formats=frozenset({"gguf.q4_1", "gguf.q8_0", "gguf.f32"}),
        config={
            "hidden_act": Condition(one_of=("silu",), present=False),
            "hidden_size": Condition(multiple_of=32),
            "intermediate_size": Condition(multiple_of=32),
            "num_attention_heads": Condition(at_most=256),
            "head_dim": Condition(one_of=(16, 32, 48, 64, 80, 96, 128, 256), present=False),
            "rope_scaling": Condition(one_of=(None,)),
            "attention_bias": Condition(one_of=(False,), present=False),
            "mlp_bias": Condition(one_of=(False,), present=False),
        },
    ),
    accepts={
        "deterministic": 1,
        "disaggregation": 1,
        "grammar": 1,
        "hidden-states.taps": 1,
        "kv-offload": 1,
        "speculative.ragged": 1,
        "speculative.verify": 1,
        "weight-update": 1,
    },
    # The order of float32 additions differs from the general path, and with VNNI activations have 22 bits; measured
    # distances are a tenth of these.
    numerics=Numerics(
        bounds={
            "logits": Bound(Metric.MAX_ABS, 2e-3),
            "kv": Bound(Metric.RELATIVE, 2e-4),
            "features": Bound(Metric.RELATIVE, 2e-4),
        },
        tie_margin=2e-3,
    ),
    implementation="lowlat_cpu.kernel:LlamaKernel",
    example="lowlat_cpu.example:small_llama",
)

SPECS = (LLAMA,)
