"""Work by shares of the memory: tiles are dealt whole, once each, and have the bits that they have at home."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import machine
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat_nvidia.dense import pace as pacing
from lowlat_nvidia.dense import pack, reference
from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import shares as sharing
from lowlat_nvidia.dense import step as steps
from lowlat_nvidia.dense.cases import copy_pools, make_case
from lowlat_nvidia.dense.rotary import frequencies, rotary_table

emulated = pytest.mark.skipif(not machine.available(), reason="needs g++ on x86-64")
BLOCKS, MULTIPROCESSORS = 32, 34
SHAPE = plans.DenseShape(2, 512, 8, 2, 64, 1536, 2000, False)
RING = 64 * 1024

some_paces = st.lists(st.sampled_from([33.0, 38.5, 40.7, 48.8, 52.0]), min_size=2, max_size=40)


@given(paces=some_paces, tiles=st.integers(1, 80), most=st.integers(0, 30), data=st.data())
def test_every_tile_is_dealt_once(paces: list[float], tiles: int, most: int, data: st.DataObject) -> None:
    least = data.draw(st.integers(1, tiles))
    counts = sharing.tile_counts(paces, tiles, most, least)
    assert sum(counts) == tiles * len(paces)
    assert all(least <= count <= tiles + most for count in counts)
    dealt = sharing.deal(counts, tiles)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(tiles * len(paces)))
    for block, numbers in enumerate(dealt):
        assert len(numbers) == counts[block]
        own = min(tiles, len(numbers))
        assert numbers[:own] == tuple(range(block * tiles, block * tiles + own))


@given(
    tiles=st.integers(1, 80),
    most=st.integers(0, 30),
    noise=st.lists(st.floats(-0.007, 0.007), min_size=2, max_size=128),
)
def test_noise_moves_nothing(tiles: int, most: int, noise: list[float]) -> None:
    assert sharing.tile_counts([45.0 * (1 + x) for x in noise], tiles, most) == [tiles] * len(noise)


@given(paces=some_paces, tiles=st.integers(1, 80))
def test_the_largest_predicted_time_does_not_grow(paces: list[float], tiles: int) -> None:
    """Nor is any tile of a slow group worth giving to another one."""
    counts, groups = sharing.tile_counts(paces, tiles, 100), sharing.alike(paces)
    pace = [sum(paces[b] for b in group) / len(group) for group in groups]
    times = [sum(counts[b] for b in group) * x / len(group) for group, x in zip(groups, pace, strict=True)]
    assert max(times) <= tiles * max(pace) * (1 + 1e-9)
    if counts != [tiles] * len(paces):
        assert max(times) <= (1 - sharing.WORTH) * tiles * max(pace)
        after = [t + x / len(group) for t, x, group in zip(times, pace, groups, strict=True)]
        assert all(t >= max(times) * (1 - 1e-9) for t in after)


def replay(words: Sequence[int], block: int, layers: int) -> list[tuple[int, int]]:
    """What the kernel reads, as (block, page), by the runs of a row of the table."""
    layer = words[4 : 4 + plans.MORE_TILES + 2]
    logits = words[4 + plans.MORE_TILES + 2 :][: plans.MORE_LOGITS + 2]
    at, found = block, []
    ends = next(i for i, run in enumerate(layer) if run & sharing.RUN_PAGES)
    for run in [*layer[: ends + 1] * layers, *logits]:
        at += run >> sharing.RUN_BITS
        for _ in range(run & (sharing.RUN_PAGES - 1)):
            found.append((at % plans.BLOCKS, at // plans.BLOCKS))
            at += plans.BLOCKS
    return found


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(sorted(plans.PRESETS)), seed=st.integers(0, 1000), spread=st.floats(0.0, 0.6))
def test_runs_are_the_pages_of_the_tiles(name: str, seed: int, spread: float) -> None:
    """Every page of every block is read once in a step, and a block reads its pages in the order of its tiles."""
    generator = torch.Generator().manual_seed(seed)
    plan = plans.DensePlan(plans.PRESETS[name], shares=True)
    paces = (1 + spread * torch.randint(0, 3, (plans.BLOCKS,), generator=generator) / 2).tolist()
    shares, stages = sharing.Shares.by_pace(plan, paces), sharing.Stages.of(plan)
    layer_pages = stages.before + stages.gate_up * stages.tile + stages.after
    layers, read = plan.shape.layers, []
    assert layers * layer_pages + stages.logits * stages.tile == plan.stream_pages()
    for block, words in enumerate(shares.words(plan)):
        assert len(words) == plans.SHARE_WORDS
        expected = []
        for layer in range(layers):
            first = layer * layer_pages
            expected += [(block, first + i) for i in range(stages.before)]
            for number in shares.gate_up[block]:
                owner, tile = divmod(number, stages.gate_up)
                expected += [(owner, first + stages.before + tile * stages.tile + i) for i in range(stages.tile)]
            expected += [(block, first + layer_pages - stages.after + i) for i in range(stages.after)]
        for number in shares.logits[block]:
            owner, tile = divmod(number, stages.logits)
            expected += [(owner, layers * layer_pages + tile * stages.tile + i) for i in range(stages.tile)]
        found = replay(words, block, layers)
        assert found == expected
        assert words[4] & (sharing.RUN_PAGES - 1) >= max(plan.kernel(rows).ring_pages for rows in (1, 8))
        read += found
    assert sorted(read) == [(b, page) for b in range(plans.BLOCKS) for page in range(plan.stream_pages())]


def test_multiprocessors_that_are_left_out_rest() -> None:
    cycles = {number: 100.0 + number for number in range(132) if number % 33 != 5}
    paces = pacing.roles_of([{**cycles, 5: 1.0}, cycles], 132)
    assert sorted(role for role in paces.roles if role != pacing.REST) == list(range(128))
    assert [number for number, role in enumerate(paces.roles) if role == pacing.REST] == [5, 38, 71, 104]
    assert paces.cycles[paces.roles[131]] == 231.0
    for wrong in ({**cycles, 5: 100.0}, {**cycles, 0: 0.0}):
        with pytest.raises(ValueError, match="of 132"):
            pacing.roles_of([wrong], 132)


def test_stages_alone_have_no_shares() -> None:
    with pytest.raises(ValueError, match="alone"):
        plans.DensePlan(SHAPE, alone=True, shares=True)


COUNTED = "((int*)p.stamps)[place]++;"
PLANTED = "DEV u32 planted(const Params&, long, u32 value) { return value; }"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., steps.DenseStep]:
    """Steps that count in `stamps` how often each word and logit is published."""
    for module in (plans, pack, steps, sharing, pacing):
        monkeypatch.setattr(module, "BLOCKS", BLOCKS)
    weights = reference.random_weights(SHAPE, 3, "cpu")
    rotary = rotary_table(frequencies({"rope_theta": 5e5}, SHAPE.head_dim), 2000, "cpu")
    changes = {"layout.cuh": (PLANTED, PLANTED.replace("&, long", "& p, long place").replace("{ ", "{ " + COUNTED))}

    def compile_library(name: str, definitions: dict[str, int]) -> tuple[bytes, str]:
        return bytes(machine.build(machine.DENSE, definitions, tmp_path, changes)), ""

    def load(library: bytes, name: str, shared: int) -> machine.EmulatedFunction:
        return machine.EmulatedFunction(machine.Machine(Path(os.fsdecode(library))), 0, 1, shared)

    monkeypatch.setattr(steps, "compile_cubin", compile_library)
    monkeypatch.setattr(steps, "Function", load)
    monkeypatch.setattr(steps.Function, "tensor_map", machine.EmulatedFunction.tensor_map, raising=False)

    def build(paces: pacing.Paces | None, **options: Any) -> steps.DenseStep:
        plan = plans.DensePlan(SHAPE, units=16, ahead=2, ring_limit=RING, shares=paces is not None, **options)
        step = steps.DenseStep(plan, weights, rotary, "cpu", paces=paces)
        words = step.exchange.numel() // 2 + plans.MAX_ROWS * SHAPE.vocab
        step.stamps = torch.zeros(words, dtype=torch.int32)
        return step

    return build


def uneven() -> pacing.Paces:
    roles = [pacing.REST] * MULTIPROCESSORS
    for block, number in enumerate(number for number in range(MULTIPROCESSORS) if number not in (4, 21)):
        roles[number] = block
    return pacing.Paces([(33.0, 40.0, 52.0, 52.0)[block * 5 % 32 // 8] for block in range(BLOCKS)], roles)


@emulated
@pytest.mark.parametrize("fold", [True, False], ids=["folded", "not folded"])
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
def test_tiles_have_the_same_bits_elsewhere(
    built: Callable[..., steps.DenseStep], monkeypatch: pytest.MonkeyPatch, narrow: bool, fold: bool
) -> None:
    """All that blocks exchange, logits, tokens and the cache; every word and logit is published once. Steps of one row
    and of several follow each other."""
    monkeypatch.setattr(plans.DensePlan, "_narrow", narrow)
    home, away = built(None, fold=fold), built(uneven(), fold=fold)
    shares = sharing.Shares.by_pace(away.plan, uneven().cycles)
    assert min(shares.moved()) > 4
    for positions, page_size in (([[333]], 16), ([[70, 71], [5]], 1), ([[71]], 1), ([[i * 40] for i in range(8)], 16)):
        inputs, pools = make_case(SHAPE, positions, page_size, 5, "cpu")
        found = []
        for step in (home, away):
            own = copy_pools(pools)
            step.bind(own, page_size)
            step.logits_RV.fill_(float("nan"))
            step.stamps.zero_()
            logits = step.run(inputs, 1)
            step.check()
            assert int(step.stamps.max()) == 1
            rows = len(logits)
            assert int(step.stamps[step.exchange.numel() // 2 :].sum()) == rows * SHAPE.vocab
            kept = [logits, step.next_token_R[:rows], step.exchange, step.stamps]
            found.append([x.clone() for x in (*kept, *(pool for pair in own for pool in pair))])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert found[0][0].isfinite().all()


@emulated
def test_after_an_error_a_step_by_shares_ends(built: Callable[..., steps.DenseStep]) -> None:
    away = built(uneven())
    inputs, pools = make_case(SHAPE, [[70]], 16, 5, "cpu")
    away.bind(pools, 16)
    expected = away.run(inputs, 1).clone()
    away.state[1] = 1 + 3 * 16 + 5
    assert away.run(inputs, 1)[:, 0].isnan().all()
    away.reset()
    assert torch.equal(away.run(inputs, 1), expected)


@emulated
def test_paces_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every block reads its pages and says where it is and how long the first of them took."""
    ring, page, pages = 3, 1024, 11
    definitions = {"RING_PAGES": ring, "PAGE_BYTES": page, "BLOCKS": BLOCKS}
    library = machine.Machine(machine.build(machine.PACE, definitions, tmp_path))
    function = machine.EmulatedFunction(library, 0, 1, plans.WARPS * ring * (page + 8))
    weights = torch.zeros(pages * BLOCKS * plans.WARPS * page, dtype=torch.uint8)
    cycles_B2 = torch.full((BLOCKS, 2), -1, dtype=torch.int64)
    parameters = pacing._Pace(weights.data_ptr(), cycles_B2.data_ptr(), pages, 7, 1 << 31)
    function.launch(BLOCKS, pacing.THREADS, parameters, 1)
    assert bool((cycles_B2[:, 0] > 0).all())
    assert sorted(cycles_B2[:, 1].tolist()) == list(range(BLOCKS))
    assert ctypes.sizeof(parameters) == 32
