"""Bounded replay: what stays equal to the exact mode, what differs, and by how much it may.

A row of the tiny model's layer l reads windows of 16: what a dropped row changes moves up 15 rows a layer. So with
15 rows for each affected layer kept before them, rows are exact, bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deepseek_kit import Runner, load, some_tokens

from lowlat.models.deepseek_v4.dspark import DraftRequest
from lowlat.models.deepseek_v4.model import DeepseekV4
from lowlat.models.deepseek_v4.step import make_step

REACH = 15
TAIL_LAYERS = 3


@pytest.fixture(scope="module")
def exact(tiny_v41: Path) -> DeepseekV4:
    return load(tiny_v41)


def last_row(runner: Runner, state: int, tokens: list[int], start: int = 0) -> torch.Tensor:
    return runner.run(runner.rows(state, tokens, start), all_logits=False)[0]


def entries_of(runner: Runner, slots: torch.Tensor) -> list[torch.Tensor]:
    """Compressed entries and index keys of tokens in `slots`, of both sources."""
    half = torch.div(slots[::2], 2, rounding_mode="floor")
    caches = (runner.caches.main, runner.caches.keys)
    return [cache[layer].read(at) for cache in caches for layer, at in ((1, half), (3, slots))]


@pytest.mark.parametrize("length", [90, 91])
def test_decoder_replay_keeps_the_sources_caches_and_differs_as_predicted(
    tiny_v41: Path, exact: DeepseekV4, length: int
) -> None:
    tokens = some_tokens(length, seed=31)
    full = Runner(exact)
    expected = full.prefill(0, tokens)
    short = Runner(load(tiny_v41, replay_tail=16))
    logits = last_row(short, 0, tokens)
    for layer in (1, 3):
        for ours, theirs in ((short.caches.main, full.caches.main), (short.caches.keys, full.caches.keys)):
            assert torch.equal(ours[layer].bytes_PB, theirs[layer].bytes_PB), f"entries of layer {layer}"
    for layer in range(3):
        mine, other = (r.caches.windows[layer].read(0, length - 16, length) for r in (short, full))
        assert torch.equal(mine, other), f"window of layer {layer}, before the tail begins"
    # Layer 3's window entries come from its input, which every row has in full.
    mine, other = (r.caches.windows[3].read(0, length - 16, length) for r in (short, full))
    assert torch.equal(mine, other)
    difference = float((logits - expected[-1]).abs().max())
    assert 0 < difference < 10, "a short tail is not exact, and the test must see it"
    # Decoding goes on from there.
    last_row(short, 0, [5], length)


def test_decoder_replay_is_exact_for_rows_that_kept_rows_cover(tiny_v41: Path, exact: DeepseekV4) -> None:
    tokens = some_tokens(120, seed=32)
    expected = Runner(exact).prefill(0, tokens)
    tail = REACH * TAIL_LAYERS + 4
    runner = Runner(load(tiny_v41, replay_tail=tail))
    step = make_step([runner.rows(1, tokens, 0)])
    step.sample_rows = torch.arange(120 - tail, 120)
    logits = runner.model.compute(step, runner.caches)
    assert torch.equal(logits[-4:], expected[-4:])
    assert not torch.equal(logits[0], expected[120 - tail]), "the first kept row lacks its predecessors"


def test_decoder_replay_of_chunks_no_longer_than_the_tail_is_exact(tiny_v41: Path, exact: DeepseekV4) -> None:
    tokens = some_tokens(70, seed=33)
    expected = Runner(exact).prefill(0, tokens)
    runner = Runner(load(tiny_v41, replay_tail=16))
    assert torch.equal(runner.prefill(0, tokens, [16, 16, 3, 16, 1, 16]), expected)


def test_decoder_replay_is_off_for_a_segment_whose_logits_are_wanted(tiny_v41: Path, exact: DeepseekV4) -> None:
    """Log-probabilities of a prompt are those of the exact mode; a segment beside it still drops rows."""
    tokens = some_tokens(60, seed=35)
    expected = Runner(exact).prefill(0, tokens)
    runner = Runner(load(tiny_v41, replay_tail=16))
    assert torch.equal(runner.run(runner.rows(0, tokens, 0)), expected)
    step = make_step([runner.rows(1, tokens, 0), runner.rows(2, tokens, 0)])
    step.sample_rows = torch.tensor([*range(60), 119])
    logits = runner.model.compute(step, runner.caches)
    assert torch.equal(logits[:60], expected)
    assert not torch.equal(logits[60], expected[59])


@pytest.mark.parametrize("prefix", [48, 100])
def test_encoder_replay_rebuilds_windows_without_touching_entries(exact: DeepseekV4, prefix: int) -> None:
    """A hit without a snapshot: the last cached tokens run again; exact once they reach back far enough."""
    tokens = some_tokens(prefix + 12, seed=34)
    expected = Runner(exact).prefill(0, tokens)
    reach = REACH * exact.config.num_hidden_layers
    outcomes = {}
    for replayed in (16, reach):
        runner = Runner(exact, seed=9)
        runner.prefill(0, tokens[:prefix])
        shared = runner.slots[0][:prefix]
        runner.slots[2] = torch.cat([shared, runner.slots[2][prefix:]])
        before = entries_of(runner, shared)
        start = max(0, prefix - replayed)
        runner.caches.begin_replay(2, start, tokens[:start])
        rows = runner.rows(2, tokens[start:], start, floor=start, write_from=prefix)
        outcomes[replayed] = runner.run(rows)[prefix - start :]
        after = entries_of(runner, shared)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "cached entries must not change"
        assert int(runner.caches.draft_floor_S[2]) == prefix, "the draft must only see genuine rows"
        assert exact.draft is not None
        exact.draft.propose([DraftRequest(3, len(tokens), 2)], runner.caches)
    assert torch.equal(outcomes[reach], expected[prefix:])
    assert not torch.equal(outcomes[16], expected[prefix:])


def test_replay_needs_the_tokens_before_it(exact: DeepseekV4) -> None:
    runner = Runner(exact)
    with pytest.raises(ValueError, match="3 tokens before position 20"):
        runner.caches.begin_replay(0, 20, [4, 5])
