"""The dense step's own sources on a CPU: every thread of a small grid is a fiber, asynchronous copies and published
words arrive late and in random order. Finds wrong indices, missing waits and deadlocks; says nothing of speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import machine

from lowlat.bench.presets import DenseShape as BenchShape
from lowlat.bench.random_checkpoint import RandomCheckpoint
from lowlat_nvidia.dense import alone as alones
from lowlat_nvidia.dense import pack, reference
from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import schedule as schedules
from lowlat_nvidia.dense import step as steps
from lowlat_nvidia.dense.cases import copy_pools, make_case, one_row
from lowlat_nvidia.dense.kernel import read_weights, shadow_limits
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.rows import rows_of
from lowlat_nvidia.dense.waits import Waits
from lowlat_nvidia.specs import DENSE
from lowlat_plugin import Mode
from lowlat_plugin.conformance import Case, ReferenceHost
from lowlat_plugin.kernel import Workspace
from lowlat_plugin.shadow import Shadow
from lowlat_plugin.steps import Shape

pytestmark = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
BLOCKS = 32
SHAPES = {
    "heads of 64": plans.DenseShape(1, 512, 8, 2, 64, 512, 300, False),
    "heads of 128": plans.DenseShape(1, 512, 4, 2, 128, 512, 300, True),
}
DEEP = {
    "two layers": plans.DenseShape(2, 512, 4, 2, 128, 512, 300, True),
    "four layers": plans.DenseShape(4, 512, 4, 2, 128, 512, 300, True),
    "four layers, heads of 64": plans.DenseShape(4, 512, 8, 2, 64, 512, 300, False),
}
FOUR_PAGES = {"fold": False, "ring_limit": 32 * 1024, "under_way": 3}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled kernels lie: many tests want the same."""
    return tmp_path_factory.mktemp("builds")


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (plans, pack, steps):
        monkeypatch.setattr(module, "BLOCKS", BLOCKS)


def build(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    shape: str | plans.DenseShape,
    weights: pack.DenseWeights | None = None,
    changes: dict[str, tuple[str, str]] | None = None,
    **options: Any,
) -> tuple[steps.DenseStep, pack.DenseWeights]:
    """A ring of one or two units a warp: it comes round soon. Weights are random unless they are given."""
    shape = (SHAPES | DEEP)[shape] if isinstance(shape, str) else shape
    plan = plans.DensePlan(shape, units=1024 // shape.head_dim, ahead=2, **options)
    cluster = BLOCKS // shape.kv_heads

    def choose(name: str, definitions: dict[str, int]) -> tuple[bytes, str]:
        return json.dumps(definitions).encode(), ""

    def load(chosen: bytes, name: str, shared: int) -> machine.EmulatedFunction:
        library = functools.partial(machine.build, machine.DENSE, json.loads(chosen), folder, changes)
        return machine.CompiledWhenLaunched(library, 0, cluster, shared)

    monkeypatch.setattr(steps, "compile_cubin", choose)
    monkeypatch.setattr(steps, "Function", load)
    monkeypatch.setattr(steps.Function, "tensor_map", machine.EmulatedFunction.tensor_map, raising=False)
    weights = weights or reference.random_weights(shape, 3, "cpu")
    rotary = rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), 7000, "cpu")
    return steps.DenseStep(plan, weights, rotary, "cpu"), weights


@pytest.mark.parametrize(("positions", "page_size"), [([[333]], 16), ([[70, 71], [5]], 1)], ids=["one row", "several"])
def test_stages(
    small_grid: None,
    monkeypatch: pytest.MonkeyPatch,
    builds: Path,
    positions: list[list[int]],
    page_size: int,
) -> None:
    """Each is what its interpretation says, and alone publishes the same bits and nothing else; one wrong element is
    found in its stage."""
    for module in (alones, schedules):
        monkeypatch.setattr(module, "BLOCKS", BLOCKS)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=1))
    built, weights = build(monkeypatch, builds, "heads of 64", alone=True)
    alone, rows = alones.AloneSteps(built), sum(map(len, positions))
    assert built.plan.folded
    inputs, pools = make_case(built.plan.shape, positions, page_size, 5, "cpu")
    built.bind(pools, page_size)

    def faults(plant: int) -> tuple[list[schedules.Fault], torch.Tensor, torch.Tensor]:
        words_W, logits_RV = alone.whole(inputs, plant)
        schedule = schedules.Schedule(built.plan, weights, built.rotary, pools, page_size, rows_of(inputs), words_W)
        return schedule.faults(logits_RV), words_W, logits_RV

    found, words_W, logits_RV = faults(alones.NOWHERE)
    assert not found
    for stage in alone.outputs(rows):
        alone_W, alone_RV = alone.one(inputs, stage, int(stage == schedules.LOGITS), words_W)
        places = alone.places(stage, 0, rows)
        assert torch.equal(alone_W[places], words_W[places]), schedules.NAMES[stage]
        alone_W[places] = schedules.EMPTY
        assert bool((alone_W == schedules.EMPTY).all()), schedules.NAMES[stage]
        assert torch.equal(alone_RV, logits_RV) == (stage == schedules.LOGITS)
    greatest = int(alone.words.read(words_W, 0, rows - 1, "qkv").abs().argmax())
    (fault,) = faults(alone.words.place(0, rows - 1, "qkv") + greatest)[0]
    assert (fault.stage, fault.row, fault.name, fault.element) == ("q, k and v", rows - 1, "qkv", greatest)


