"""The dense step behind the contract. Here the launch is replaced by the float32 reference, on the CPU.

What is tested is everything around it. The launch itself is tested in `test_nvidia_dense_gpu.py`.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
import torch

from lowlat_nvidia.dense import kernel as kernel_module
from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.example import CONFIG, small_qwen3
from lowlat_nvidia.dense.kernel import DenseKernel, read_weights, scratch_elements, shadow_limits
from lowlat_nvidia.dense.reference import reference_step
from lowlat_nvidia.dense.rotary import frequencies
from lowlat_nvidia.dense.rows import rows_of
from lowlat_nvidia.dense.step import StepTensors
from lowlat_nvidia.specs import DENSE
from lowlat_plugin import KVLayout
from lowlat_plugin.conformance import Case, ReferenceHost, run_checks
from lowlat_plugin.registry import Candidate


class StandIn:
    """Computes what the kernel is to compute, from what the kernel would be given."""

    launches = 0
    by_row = 0

    def __init__(self, plan, weights, rotary, device, allocate, scratch_elements) -> None:  # type: ignore[no-untyped-def]
        self.plan, self.weights, self.rotary = plan, weights, rotary
        self.taken = allocate((plan.stream_pages(), scratch_elements), torch.uint8)
        self.next_token_R = allocate((8,), torch.int64)

    def close(self) -> None:
        pass

    def bind(self, pools, page_size: int) -> None:  # type: ignore[no-untyped-def]
        self.pools, self.page_size = pools, page_size

    def error(self) -> Exception | None:
        return None

    def run(self, step: StepTensors) -> torch.Tensor:
        StandIn.launches += 1
        StandIn.by_row += step.table_rows_Q is not None
        logits = reference_step(self.plan.shape, self.weights, self.rotary, self.pools, self.page_size, step)
        self.next_token_R[: len(logits)] = logits.argmax(-1)
        return logits if step.logits_RV is None else step.logits_RV.copy_(logits)


@pytest.mark.parametrize(
    ("hidden", "layers", "output", "general", "kernel", "between"),
    [
        (1024, 3, "logits", 1.13e-2, 5.8e-3, 1.27e-2),
        (1024, 3, "kv", 1.55e-2, 9.0e-3, 1.89e-2),
        (1024, 28, "logits", 1.5e-2, 4.7e-3, 1.6e-2),
        (1024, 28, "kv", 3.1e-2, 1.2e-2, 3.3e-2),
        (2048, 2, "logits", 1.30e-2, 7.6e-3, 1.34e-2),
        (2048, 6, "logits", 1.96e-2, 9.8e-3, 2.25e-2),
        (2048, 6, "kv", 2.57e-2, 1.46e-2, 3.19e-2),
        (2048, 16, "logits", 2.9e-2, 1.5e-2, 3.3e-2),
        (2048, 16, "kv", 4.5e-2, 2.3e-2, 5.4e-2),
        (4096, 2, "logits", 1.51e-2, 7.3e-3, 1.45e-2),
        (4096, 2, "kv", 1.66e-2, 9.3e-3, 2.02e-2),
        (4096, 36, "logits", 5.9e-2, 2.5e-2, 6.1e-2),
        (4096, 36, "kv", 9.0e-2, 4.0e-2, 9.9e-2),
    ],
)
def test_bounds_are_no_wider_than_both_paths_are_off(
    hidden: int, layers: int, output: str, general: float, kernel: float, between: float
) -> None:
    """The figures are measured (docs/kernels/dense.md): distances of both from float32, and from each other."""
    limit = shadow_limits(dataclasses.replace(plans.QWEN3_8B, hidden=hidden, layers=layers))[output]
    assert between < limit <= general + kernel
    assert limit <= DENSE.numerics.bounds[output].limit


class Host(ReferenceHost):
    def memory_bytes(self) -> int | None:
        return None  # the stand-in computes in float32 copies of the weights


def cpu_case(seed: int = 0) -> Case:
    case = small_qwen3(seed, "cpu")
    case.host = Host
    return case


def test_checks_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "DenseStep", StandIn)
    # Few widths keep this short; the float32 stand-in is nearer to the general path than the kernel.
    limits = msgspec.structs.replace(DENSE.devices["sm_90"], widths=frozenset({1, 3, 4}))
    spec = msgspec.structs.replace(DENSE, example=f"{__name__}:cpu_case", devices={"sm_90": limits})
    before = StandIn.launches
    results = run_checks(Candidate("lowlat-nvidia", "0", spec))
    assert not [result for result in results if result.status == "failed"]
    assert sum(result.status == "passed" for result in results) >= 7, results
    assert StandIn.launches > before + 10


def step_of(write_slots: list[int], starts: list[int]) -> StepTensors:
    rows = len(write_slots)
    return StepTensors(
        tokens_R=torch.arange(10, 10 + rows),
        positions_R=torch.arange(50, 50 + rows),
        query_start_Q1=torch.tensor(starts, dtype=torch.int32),
        page_table_TP=torch.arange(1, 2 * len(starts) - 1, dtype=torch.int32).reshape(len(starts) - 1, 2),
        write_slots_R=torch.tensor(write_slots),
    )


def test_rows_find_their_request_and_first_row() -> None:
    step = step_of([5, 6, 7, 8], [0, 1, 4])
    rows = rows_of(step)
    assert [row.first for row in rows] == [0, 1, 1, 1]
    assert [row.cached for row in rows] == [50, 51, 51, 51]
    assert [row.pages_P.tolist() for row in rows] == [[1, 2]] + [[3, 4]] * 3
    step.table_rows_Q = torch.tensor([1, 0], dtype=torch.int32)
    assert [row.pages_P.tolist() for row in rows_of(step)] == [[3, 4]] + [[1, 2]] * 3
    assert rows[3].slots(32).tolist()[30:34] == [126, 127, 128, 129]


def test_padding_rows_repeat_the_first_real_row() -> None:
    rows = rows_of(step_of([-1, 6, -1, 8], [0, 1, 2, 3, 4]))
    assert [row.source for row in rows] == [1, 1, 1, 3]
    assert [row.token for row in rows] == [11, 11, 11, 13]
    assert [row.position for row in rows] == [51, 51, 51, 53]
    assert [row.first for row in rows] == [1, 1, 1, 3]


def test_padding_alone_is_one_token_that_nobody_keeps() -> None:
    rows = rows_of(step_of([-1, -1], [0, 1, 2]))
    assert not any(row.real for row in rows)
    assert [row.position for row in rows] == [0, 0]


def context_with(**changes: object):  # type: ignore[no-untyped-def]
    from lowlat_plugin.kernel import Workspace

    case = cpu_case()
    case.config = {**CONFIG, **changes}
    return ReferenceHost(case, pages=4).context(DENSE, Workspace("cpu"))


def test_models_and_layouts_are_refused_by_name() -> None:
    kernel = DenseKernel(DENSE)
    assert not list(kernel.model_reasons(context_with()))
    scaled = {"rope_type": "yarn", "factor": 4.0}
    for change, word in (({"rope_scaling": scaled}, "yarn"), ({"intermediate_size": 1000}, "inter")):
        (reason,) = kernel.model_reasons(context_with(**change))
        assert word in str(reason)
    context = context_with()
    for layout, word in (
        (KVLayout(8, 128, 16, "bfloat16", 1025, 128), "1025"),
        (KVLayout(8, 128, 16, "bfloat16", 128, 1 << 24), "near"),
    ):
        (reason,) = kernel.model_reasons(dataclasses.replace(context, layout=layout))
        assert word in str(reason)
    assert scratch_elements(KVLayout(8, 128, 16, "bfloat16", 1024, 128)) == 1024


def test_the_plan_counts_what_is_taken() -> None:
    context = context_with()
    plan = DenseKernel(DENSE).probe(context)
    assert str(plan.shapes).count("verify") > 0
    shape = plans.shape_from_config(context.config)
    assert plan.workspace_bytes > shape.weight_bytes()
    assert read_weights(shape, context).lm_head is not None


def test_llama_rotary_scaling() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, scaled = frequencies({"rope_theta": 5e5}, 64), frequencies({"rope_theta": 5e5, "rope_scaling": scaling}, 64)
    ratio = plain / scaled
    assert ratio[0] == 1
    assert math.isclose(float(ratio[-1]), 32.0)
    assert (ratio.diff() >= 0).all()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        rope_parameters={**scaling, "rope_theta": 5e5},
        max_position_embeddings=131072,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    assert torch.allclose(scaled.float(), expected, rtol=1e-6)
    assert torch.equal(frequencies({"rope_parameters": {**scaling, "rope_theta": 5e5}}, 64), scaled)
