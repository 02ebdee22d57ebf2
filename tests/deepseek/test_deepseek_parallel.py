"""Tensor parallel 1, 2 and 4 over gloo, and the three placements of Engram's tables."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from deepseek_ranks import main
from dsv4_weights import read_raw
from safetensors.torch import load_file

from lowlat.models.deepseek_v4.engram_tables import choose_placement

SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def runs(tiny_v41: Path, tiny_v4: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict]]:
    """Every rank's results for each size of the group."""
    folder = tmp_path_factory.mktemp("ranks")
    # Ranks are forked from a process that imported everything once: imports would take most of the time.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["safetensors.torch", "lowlat.models.deepseek_v4.model", "torch.distributed"])
    found = {}
    for size in SIZES:
        paths = (str(tiny_v41), str(tiny_v4), str(folder))
        ranks = [context.Process(target=main, args=(rank, size, *paths)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=600)
            assert rank.exitcode == 0, [path.read_text()[-2000:] for path in folder.glob("error.*")]
        found[size] = [load_file(str(folder / f"{size}.{rank}")) for rank in range(size)]
    return found


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_with_one_rank(runs: dict[int, list[dict]], size: int) -> None:
    alone = runs[1][0]
    for rank in runs[size]:
        for name in ("v41.shards", "v41.shards.confidence"):
            assert torch.equal(rank[name], alone[name]), f"{name} on {size} ranks"
        for name in ("v41.peer", "v41.host"):
            assert torch.equal(rank[name], alone["v41.shards"][: len(rank[name])]), f"{name} on {size} ranks"
        for name in ("v41.plain", "v4.plain"):
            torch.testing.assert_close(rank[name], alone[name], atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layer", [1, 2])
def test_placements_give_the_same_bytes(runs: dict[int, list[dict]], size: int, layer: int) -> None:
    expected = runs[1][0][f"{layer}.host"]
    assert expected.shape[0] * expected.shape[1] >= 100_000
    for rank in runs[size]:
        for placement in ("host", "shards", "peer"):
            assert torch.equal(rank[f"{layer}.{placement}"], expected), f"{placement} on {size} ranks"


def test_the_host_table_is_the_files_bytes(runs: dict[int, list[dict]], tiny_v41: Path) -> None:
    raw = read_raw(tiny_v41)
    found = runs[1][0]["1.host"]
    primes = [211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271]
    values = torch.from_numpy(raw["layers.1.engram.embed.weight"][1].copy())
    scales = torch.from_numpy(raw["layers.1.engram.embed.scale"][1].copy())
    start = 0
    for column, prime in enumerate(primes):
        for row, place in ((0, 0), (1, prime - 1)):
            expected = torch.cat([values[start + place], scales[start + place]])
            assert torch.equal(found[row, column], expected)
        start += prime


def test_placement_follows_the_flag_and_the_memory() -> None:
    assert choose_placement("auto", 189 << 30, 4, 60 << 30) == "shards"
    assert choose_placement("auto", 189 << 30, 4, 40 << 30) == "host"
    assert choose_placement("peer", 189 << 30, 4, 0) == "peer"
