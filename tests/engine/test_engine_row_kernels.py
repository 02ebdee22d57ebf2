"""Which kernels an engine's decode steps get, told what each way takes: nothing here runs a kernel."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "models"))

from device_kit import EngineSize, make_runner
from family_kit import build, save_random

from lowlat.engine import row_kernels
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.triton_ops import EVERY, TritonOps
from lowlat.parallel.group import SingleRank
from lowlat.parallel.shard import Shard


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_random(folder, "Qwen3", head_dim=16)
    return make_runner(build(folder), EngineSize(pages=400, max_batch=4), ReferenceOps())[1]


class TwoRanks(SingleRank):
    """This rank, and one that found what it is told."""

    shard = Shard(0, 2)

    def __init__(self, other: list[float]) -> None:
        self.other = other

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.tensor(self.other)])


def chosen(runner, monkeypatch, ratios, *, width=1, ranks=None, result=1.0, told=None):
    """Switches of an engine in which the way with our kernels takes `ratios` of the other, chain by chain: those that
    are not 0. `told`: gets what is returned."""
    ops, seen = TritonOps(4), []

    def replayed(chain):
        seen.append(chain.of)
        turn = len(seen) - 1
        ours = turn % 2 == 1
        return [torch.tensor([result if ours else 1.0])], ratios[turn // 2 % len(ratios)] if ours else 1.0

    monkeypatch.setattr(row_kernels, "_compile", lambda *_: None)
    monkeypatch.setattr(row_kernels, "_replayed", replayed)
    where = (runner.kv, 4, width, ranks or SingleRank())
    found = row_kernels.choose_row_kernels(runner.model, ops, *where)
    if told is not None:
        told.update(found)
    return {name: most for name in row_kernels._NAMES if (most := getattr(ops, name))}, seen


def test_every_size_of_a_step_is_tried(runner, monkeypatch):
    _, seen = chosen(runner, monkeypatch, [0.5])
    # The model has 256 positions, the cache 800 tokens.
    tried = ["1 x 1 rows behind 255 tokens", "4 x 1 rows behind 199 tokens"]
    assert seen == [of for of in tried for _ in range(2)]


@pytest.mark.parametrize(
    ("ratios", "most"),
    # One request gains or loses, then four.
    [([0.8, 0.9], EVERY), ([0.8, 1.02], 1), ([0.8, 1.1], 1), ([1.01, 0.5], 0), ([1.1, 1.1], 0)],
)
def test_used_for_as_many_requests_as_gain(runner, monkeypatch, ratios, most):
    found, _ = chosen(runner, monkeypatch, ratios)
    assert found == ({"one_row_attention": most} if most else {})


@pytest.mark.parametrize(
    ("shortest", "longest", "most"), [(0.5, 1.08, EVERY), (0.5, 1.12, 0), (0.96, 1.03, EVERY), (0.96, 1.05, 0)]
)
def test_a_long_context_may_lose_a_tenth_and_less_than_a_short_one_gains(runner, monkeypatch, shortest, longest, most):
    monkeypatch.setattr(row_kernels, "_CONTEXT", 50)  # so that each number of requests is tried behind two lengths
    found, seen = chosen(runner, monkeypatch, [shortest, longest])
    assert len(seen) == 8 if most else 4
    assert found == ({"one_row_attention": most} if most else {})


def test_not_used_where_results_differ(runner, monkeypatch):
    assert chosen(runner, monkeypatch, [0.5], result=1.1)[0] == {}
    assert chosen(runner, monkeypatch, [0.5], result=float("nan"))[0] == {}


def test_several_rows_are_chosen_by_themselves(runner, monkeypatch):
    assert chosen(runner, monkeypatch, [0.5], width=3)[0] == {"one_row_attention": EVERY, "row_attention": EVERY}
    found, _ = chosen(runner, monkeypatch, [0.5, 0.5, 2.0, 0.5], width=3)
    assert found == {"one_row_attention": EVERY}


def test_what_was_chosen_and_why_is_told(runner, monkeypatch):
    told = {}
    chosen(runner, monkeypatch, [0.8, 1.02], told=told)
    assert told == {
        "row_products": "not tried",
        "row_heads": "not tried",
        "one_row_attention": "used for one request",
        "row_attention": "not tried",
        "one_row_attention, 1 x 1 rows behind 255 tokens": "1000000 us without, 800000 us with",
        "one_row_attention, 4 x 1 rows behind 199 tokens": "1000000 us without, 1020000 us with",
    }


def test_a_rank_tells_what_all_chose(runner, monkeypatch):
    told = {}
    chosen(runner, monkeypatch, [0.5], ranks=TwoRanks([0.0, 0.0, 0.0, 0.0]), result=1.1, told=told)
    assert told["one_row_attention"] == "not used"
    assert told["one_row_attention, 1 x 1 rows behind 255 tokens"].endswith(", but the result differs")
    told = {}
    chosen(runner, monkeypatch, [0.5], ranks=TwoRanks([0.0, 0.0, 1.0, 0.0]), told=told)
    assert told["one_row_attention"] == "used for one request"


def test_ranks_choose_the_same(runner, monkeypatch):
    both, one = TwoRanks([0.0, 0.0, 1.0, 0.0]), TwoRanks([0.0, 0.0, 0.0, 1.0])
    assert chosen(runner, monkeypatch, [0.5], ranks=both)[0] == {"one_row_attention": 1}
    assert chosen(runner, monkeypatch, [0.5], ranks=one)[0] == {}
    assert chosen(runner, monkeypatch, [2.0], ranks=both)[0] == {}


def test_a_rank_that_fails_still_answers_the_others(runner, monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(row_kernels, "attention_chains", broken)
    told = {}
    assert chosen(runner, monkeypatch, [0.5], ranks=TwoRanks([0.0, 0.0, 1.0, 0.0]), told=told)[0] == {}
    assert told["error"] == "no compiler"


@pytest.mark.parametrize("width", [1, 3])
def test_what_is_tried_is_a_step(runner, width):
    """Requests read what was put into the cache for them, and write beside it."""
    groups = row_kernels.attention_chains(runner.model, runner.kv, 4, width)
    chains = list(itertools.chain(*groups))
    assert len(groups) == 2
    for chain in chains:
        pool = runner.kv.values[-1]
        before = pool.clone()
        result, written = chain.run(), chain.written()
        assert result.isfinite().all()
        assert written.isfinite().all()
        changed = (before != pool).flatten(1).any(1) & before.isfinite().flatten(1).all(1)
        assert int(changed.sum()) == result.shape[1], "another row than the new ones was written"


def test_attention_is_timed_between_its_products(runner, monkeypatch):
    """As in a step: programs that start while a product still runs have what it leaves of the processors."""
    calls = []

    def product(ops, x_RI, linear, *rest):
        calls.append(linear)
        return plain_product(ops, x_RI, linear, *rest)

    def attention(*given):
        calls.append("attention")
        return plain_attention(*given)

    plain_product, plain_attention = ReferenceOps.product, ReferenceOps.rope_attend
    monkeypatch.setattr(ReferenceOps, "product", product)
    monkeypatch.setattr(ReferenceOps, "rope_attend", attention)
    chain = row_kernels.attention_chains(runner.model, runner.kv, 1, 1)[0][0]
    result = chain.run()
    layers = runner.model.decoder.layers
    assert calls == [call for layer in layers for call in (layer.qkv, "attention", layer.output)]
    assert torch.equal(chain.run(), result), "what is compared depends on the products"
