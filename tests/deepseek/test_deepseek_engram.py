"""Engram's hashes over chunks and image spans, its gate, and what a rank reads of the weights."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dsv4_layers as reference
import msgspec
import numpy as np
import pytest
import torch
from deepseek_kit import Runner, load, open_folder, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.layers import engram as ops
from lowlat.layers.deepseek_numerics import Numerics, PlainWeight
from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.config import DeepseekConfig, read_deepseek_config
from lowlat.models.deepseek_v4.engram import layer_hashes, step_history
from lowlat.models.deepseek_v4.engram_tables import column_part, read_part
from lowlat.models.deepseek_v4.presets import preset
from lowlat.models.deepseek_v4.step import RequestRows, StateSegment, make_step
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import SingleRank
from lowlat.parallel.shard import Shard

IMAGE = 198


def tiny() -> DeepseekConfig:
    return read_deepseek_config(preset("tiny-v41"))


def test_constants_of_the_published_model() -> None:
    config = read_deepseek_config(preset("v41-flash"))
    hashes = layer_hashes(config)
    assert [h.rows for h in hashes.values()] == list(config.engram_num_embeddings)
    assert (hashes[1].primes[0], hashes[1].primes[-1]) == (16000057, 16000463)
    assert hashes[14].multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert hashes[1].multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.sampled_from([0, 1, 2, 5, 77, 150, IMAGE]), min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 9), max_size=12),
    drafts=st.lists(st.integers(0, 4), max_size=12),
    folded=st.booleans(),
)
def test_rows_over_chunks_images_and_rejected_drafts(
    tokens: list[int], cuts: list[int], drafts: list[int], folded: bool
) -> None:
    """Whatever the chunks, and whatever rejected drafts came between, rows are those of the whole sequence."""
    config = tiny()
    token_map = torch.arange(200) % (90 if folded else 200)
    caches = DeepseekCaches(config, Numerics.make(True, 32), pages=2, page_size=16, states=2)
    caches.history.values_SWD.fill_(9)
    slots = torch.arange(32)
    parts, start = [], 0
    for index, size in enumerate([*cuts, len(tokens)]):
        end = min(len(tokens), start + size)
        rejected = [7, IMAGE, 3, 4][: drafts[index] if index < len(drafts) else 0]
        step = make_step([RequestRows(tokens[start:end] + rejected, start, 1, torch.cat([slots, slots]))])
        segments = [segment for segment in step.segments if isinstance(segment, StateSegment)]
        if end > start:
            history = step_history(step.tokens_R, segments, caches, config, token_map)
            parts.append(history[: end - start])
        start = end
    history = torch.cat(parts)
    for layer, constants in layer_hashes(config).items():
        expected = reference.engram_rows(
            tokens,
            token_map.numpy(),
            list(constants.primes),
            list(constants.multipliers),
            msgspec.structs.asdict(config),
            IMAGE,
        )
        np.testing.assert_array_equal(ops.hash_rows(history, constants).numpy(), expected, err_msg=f"layer {layer}")
        assert expected.min() >= 0
        assert expected.max() < constants.rows


def test_the_history_must_be_long_enough() -> None:
    with pytest.raises(ValueError, match="too few"):
        ops.lookback(torch.tensor([4, 5]), 3, 2, torch.arange(10), size=4, pad=2, image=None)


def test_the_gate() -> None:
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(7, 4, 64, dtype=torch.float64, generator=generator)
    e = torch.randn(7, 96, dtype=torch.float64, generator=generator)
    wkv = torch.randn(5 * 64, 96, dtype=torch.float64, generator=generator) / 10
    q, k = torch.randn(2, 4, 64, dtype=torch.float64, generator=generator)
    wkv = wkv.float().double()
    weights = ops.EngramWeights(PlainWeight(wkv), q * k)
    numerics = Numerics.make(False, 32, torch.float64)
    expected = reference.engram_update(
        streams.numpy(), e.numpy(), wkv.numpy(), q.numpy(), k.numpy(), 1e-20, reference.Store(False, 32)
    )
    updated = ops.update(streams, e, weights, 1e-20, numerics)
    np.testing.assert_allclose(updated.numpy(), expected, atol=1e-12)
    assert torch.equal(ops.update(streams, e * 0, weights, 1e-20, numerics), streams), "no memory, no change"


def test_candidates_that_cover_everything_equal_full_scoring(tiny_v41: Path) -> None:
    """In the model: with blocks for every position the late index layer selects as if there were no candidates."""
    tokens = some_tokens(70, seed=41)
    model = load(tiny_v41)
    pruned = Runner(model).prefill(0, tokens)
    outcomes = []
    for changes in ({"candidate_topk_blocks": 18}, {"candidate_source_layer_id": -1}):
        config = msgspec.structs.replace(model.config, **changes)
        for layer in model.layers:
            layer.attention.config = config
        outcomes.append(Runner(model).prefill(0, tokens))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], pruned), "with three blocks the candidates must leave something out"


class CountingWeights(Weights):
    """Remembers which weights were read, and how many bytes."""

    total = 0

    def raw(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        tensor = super().raw(name, rows=rows, columns=columns)
        self.total += tensor.numel() * tensor.element_size()
        return tensor


class OneOf(SingleRank):
    """A rank that never talks: enough to read its part."""

    def __init__(self, rank: int, size: int) -> None:
        self.shard = Shard(rank, size)


def test_a_rank_reads_its_part_only(tiny_v41: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowlat.models.deepseek_v4 import model as model_module

    readers: list[CountingWeights] = []

    def make(*arguments: object) -> CountingWeights:
        readers.append(CountingWeights(*arguments))  # type: ignore[arg-type]
        return readers[-1]

    monkeypatch.setattr(model_module, "Weights", make)
    size = open_folder(tiny_v41).weight_bytes()
    seen: list[tuple[int, int]] = []
    for ranks in (1, 4):
        for rank in range(ranks):
            model = model_module.DeepseekV4(
                open_folder(tiny_v41), OneOf(rank, ranks), progress=lambda done, total: seen.append((done, total))
            )
            assert model.layers[0].feed_forward.experts[0].gate.shape == (128 // ranks, 256)
    whole, parts = readers[0].total, [reader.total for reader in readers[1:]]
    assert 0.9 * size < whole < 1.02 * size
    experts = 6 * 9 + 3 * 5
    expert_bytes = experts * 3 * 128 * 256 * (0.5 + 1 / 32)
    assert max(parts) < whole - 0.7 * expert_bytes, "experts, heads and tables must be cut"
    assert seen[-1][0] <= seen[-1][1] == size


def test_table_parts_are_read_in_pieces(tiny_v41: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowlat.models.deepseek_v4 import engram_tables

    checkpoint = open_folder(tiny_v41)
    config = read_deepseek_config(checkpoint.config)
    weights = Weights(checkpoint, config, Numerics.make(True, 32))
    constants = layer_hashes(config)[1]
    whole = read_part(weights, "layers.1.engram.embed", slice(0, constants.rows))
    monkeypatch.setattr(engram_tables, "_CHUNK_ROWS", 100)
    parts = []
    for rank in range(3):
        parts.append(read_part(weights, "layers.1.engram.embed", column_part(constants, Shard(rank, 3))[1]))
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == (2914, 33)


@pytest.mark.parametrize("placement", ["shards", "peer", "host"])
def test_look_ups_start_before_the_first_layer_and_end_at_theirs(
    tiny_v41: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """Nothing but tokens is needed: a look-up that is not done yet holds up its own layer only."""
    model = load(tiny_v41, engram=placement)
    tokens = some_tokens(20, seed=43)
    expected = Runner(model).prefill(0, tokens)
    events: list[str] = []
    release = threading.Event()
    for layer, engram in model.engrams.items():

        def start(ids: torch.Tensor, table: Any = engram.table, layer: int = layer) -> Any:
            started = table.start(ids)
            events.append(f"start {layer}")

            def wait() -> torch.Tensor:
                events.append(f"wait {layer}")
                assert release.is_set(), "layers before the look-up's own must not wait for it"
                return started()

            return wait

        engram.table = SimpleNamespace(start=start)
    for index, layer in enumerate(model.layers):

        def forward(*given: Any, attention: Any = layer.attention, index: int = index) -> torch.Tensor:
            events.append(f"layer {index}")
            release.set()
            return type(attention).forward(attention, *given)

        monkeypatch.setattr(layer.attention, "forward", forward)
    assert torch.equal(Runner(model).prefill(0, tokens), expected)
    ran = ["start 1", "start 2", "layer 0", "wait 1", "layer 1", "wait 2", "layer 2", "layer 3", "layer 4", "layer 5"]
    assert events == ran
