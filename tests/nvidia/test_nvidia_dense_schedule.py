"""The interpretation of the dense step's schedule: it computes the model, and finds a wrong element's stage. No GPU.

The words that a kernel would leave behind are made by the interpretation itself, rounded as published. What the logits
come out as is compared with the plain float32 reference, which knows nothing of stages.
"""

from __future__ import annotations

import random

import pytest
import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import schedule as schedules
from lowlat_nvidia.dense.alone import FOLDED_OUTPUTS, OUTPUTS, AloneSteps
from lowlat_nvidia.dense.cases import copy_pools, make_case
from lowlat_nvidia.dense.reference import random_weights, reference_step
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.rows import rows_of

SHAPES = {
    "query norms": plans.DenseShape(2, 1024, 16, 8, 128, 1024, 203, True, 1e-6),
    "biases": plans.DenseShape(1, 1024, 16, 8, 128, 2048, 101, False, 1e-6, qkv_bias=True),
}


class Made:
    """Steps whose words are made by the interpretation, all at once for one choice of rows."""

    def __init__(self, shape: plans.DenseShape, positions: list[list[int]], page_size: int) -> None:
        self.plan, self.page_size = plans.DensePlan(shape), page_size
        self.weights = random_weights(shape, 5, "cpu")
        self.rotary = rotary_table(frequencies({}, shape.head_dim), 64, "cpu")
        self.step, self.pools = make_case(shape, positions, page_size, 3, "cpu")
        self.rows = rows_of(self.step)
        self.words = schedules.Words(self.plan)
        self.matrices: dict[tuple[int, str], torch.Tensor] = {}

    def run(self, plant: int = -1) -> tuple[schedules.Schedule, torch.Tensor, torch.Tensor]:
        """The interpretation of a step with the sign of one word turned as it is published; the words; the logits."""
        pools = copy_pools(self.pools)
        words_W = torch.full((self.words.step,), schedules.EMPTY, dtype=torch.int32)
        inputs = (self.plan, self.weights, self.rotary, pools, self.page_size, self.rows, words_W)
        schedule = schedules.Schedule(*inputs)
        schedule._matrices = self.matrices
        for made in schedule.stages():
            if made.name in ("key", "value"):
                pool = pools[made.layer][made.name == "value"]
                slot = self.rows[made.row].slots(self.page_size)[-1]
                pool[slot] = made.expected.view(pool.shape[1:]).to(torch.bfloat16)
                continue
            field = self.words.fields[made.name]
            first = self.words.place(made.layer, made.row, made.name)
            value = made.expected.to(torch.bfloat16 if field.pairs else torch.float32).contiguous()
            words_W[first : first + field.count] = value.view(torch.int32)
            if first <= plant < first + field.count:
                words_W[plant] ^= -(1 << 31)
        return schedule, words_W, torch.stack([made.expected for made in schedule.logits()]).float()


@pytest.fixture(scope="module", params=SHAPES)
def made(request: pytest.FixtureRequest) -> Made:
    return Made(SHAPES[request.param], [[29], [7, 8, 9], [0]], 16)


@pytest.fixture(scope="module", params=SHAPES)
def made_one(request: pytest.FixtureRequest) -> Made:
    made = Made(SHAPES[request.param], [[41]], 16)
    assert made.plan.folded
    return made


def check_model(made: Made) -> None:
    schedule, _, logits_RV = made.run()
    assert not schedule.faults(logits_RV)
    shape = made.plan.shape
    expected = reference_step(shape, made.weights, made.rotary, copy_pools(made.pools), made.page_size, made.step)
    error = (logits_RV - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 1.2e-2).all(), error
    assert (error > 1e-5).all(), "roundings of what is published are in it"


def test_it_computes_the_model(made: Made) -> None:
    check_model(made)


def test_it_computes_one_row_folded(made_one: Made) -> None:
    check_model(made_one)


PLANTS = [(stage, name) for stage, names in OUTPUTS.items() for name in names]
ONE_PLANTS = [(stage, name) for stage, names in FOLDED_OUTPUTS.items() for name in names]


def check_planted(made: Made, stage: int, name: str) -> None:
    """The stage that made it is named, its element too, and no stage that computed with it."""
    draw = random.Random(name)
    row, field, clean_W = draw.randrange(len(made.rows)), made.words.fields[name], made.run()[1]
    layer = -1 if stage == schedules.EMBEDDING else draw.randrange(made.plan.shape.layers)
    values = made.words.read(clean_W, layer, row, name).abs()
    values = values.masked_fill(values > 1e6, 0)[1 if field.pairs else 0 :: 1 + field.pairs]  # of a pair, the high half
    element = int(values.argmax())
    schedule, _, logits_RV = made.run(made.words.place(layer, row, name) + element)
    faults = schedule.faults(logits_RV)
    assert [(f.stage, f.layer, f.row, f.name) for f in faults] == [(schedules.NAMES[stage], layer, row, name)], faults
    assert faults[0].element == (2 * element + 1 if field.pairs else element)
    assert faults[0].wrong == 1
    assert f"{name}[{faults[0].element}]" in str(faults[0])


@pytest.mark.parametrize(("stage", "name"), PLANTS, ids=[f"{schedules.NAMES[stage]} {name}" for stage, name in PLANTS])
def test_a_turned_sign_is_found_in_its_stage(made: Made, stage: int, name: str) -> None:
    check_planted(made, stage, name)


@pytest.mark.parametrize(
    ("stage", "name"), ONE_PLANTS, ids=[f"{schedules.NAMES[stage]} {name}" for stage, name in ONE_PLANTS]
)
def test_a_turned_sign_of_one_row_is_found_in_its_stage(made_one: Made, stage: int, name: str) -> None:
    check_planted(made_one, stage, name)


def test_a_wrong_logit_is_found(made: Made) -> None:
    schedule, _, logits_RV = made.run()
    logits_RV[3, 77] += 1
    assert [(f.stage, f.row, f.element) for f in schedule.faults(logits_RV)] == [("logits", 3, 77)]


def test_stages_read_all_pages_once() -> None:
    for shape in (*SHAPES.values(), plans.LLAMA_1B, plans.QWEN3_8B):
        plan = plans.DensePlan(shape, alone=True)
        alone = AloneSteps.__new__(AloneSteps)
        alone.step = type("Step", (), {"plan": plan})()
        order = [schedules.QKV, schedules.OUTPUT, schedules.GATE_UP, schedules.DOWN]
        spans = [alone.pages(stage, layer) for layer in range(shape.layers) for stage in order]
        spans.append(alone.pages(schedules.LOGITS, shape.layers))
        ends = [0] + [end for _, end in spans]
        assert [first for first, _ in spans] == ends[:-1]
        assert ends[-1] == plan.stream_pages()
