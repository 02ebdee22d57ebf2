"""Every stage of the dense step on a Hopper GPU, in a whole step and alone, against its interpretation in Python.

Pages lie anywhere, entries that must not be read hold noise, rows are few and prime in number.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import schedule as schedules
from lowlat_nvidia.dense.alone import ALL, FOLDED_OUTPUTS, NOWHERE, OUTPUTS, AloneSteps
from lowlat_nvidia.dense.cases import copy_pools, make_case
from lowlat_nvidia.dense.reference import random_weights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.rows import rows_of
from lowlat_nvidia.dense.schedule import EMPTY, Schedule
from lowlat_nvidia.dense.step import DEFAULT_SPIN_LIMIT, DenseStep, StepDeadlineError, StepTensors

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

SHAPES = {
    "heads of 64, biases": plans.DenseShape(2, 2048, 32, 8, 64, 3072, 3001, False, qkv_bias=True),
    "heads of 128, query norms": plans.DenseShape(3, 1024, 16, 8, 128, 3072, 5003, True, 1e-6),
    "wide": plans.DenseShape(2, 4096, 32, 8, 128, 4096, 2999, True, 1e-6),
}
CASES = {
    "one": ([[731]], 1),
    "two": ([[0], [731]], 16),
    "three": ([[1500, 1501], [17]], 1),
    "five": ([[5], [700, 701, 702], [63]], 16),
    "seven": ([[i * 97 + 3] for i in range(7)], 1),
}
LAST = (schedules.LOGITS, "logits")
PLANTS = [*((stage, name) for stage, names in OUTPUTS.items() for name in names), LAST]
ONE_PLANTS = [*((stage, name) for stage, names in FOLDED_OUTPUTS.items() for name in names), LAST]


class Run:
    """A whole step, and what is needed to interpret it."""

    def __init__(self, alone: AloneSteps, weights: object, case: str, plant: int = -1) -> None:
        positions, page_size = CASES[case]
        plan = alone.step.plan
        self.inputs, pools = make_case(plan.shape, positions, page_size, len(positions) + page_size)
        self.pools = copy_pools(pools)
        alone.step.bind(self.pools, page_size)
        self.words_W, self.logits_RV = alone.whole(self.inputs, *([] if plant < 0 else [plant]))
        rows = rows_of(self.inputs)
        self.schedule = Schedule(plan, weights, alone.step.rotary, self.pools, page_size, rows, self.words_W)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=SHAPES)
def built(request: pytest.FixtureRequest) -> Iterator[tuple[AloneSteps, object]]:
    shape = SHAPES[request.param]
    weights = random_weights(shape, 11, "cuda")
    rotary = rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), 2000, "cuda")
    step = DenseStep(plans.DensePlan(shape, alone=True), weights, rotary)
    yield AloneSteps(step), weights
    step.close()


@pytest.mark.parametrize("case", CASES)
def test_every_stage_makes_of_its_inputs_what_it_should(built: tuple[AloneSteps, object], case: str) -> None:
    run = Run(*built, case)
    faults = run.schedule.faults(run.logits_RV)
    assert not faults, "\n".join(map(str, faults[:20]))


@pytest.mark.parametrize("case", CASES)
def test_every_stage_alone_publishes_the_same_bits_and_nothing_else(
    built: tuple[AloneSteps, object], case: str
) -> None:
    alone, _ = built
    run = Run(*built, case)
    rows, layers = len(run.inputs.tokens_R), alone.step.plan.shape.layers
    compared = 0
    outputs = alone.outputs(rows)
    for stage in outputs:
        for layer in [layers] if stage == schedules.LOGITS else [0] if stage == schedules.EMBEDDING else range(layers):
            words_W, logits_RV = alone.one(run.inputs, stage, layer, run.words_W)
            where = f"stage '{schedules.NAMES[stage]}' of layer {layer}"
            places = alone.places(stage, layer, rows).cuda()
            assert torch.equal(words_W[places], run.words_W[places]), where
            words_W[places] = EMPTY
            assert bool((words_W == EMPTY).all()), f"{where} published elsewhere"
            assert torch.equal(logits_RV, run.logits_RV) if stage == schedules.LOGITS else logits_RV.isnan().all(), (
                where
            )
            compared += 1
    assert compared == (5 * layers + 1 if outputs is FOLDED_OUTPUTS else 6 * layers + 2)


@pytest.mark.parametrize(("stage", "name"), PLANTS, ids=[f"{schedules.NAMES[stage]} {name}" for stage, name in PLANTS])
def test_one_wrong_element_is_found_in_its_stage(built: tuple[AloneSteps, object], stage: int, name: str) -> None:
    """Planted in the kernel as it publishes, so that all stages after it compute with the wrong element."""
    check_planted(*built, "five", stage, name)


@pytest.mark.parametrize(
    ("stage", "name"), ONE_PLANTS, ids=[f"{schedules.NAMES[stage]} {name}" for stage, name in ONE_PLANTS]
)
def test_so_it_is_where_one_row_is_folded(built: tuple[AloneSteps, object], stage: int, name: str) -> None:
    if not built[0].step.plan.folded:
        pytest.skip("one row of this shape has the stages of several")
    check_planted(*built, "one", stage, name)


def check_planted(alone: AloneSteps, weights: object, case: str, stage: int, name: str) -> None:
    clean = Run(alone, weights, case)
    draw = random.Random(name)
    row = draw.randrange(len(clean.inputs.tokens_R))
    if stage == schedules.LOGITS:
        layer = alone.step.plan.shape.layers
        element = int(clean.logits_RV[row].abs().argmax())
        place, expected = alone.words.step + row * alone.step.plan.shape.vocab + element, element
    else:
        layer = -1 if stage == schedules.EMBEDDING else draw.randrange(alone.step.plan.shape.layers)
        field = alone.words.fields[name]
        values = alone.words.read(clean.words_W, layer, row, name).abs()
        values = values.masked_fill(values > 1e6, 0)[1 if field.pairs else 0 :: 1 + field.pairs]
        element = int(values.argmax())
        place, expected = alone.words.place(layer, row, name) + element, 2 * element + 1 if field.pairs else element
    run = Run(alone, weights, case, place)
    faults = run.schedule.faults(run.logits_RV)
    found = [(f.stage, f.layer, f.row, f.name, f.element, f.wrong) for f in faults]
    assert found == [(schedules.NAMES[stage], layer, row, name, expected, 1)], "\n".join(map(str, faults[:20]))


def test_unused_words_of_wider_steps_do_not_matter(built: tuple[AloneSteps, object]) -> None:
    """Steps of many rows, then few, then many: what wider steps left behind is emptied."""
    alone, weights = built
    run = Run(alone, weights, "seven")
    few = StepTensors(
        run.inputs.tokens_R[:1], run.inputs.positions_R[:1], run.inputs.query_start_Q1[:2], run.inputs.page_table_TP
    )
    alone.step.reset()
    for inputs in (few, run.inputs, few, few, run.inputs):
        alone.step.logits_RV.fill_(float("nan"))
        alone._launch(inputs, ALL, 0, 0, alone.step.plan.stream_pages(), NOWHERE)
        rows = len(inputs.tokens_R)
        assert torch.equal(alone.step.logits_RV[:rows], run.logits_RV[:rows])


def test_a_page_that_never_comes_is_an_error_too(built: tuple[AloneSteps, object]) -> None:
    """Waits for copies into shared memory end like waits for other blocks."""
    alone, weights = built
    run = Run(alone, weights, "two")
    alone.step.reset()
    alone.step.spin_limit = 3000
    try:
        with pytest.raises(StepDeadlineError, match="any product: a page of weights"):
            alone._launch(run.inputs, ALL, 0, 0, alone.step.plan.stream_pages() - 1, NOWHERE)
        assert alone.step.next_token_R[:2].tolist() == [-1, -1]
        assert alone.step.logits_RV[:2, 0].isnan().all()
    finally:
        alone.step.spin_limit = DEFAULT_SPIN_LIMIT
    assert torch.equal(alone.whole(run.inputs)[1], run.logits_RV)
