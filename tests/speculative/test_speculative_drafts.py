"""Block drafts against the plain reference, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_reference import Reference
from safetensors.torch import load_file, save_file
from spec_kit import VOCABULARY, draft_config, random_network

from lowlat.cache.layout import KVPool
from lowlat.layers.step import Segment, StepInputs
from lowlat.speculative import dflash
from lowlat.speculative.dflash import BlockProposer, draft_layout
from lowlat.speculative.draft_files import (
    DraftFileError,
    default_taps,
    from_json,
    load_draft,
    save_draft,
    to_json,
)
from lowlat.speculative.proposer import DraftRequest

PAGE = 4


class Tables:
    """Two requests: one on neighbouring pages, one on scattered ones."""

    def __init__(self) -> None:
        pages = [[3, 4, 5, 6, 7, 8], [1, 15, 2, 12, 0, 10]]
        self.slots = [torch.tensor([page * PAGE + offset for page in of for offset in range(PAGE)]) for of in pages]

    def segment(self, slot: int, rows: range, length: int) -> Segment:
        return Segment(rows.start, len(rows), length, self.slots[slot][:length], 12 if slot == 0 else -1, slot)

    def write_slots(self, slot: int, start: int, count: int) -> np.ndarray:
        return self.slots[slot][start : start + count].numpy()


@pytest.mark.parametrize(("window", "waiting"), [(0, 64), (6, 64), (6, 8)])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_guesses_are_the_references(kind: str, window: int, waiting: int, monkeypatch: pytest.MonkeyPatch):
    """Contexts come in uneven chunks with wrong rows that are overwritten, in memory that is used again; two requests
    are drafted at once."""
    monkeypatch.setattr(dflash, "_MOST_WAITING", waiting)
    config = draft_config(kind, sliding_window=window, output_multiplier=1.5, final_logit_softcapping=9.0)
    network = random_network(config, seed=3).double()
    reference = Reference(config, {name: weight.numpy() for name, weight in network.state_dict().items()})
    generator = torch.Generator().manual_seed(5)
    embedding, head = (torch.randn(VOCABULARY, 64, generator=generator).double() for _ in range(2))
    pool = KVPool(draft_layout(network, 16, PAGE), torch.device("cpu"))
    pool.keys, pool.values = ([of.double().fill_(float("nan")) for of in side] for side in (pool.keys, pool.values))
    tables = Tables()
    proposer = BlockProposer(network, pool, tables, embedding.__getitem__, lambda x: x @ head.T)
    lengths = (17, 9)
    features = [torch.randn(length, 128, generator=generator).double() for length in lengths]
    for slot, length in enumerate(lengths):
        for start, end, noise in ((0, 5, 0), (5, 9, 1), (5, length, 0)):
            rows = features[slot][start:end] + noise
            count = len(rows)
            step = StepInputs(
                torch.zeros(count + 2, dtype=torch.int64),
                torch.tensor([*range(start, end), 0, 0]),
                torch.from_numpy(tables.write_slots(slot, start, count)),
                count,
                [],
                [],
                torch.empty(0),
            )
            given = torch.cat([rows, torch.full((2, 128), 9.0).double()])
            proposer.extend(given, step)
            given.fill_(float("nan"))
    found = proposer.propose([DraftRequest(7, 17, 0), DraftRequest(30, 9, 1)])
    for slot, (anchor, length) in enumerate(((7, 17), (30, 9))):
        block = embedding[[anchor] + [config.mask_token_id] * 4].numpy()
        h = reference.block(features[slot].numpy(), block, length)
        tokens, confidence = reference.guesses(h, head.numpy(), anchor)
        assert found[slot].tokens == tokens
        assert len(tokens) == config.proposals == (5 if kind == "dspark" else 4)
        assert found[slot].chances == (pytest.approx(confidence, abs=1e-6) if kind == "dspark" else None)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_files_hold_a_draft_as_it_is_or_in_a_quarter(tmp_path: Path, kind: str):
    config = draft_config(kind)
    weights = random_network(config, 1).state_dict()
    save_draft(tmp_path / "whole", config, weights)
    save_draft(tmp_path / "small", config, weights, int8=True)
    again, same = load_draft(tmp_path / "whole")
    assert again == config
    assert same.keys() == weights.keys()
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())
    again, close = load_draft(tmp_path / "small")
    assert again == config
    for name, weight in weights.items():
        if weight.dim() == 2:
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((close[name] - weight).abs() <= 0.501 * step).all()
        else:
            assert torch.equal(close[name], weight)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("whole", "small")]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no draft"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": "x"}, "head_dim"),
        ({"dflash_config": {"target_layer_ids": [9]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 0]}}, r"target_layer_ids \[0, 0\] are not in rising order"),
        ({"dflash_config": {"target_layer_ids": [2, 0]}}, r"target_layer_ids \[2, 0\] are not in rising order"),
        ({"hidden_size": None}, "hidden_size"),
        ({"sliding_window": -1}, "sliding_window is below 0"),
        ({"architectures": 5}, "architectures must be a list"),
    ],
)
def test_a_config_that_is_none_is_refused(change: dict, message: str):
    data = json.loads(json.dumps(to_json(draft_config("dspark"))))
    inner = data["dflash_config"] | change.pop("dflash_config", {})
    with pytest.raises(DraftFileError, match=message):
        from_json(data | {"dflash_config": inner} | change)
    with pytest.raises(DraftFileError, match="dflash_config an object"):
        from_json(data | {"dflash_config": [inner]})
    assert from_json(data) == draft_config("dspark")


@pytest.mark.parametrize("scale", [torch.tensor(1.0), torch.ones(3), torch.ones(64, 1)])
def test_scales_that_are_not_one_a_row_are_refused(tmp_path: Path, scale: torch.Tensor):
    config = draft_config("dspark")
    weights = random_network(config, seed=1).state_dict()
    save_draft(tmp_path, config, weights, int8=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight_scale"].shape == (64,)
    save_file(stored | {"fc.weight_scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(DraftFileError, match=r"fc\.weight_scale must hold one number for each row of fc\.weight$"):
        load_draft(tmp_path)


def test_taps_are_spread_over_the_target():
    assert default_taps(30, 1) == (15,)
    assert default_taps(30, 3) == (1, 14, 27)
    assert default_taps(61, 5) == (1, 15, 30, 44, 58)
    assert default_taps(2, 3) == (0, 1)
