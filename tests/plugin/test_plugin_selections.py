"""Selections apart from values: a small mixture of experts whose router kernels may decide differently near a tie."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from plugin_zoo import WIDTHS, zoo_case, zoo_spec

from lowlat_plugin import (
    Bound,
    Kernel,
    KernelSpec,
    LowLatency,
    Metric,
    Numerics,
    Plan,
    Policy,
    Refused,
    Registry,
    Selection,
    State,
    StepInputs,
    StepOutputs,
    decode_shapes,
)
from lowlat_plugin.conformance import ReferenceHost

EXPERTS, TOP = 6, 2


class ExpertsHost(ReferenceHost):
    """The reference engine with experts on top of its logits: routed by the token, mixed into the vocabulary."""

    def __init__(self, case: Any) -> None:
        super().__init__(case)
        generator = torch.Generator().manual_seed(11)
        self.router = torch.randn(self.vocab_size, EXPERTS, generator=generator)
        self.experts = torch.randn(EXPERTS, self.vocab_size, generator=generator)

    def general(self, step: StepInputs, forced: Mapping[str, torch.Tensor] | None = None) -> StepOutputs:
        base = super().general(step).logits_RV
        scores = self.router[step.token_ids_R]
        chosen = forced["router"] if forced else scores.topk(TOP).indices
        return StepOutputs(
            base + self.experts[chosen].sum(1),
            {"router": Selection(chosen, scores)},
            {"mixed": self.experts[chosen].sum(1)},
        )


class ExpertsKernel(Kernel):
    """`shift` moves the router's scores before it chooses."""

    shift = 0.0

    def probe(self, context: Any) -> Plan:
        return Plan(decode_shapes(WIDTHS))

    def build(self, context: Any) -> None:
        self.host = ExpertsHost(context.extras.get("case") or zoo_case())

    def bind(self, binding: Any) -> None:
        self.host.layers = binding.layers

    def forward(self, step: StepInputs) -> torch.Tensor:
        scores = self.host.router[step.token_ids_R].clone()
        order = scores.argsort(descending=True)
        lowest_chosen, next_best = order[:, TOP - 1], order[:, TOP]
        rows = torch.arange(len(scores))
        scores[rows, lowest_chosen] -= self.shift * (scores[rows, lowest_chosen] - scores[rows, next_best])
        self.chosen = scores.topk(TOP).indices
        outputs = self.host.general(step, {"router": self.chosen})
        self.mixed = outputs.state["mixed"]
        return outputs.logits_RV

    def selections(self) -> Mapping[str, Selection]:
        return {"router": Selection(self.chosen)}

    def state(self) -> Mapping[str, torch.Tensor]:
        return {"mixed": self.mixed}


class OtherExperts(ExpertsKernel):
    """Takes the next best expert in place of the last chosen one."""

    shift = 2.0


class WrongValues(OtherExperts):
    """Chooses differently, and computes with neither choice."""

    def forward(self, step: StepInputs) -> torch.Tensor:
        return super().forward(step) + 0.5


class ForgetsState(ExpertsKernel):
    def state(self) -> Mapping[str, torch.Tensor]:
        return {}


class NamesNothing(OtherExperts):
    def selections(self) -> Mapping[str, Selection]:
        return {}


def installed(kernel: type[Kernel], tie_margin: float, policy: Policy = Policy.AUTO) -> LowLatency:
    spec: KernelSpec = zoo_spec(
        implementation=f"test_plugin_selections:{kernel.__name__}",
        numerics=Numerics(
            {
                "logits": Bound(Metric.MAX_ABS, 1e-4),
                "kv": Bound(Metric.RELATIVE, 1e-5),
                "mixed": Bound(Metric.MAX_ABS, 1e-5),
            },
            tie_margin=tie_margin,
        ),
    )
    registry = Registry()
    registry.register(spec, "experts")
    low = LowLatency(ExpertsHost(zoo_case()), registry, policy)
    low.choose()
    low.build()
    low.bind()
    low.prove()
    return low


def measured(low: LowLatency, output: str) -> list[float]:
    return [m.measured for result in low.results for m in result.measurements if m.output == output]


def test_the_same_choices_pass_with_no_margin():
    low = installed(ExpertsKernel, tie_margin=0.0, policy=Policy.REQUIRE)
    assert low.state is State.ACTIVE
    assert measured(low, "selection router") == [0.0] * 4
    assert max(measured(low, "mixed")) == 0.0


def test_other_choices_pass_only_within_the_margin_and_values_are_compared_with_the_same_choice():
    low = installed(OtherExperts, tie_margin=10.0)
    assert low.state is State.ACTIVE
    assert max(measured(low, "selection router")) > 0
    assert max(measured(low, "logits")) < 1e-4
    narrow = installed(OtherExperts, tie_margin=1e-6)
    assert narrow.state is State.FAILED
    with pytest.raises(Refused, match="selection router"):
        installed(OtherExperts, 1e-6, Policy.REQUIRE)


def test_a_wide_margin_excuses_no_wrong_values():
    low = installed(WrongValues, tie_margin=10.0)
    assert low.state is State.FAILED
    assert any("logits" in reason.subject for reason in low.report().reasons)


@pytest.mark.parametrize(("kernel", "said"), [(ForgetsState, "state mixed"), (NamesNothing, "selections")])
def test_missing_state_and_missing_selections_are_named(kernel, said):
    low = installed(kernel, tie_margin=10.0)
    assert low.state is State.FAILED
    assert any(said in reason.subject for reason in low.report().reasons)