def distance(built: steps.DenseStep, weights: pack.DenseWeights, positions: list[list[int]], page_size: int) -> float:
    """Of the worst row from float32, relative; infinite where the last row alone, at other times, has other bits."""
    shape = built.plan.shape
    inputs, pools = make_case(shape, positions, page_size, 5, "cpu")
    expected = reference.reference_step(shape, weights, built.rotary, copy_pools(pools), page_size, inputs)
    built.bind(pools, page_size)
    built.logits_RV.fill_(float("nan"))
    logits = built.run(inputs, 1).clone()
    built.check()
    last = len(logits) - 1
    if not torch.equal(built.run(one_row(inputs, last), 1)[0], logits[last]):
        return torch.inf
    return ((logits - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_is_right_on_a_cpu(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, name: str, fold: bool
) -> None:
    built, weights = build(monkeypatch, builds, name, fold=fold)
    assert built.plan.folded == fold
    assert distance(built, weights, [[333]], 16) < 1e-2
    assert distance(built, weights, [[5], [70, 71]], 1) < 1e-2


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "two under way": ("heads of 64", {"under_way": 2}),
    "not folded": ("heads of 128", {"fold": False}),
    "every sender watched": ("heads of 128", {"watch_each": True}),
    "a buffer for each layer": ("four layers", {"slots": 4}),
    "rows take turns in attention": ("two layers", {"row_warps": 0}),
    "units in registers later": ("two layers", {"row_warps": 1}),
    "no sums in registers": ("two layers", {"row_units": 4}),
    "and earlier, heads of 64": ("heads of 64", {"row_warps": 2}),
    "as wide models have it": ("four layers", {"wide": True}),
    "as wide models have it, heads of 64": ("four layers, heads of 64", {"wide": True}),
}


def left_by(step: steps.DenseStep, positions: list[list[int]], page_size: int) -> list[torch.Tensor]:
    """Logits and pools after a step."""
    inputs, pools = make_case(step.plan.shape, positions, page_size, 5, "cpu")
    step.bind(pools, page_size)
    step.logits_RV.fill_(float("nan"))
    logits = step.run(inputs, 1).clone()
    step.check()
    return [logits, *(pool for pair in pools for pool in pair)]


Left = dict[tuple[plans.DenseShape, str, int], list[torch.Tensor]]


@pytest.fixture(scope="module")
def defaults() -> Left:
    """What steps of the default form left: several forms are compared with the same."""
    return {}


def same_bits(
    built: steps.DenseStep, other: steps.DenseStep, positions: list[list[int]], page_size: int, defaults: Left
) -> bool:
    """Whether a step of `other` leaves the same logits and pools as one of `built`, the default form."""
    case = (built.plan.shape, str(positions), page_size)
    if case not in defaults:
        defaults[case] = left_by(built, positions, page_size)
    found = left_by(other, positions, page_size)
    return all(torch.equal(a, b) for a, b in zip(found, defaults[case], strict=True))


def two_forms(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, options: dict[str, Any]
) -> tuple[steps.DenseStep, steps.DenseStep]:
    """The default of a small model, and a form of it; `wide`: with all that the defaults of wide models have."""
    built, _ = build(monkeypatch, folder, name)
    if options.get("wide"):
        monkeypatch.setattr(plans.DensePlan, "_narrow", False)
    rest = {key: value for key, value in options.items() if key != "wide"}
    return built, build(monkeypatch, folder, name, **rest)[0]


@pytest.mark.parametrize("form", FORMS)
def test_forms_have_the_same_bits(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, defaults: Left, form: str
) -> None:
    """As the default has, in logits and in all of the pools: requests of one row and of two, contexts of no tokens and
    of more units than the ring holds, up to eight rows."""
    name, options = FORMS[form]
    built, other = two_forms(monkeypatch, builds, name, options)
    eight = [[0], [1023], [700], [331], [64], [13], [16], [999]]
    for positions, page_size in (
        ([[0], [71]], 1), ([[0], [70, 71]], 1), ([[5], [900, 901], [331], [13], [16]], 16), (eight, 16), (eight[:5], 1),
    ):  # fmt: skip
        assert same_bits(built, other, positions, page_size, defaults)


def rows_have_warps(built: steps.DenseStep, positions: list[list[int]]) -> list[bool]:
    """Of each split, whether each row should have a warp of its own."""
    splits, limit = BLOCKS // built.plan.shape.kv_heads, built.plan.kernel(8).definitions()["ROW_UNITS"]
    found = []
    for split in range(splits):
        units = []
        for tokens in (position + 1 for rows in positions for position in rows):
            each = -(-tokens // (16 * splits))
            units.append(min(each, max(0, -(-(tokens - 16 * split * each) // 16))))
        found.append(max(units) <= limit and (max(units) <= limit // 2 or sum(units) > 4 * max(units)))
    return found


LONG = {
    "heads of 64": ([[2047], [1300], [1100], [0], [1791], [1279], [1535], [700]], 16),
    "heads of 128": ([[1800, 1801], [2040], [1290], [1536], [0]], 1),
}


@pytest.mark.parametrize("name", LONG)
def test_rows_with_more_units_than_there_is_room_for_sums(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, name: str
) -> None:
    """Each has the bits that it has alone, and a warp to itself where that is meant, as a mark says of every block:
    five to eight units a split beside few and none, two rows of a request; not nine units, or where most warps would
    rest."""
    end = "block_sync();  // the output projection's sums will lie where these are"
    mark = {"row_warps.cuh": (end, f"stamp(c, layer, 14);\n{end}")}
    built, _ = build(monkeypatch, builds, name, changes=mark, row_units=8, stamps=16)

    def run(positions: list[list[int]], page_size: int) -> tuple[steps.StepTensors, torch.Tensor, list[bool]]:
        inputs, pools = make_case(built.plan.shape, positions, page_size, 5, "cpu")
        built.bind(pools, page_size)
        built.stamps.zero_()
        logits = built.run(inputs, 1).clone()
        built.check()
        own = rows_have_warps(built, positions)
        assert (built.stamps[:, 0, 14] != 0).tolist() == own * built.plan.shape.kv_heads
        return inputs, logits, own

    assert not run([[2048], [40], [3]], 16)[2][0]
    assert not run([[2047], [40], [3]], 16)[2][0]
    inputs, logits, own = run(*LONG[name])
    assert sum(own) >= 12
    for row, together in enumerate(logits):
        assert torch.equal(built.run(one_row(inputs, row), 1)[0], together), row


@pytest.mark.parametrize(
    ("quiet", "busy"), [({2: 1}, {2: 1, 3: 2}), ({5: 1}, {0: 1, 3: 255}), ({0: 4, 2: 3, 3: 7}, {6: 2})]
)
def test_only_the_stages_that_should_pause_do(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, quiet: dict[int, int], busy: dict[int, int]
) -> None:
    """Pauses of the first stages fit 32 bits, and those of later ones do not. A mark says which stages of a layer
    paused, in all blocks alike."""
    start = "const long long start = clock_now();\n  while (__any_sync(~0u, clock_now() - start < cycles)) idle();"
    mark = {"gemv.cuh": (start, f"if (cycles) stamp(c, 0, 16 + stage);\n  {start}")}
    how = Waits(quiet, busy)
    built, _ = build(monkeypatch, builds, "heads of 64", changes=mark, fold=False, stamps=32, waits=how)
    for positions, expected in (
        ([[1023]], quiet), ([[4090]], busy), ([[70, 71]], busy), ([[70, 71], [5]], quiet), ([[3000, 3001], [5]], busy),
    ):  # fmt: skip
        inputs, pools = make_case(built.plan.shape, positions, 16, 5, "cpu")
        built.bind(pools, 16)
        built.stamps.zero_()
        built.run(inputs, 1)
        built.check()
        paused = built.stamps[:, 0, 16:24] != 0
        assert bool((paused == paused[0]).all())
        assert paused[0].nonzero().flatten().tolist() == sorted(expected), positions


def test_busy_steps_have_more_pages_under_way(small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path) -> None:
    """A mark says where a page was asked for beyond those that may be under way in a quiet step."""
    limit = "  if (f.under_way < most_under_way(c)) {\n"
    mark = {"stream.cuh": (limit, f"{limit}    if (f.under_way >= UNDER_WAY) stamp(c, 0, 14);\n")}
    options = {"ring_limit": 32 * 1024, "under_way": 2, "busy_under_way": 3, "stamps": 16}
    built, _ = build(monkeypatch, builds, "two layers", changes=mark, **options)
    for position, more in ((300, False), (4090, True)):
        inputs, pools = make_case(built.plan.shape, [[position]], 16, 5, "cpu")
        built.bind(pools, 16)
        built.stamps.zero_()
        built.run(inputs, 1)
        built.check()
        assert bool((built.stamps[:, 0, 14] != 0).any()) == more


FORMS_OF_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "not folded": ("two layers", {"fold": False}),
    "no pauses": ("two layers", {"waits": Waits()}),
    "four pages": ("two layers", FOUR_PAGES),
    "a page more in busy steps": ("two layers", {"ring_limit": 32 * 1024, "under_way": 2, "busy_under_way": 3}),
    "a buffer for each layer": ("four layers", {"slots": 4}),
    "a buffer for each layer, not folded": ("four layers", {"slots": 4, "fold": False}),
    "a page is held": ("four layers", FOUR_PAGES | {"wide": True}),
    "none is held": ("four layers", FOUR_PAGES | {"wide": True, "hold": False}),
}


@pytest.mark.parametrize("form", FORMS_OF_ONE)
def test_forms_of_one_row_have_the_same_bits(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, defaults: Left, form: str
) -> None:
    built, other = two_forms(monkeypatch, builds, *FORMS_OF_ONE[form])
    assert other.plan.kernel(1).holds == (form == "a page is held")
    for position, page_size in ((0, 1), (700, 16), (2000, 16)):
        assert same_bits(built, other, [[position]], page_size, defaults)


@pytest.mark.parametrize("wide", [False, True])
def test_either_kernel_follows_the_other(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, wide: bool
) -> None:
    """In any order, with few rows after many, and after a failure and the reset: the bits of a first step."""
    monkeypatch.setattr(plans.DensePlan, "_narrow", not wide)
    built, _ = build(monkeypatch, builds, "four layers")
    kernels = [built.plan.kernel(rows) for rows in (1, 8)]
    assert [kernel.buffers for kernel in kernels] == [3, 3]
    assert [len(built.exchange(rows)) for rows in (1, 8)] == [kernel.exchange_words() for kernel in kernels]
    inputs, pools = make_case(built.plan.shape, [[331], [5, 6], [70], [0]], 16, 5, "cpu")
    two = dataclasses.replace(
        inputs, tokens_R=inputs.tokens_R[1:3], positions_R=inputs.positions_R[1:3],
        query_start_Q1=torch.tensor([0, 2], dtype=torch.int32), page_table_TP=inputs.page_table_TP[1:],
    )  # fmt: skip
    choices = {1: one_row(inputs, 0), 2: two, 5: inputs}
    built.bind(pools, 16)
    expected = {}
    for rows, step in choices.items():
        built.reset()
        expected[rows] = built.run(step, 1).clone()
        built.check()

    def agree(order: tuple[int, ...]) -> None:
        for rows in order:
            built.logits_RV.fill_(float("nan"))
            assert torch.equal(built.run(choices[rows], 1), expected[rows]), order
            built.check()

    agree((1, 5, 5, 2, 1, 1, 1, 2, 5))
    built.state[1] = 1 + 3 * 16 + 5
    for rows in (1, 2):
        assert built.run(choices[rows], 1)[:, 0].isnan().all()
        assert built.error() is not None
    for exchange in built.exchanges:
        exchange[::3] = 7  # what a step that ended early left
    built.reset()
    agree((2, 1, 5, 1))


def tokens_of_steps_in_flight(
    monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int, changes: dict[str, tuple[str, str]] | None = None
) -> tuple[list[int], list[int]]:
    """Tokens of the last row of three steps, each of which decodes the one before's: launched one by one, and all at
    once."""
    weights = reference.random_weights(SHAPES["heads of 64"], 3, "cpu")
    weights.lm_head = weights.embedding.roll(1, 0)  # or the token after each would be itself
    built, _ = build(monkeypatch, folder, "heads of 64", weights, changes)
    inputs, pools = make_case(built.plan.shape, [[40]] * rows, 16, 5, "cpu")
    built.bind(pools, 16)
    inputs.tokens_R = built.next_token_R[:rows]  # a step reads the token that the one before it wrote
    function = built.function(rows)
    apart, together = [], []
    built.next_token_R.fill_(7)
    for _ in range(3):
        built.run(inputs, 1)
        apart.append(int(built.next_token_R[rows - 1]))
    built.check()
    monkeypatch.setattr(function, "launch", lambda *given, early: function.launch_early(*given))
    for count in (1, 2, 3):
        built.reset()
        built.next_token_R.fill_(7)
        for _ in range(count):
            built.run(inputs, 1)
        function.machine.finish(steps.THREADS)
        together.append(int(built.next_token_R[rows - 1]))
    return apart, together


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_that_start_early_wait_for_the_one_before(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, rows: int
) -> None:
    """A step lets the next one start when its logits are there, which is before its token is: a wait left out shows."""
    apart, together = tokens_of_steps_in_flight(monkeypatch, builds, rows)
    assert together == apart == [8, 9, 10]
    wait = ("  auto ask_inputs = [&] {\n    wait_for_earlier_kernel();\n", "  auto ask_inputs = [&] {\n")
    try:
        apart, together = tokens_of_steps_in_flight(monkeypatch, builds, rows, {"dense_step.cu": wait})
    except RuntimeError:
        return  # blocks of two steps wait for each other in the same buffer
    assert together != apart


SEVERAL = "if (!__any_sync(~0u, top == EMPTY) || !__all_sync(~0u, may_wait(c, polls, 2))) break;"
ONE = "if (!__any_sync(~0u, top == EMPTY) || give_up(c, polls, 2)) break;"


FIVE = [[40], [3], [70], [16], [333]]
KNOWN = "return there && c.s.control.cached[unit.row] >= unit.base + UNIT_TOKENS &&"


@pytest.mark.parametrize(
    ("file", "wait", "instead", "positions"),
    [
        ("heads.cuh", SEVERAL, "break;", [[40], [3]]),
        ("one_row.cuh", ONE, "break;", [[40]]),
        ("row_warps.cuh", SEVERAL, "break;", FIVE),
        ("row_warps.cuh", KNOWN, "return there &&", FIVE),
    ],
    ids=["several rows", "one row", "a warp for each row", "units that are not in the cache"],
)
def test_a_wait_that_is_left_out_shows(
    small_grid: None,
    monkeypatch: pytest.MonkeyPatch,
    builds: Path,
    file: str,
    wait: str,
    instead: str,
    positions: list[list[int]],
) -> None:
    """In one of a few orders in which the emulated machine runs: words may be there before anybody waits for them."""
    built, weights = build(monkeypatch, builds, "heads of 64", changes={file: (wait, instead)})
    assert any(not distance(built, weights, positions, 16) < 1e-2 for _ in range(6))


@pytest.mark.parametrize("name", SHAPES)
def test_the_ring_comes_round_often(small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, name: str) -> None:
    built, weights = build(monkeypatch, builds, name)
    assert distance(built, weights, [[6500], [1100, 1101]], 16) < 1e-2


def test_a_place_of_the_ring_that_two_warps_read_shows(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path
) -> None:
    """A warp that is ahead takes the round before for the one that it waits for."""
    own, shared = "(c.warp - layer_unit - c.s.control.first_unit[row]) % WARPS", "(c.warp + 4 * row) % WARPS"
    built, weights = build(monkeypatch, builds, "heads of 128", changes={"attention.cuh": (own, shared)})
    with contextlib.suppress(RuntimeError):  # where barriers are told too often, or nothing goes on
        assert not distance(built, weights, [[3000], [6500], [700], [1100, 1101]], 16) < 1e-2


def test_roundings_are_fewer_than_the_general_path_s_at_every_width(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path
) -> None:
    """On the steps of the start's check: the kernel is nearer to float32 than the general path in bfloat16, no farther
    with more rows, and the two are within the bound of each other."""
    small = BenchShape(
        name="small", layers=3, hidden=512, heads=4, kv_heads=2, head_dim=128, intermediate=512, vocab=300,
        qk_norm=True, tied=True, architecture="Qwen3ForCausalLM", max_context=64, eps=1e-6,
    )  # fmt: skip
    checkpoint = RandomCheckpoint(small, 0)
    tensors = {name: checkpoint.tensor(name, torch.bfloat16) for name in checkpoint.names()}
    case = Case(DENSE, {**checkpoint.config, "rope_theta": 5e5}, tensors, isa="sm_90", dtype="bfloat16", page_size=16)
    host = ReferenceHost(case, pages=40)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    exact = ReferenceHost(dataclasses.replace(case, dtype="float32", weights=wide), pages=40)
    shape = plans.DenseShape(3, 512, 4, 2, 128, 512, 300, True, 1e-6)
    weights = read_weights(shape, host.context(DENSE, Workspace("cpu")))
    built, _ = build(monkeypatch, builds, shape, weights)
    shapes = [Shape(Mode.DECODE, rows, rows) for rows in (1, 2, 3, 8)]
    off: dict[str, list[float]] = {"kernel": [], "general": [], "between": []}
    with torch.inference_mode():
        shadow = Shadow(host, shapes)
        for each in shapes:
            step = shadow._without_nan(shadow.step(each))
            for mine, theirs in zip(exact.layers, host.layers, strict=True):
                mine.k_SHD.copy_(theirs.k_SHD)
                mine.v_SHD.copy_(theirs.v_SHD)
            expected, general = exact.general(step).logits_RV, host.general(step).logits_RV
            built.bind([(layer.k_SHD, layer.v_SHD) for layer in host.layers], 16)
            inputs = steps.StepTensors(step.token_ids_R, step.positions_R, step.query_start_Q1, step.page_table_QP)
            logits = built.run(inputs, 1).clone()
            built.check()
            for name, a, b in (
                ("kernel", logits, expected),
                ("general", general, expected),
                ("between", logits, general),
            ):
                off[name].append(float(((a - b).abs().amax(1) / expected.abs().amax(1)).max()))
        assert torch.equal(built.run(one_row(inputs, 2), 1)[0], logits[2])
    print({name: [f"{value:.1e}" for value in values] for name, values in off.items()})
    assert all(mine < theirs for mine, theirs in zip(off["kernel"], off["general"], strict=True))
    assert max(off["kernel"]) < 2 * off["kernel"][0]
    assert 0 < max(off["between"]) < shadow_limits(shape)["logits"]


def test_after_an_error_steps_compute_nothing_until_the_reset(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path
) -> None:
    built, _ = build(monkeypatch, builds, "heads of 64")
    inputs, pools = make_case(built.plan.shape, [[70], [5]], 16, 5, "cpu")
    built.bind(pools, 16)
    steps_of = (inputs, one_row(inputs, 1))
    expected = [built.run(step, 1).clone() for step in steps_of]
    built.state[1] = 1 + 3 * 16 + 5
    for step in steps_of:
        logits = built.run(step, 1)
        assert logits[:, 0].isnan().all()
        assert (built.next_token_R[: len(logits)] == -1).all()
    assert "block 3 gave up waiting for the input of stage 'gate and up'" in str(built.error())
    built.reset()
    for step, logits in zip(steps_of, expected, strict=True):
        assert torch.equal(built.run(step, 1), logits)
        built.check()


@pytest.mark.parametrize("name", SHAPES)
def test_padding_alone_computes_one_token_and_leaves_the_cache(
    small_grid: None, monkeypatch: pytest.MonkeyPatch, builds: Path, name: str
) -> None:
    """One row of it, and two: the same token at position 0, the same bits."""
    built, _ = build(monkeypatch, builds, name)
    inputs, pools = make_case(built.plan.shape, [[70], [5]], 16, 5, "cpu")
    both = dataclasses.replace(inputs, write_slots_R=torch.full((2,), -1))
    before = copy_pools(pools)
    built.bind(pools, 16)
    logits = built.run(both, 1).clone()
    alone = built.run(dataclasses.replace(one_row(both, 0), write_slots_R=both.write_slots_R[:1]), 1).clone()
    built.check()
    assert logits.isfinite().all()
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(alone[0], logits[0])
    assert all(torch.equal(a, b) for old, new in zip(before, pools, strict=True) for a, b in zip(old, new, strict=True))
