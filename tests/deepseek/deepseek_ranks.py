"""One rank of a tensor-parallel run; `main` is the body of its process."""

from __future__ import annotations

import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from deepseek_kit import Runner, load, open_folder, some_tokens
from safetensors.torch import save_file

from lowlat.layers.deepseek_numerics import Numerics
from lowlat.layers.engram import EngramHash
from lowlat.models.deepseek_v4.config import read_deepseek_config
from lowlat.models.deepseek_v4.dspark import DraftRequest
from lowlat.models.deepseek_v4.engram import layer_hashes
from lowlat.models.deepseek_v4.engram_tables import HostTable, PeerTable, ShardedTable, column_part, read_part
from lowlat.models.deepseek_v4.weights import Weights
from lowlat.parallel.group import Communicator, SingleRank, TorchGroup
from lowlat.parallel.shard import Shard
from lowlat.parallel.shared_parts import share_parts


def results(v41: Path, v4: Path, communicator: Communicator) -> dict[str, torch.Tensor]:
    """What every rank computes; the same at every size of the group."""
    out = {}
    tokens = some_tokens(46, seed=21)
    for placement in ("peer", "host"):
        # A row's bits do not depend on how many rows there are: a few suffice.
        out[f"v41.{placement}"] = Runner(load(v41, communicator, engram=placement)).prefill(0, tokens[:9])
    model = load(v41, communicator, engram="shards")
    runner = Runner(model)
    first = runner.prefill(0, tokens[:40], [17])
    verified = runner.run(runner.rows(0, tokens[40:], 40))
    assert model.draft is not None
    proposals = model.draft.propose([DraftRequest(5, 46, 0)], runner.caches)
    out["v41.shards"] = torch.cat([first, verified, proposals.logits[0]])
    out["v41.shards.confidence"] = proposals.confidence
    out["v41.plain"] = Runner(load(v41, communicator, quantised=False)).prefill(0, tokens)
    out["v4.plain"] = Runner(load(v4, communicator, quantised=False)).prefill(0, tokens)
    return out


def table_bytes(v41: Path, communicator: Communicator) -> dict[str, torch.Tensor]:
    """Bytes of 10^5 random ids, and of each column's first and last row, from every placement."""
    checkpoint = open_folder(v41)
    config = read_deepseek_config(checkpoint.config)
    weights = Weights(checkpoint, config, Numerics.make(True, 32))
    reader = ThreadPoolExecutor(1)
    out = {}
    for layer, constants in layer_hashes(config).items():
        name = f"layers.{layer}.engram.embed"
        part = read_part(weights, name, column_part(constants, communicator.shard)[1])
        ids = _ids(constants)
        parts = share_parts(communicator, len(part), part.shape[1], lambda shared, own=part: shared.copy_(own))
        tables = {
            "host": HostTable.open(weights, name, reader),
            "shards": ShardedTable(part, constants, communicator),
            "peer": PeerTable(parts, constants, reader),
        }
        started = {placement: table.start(ids) for placement, table in tables.items()}
        out |= {f"{layer}.{placement}": look_up() for placement, look_up in started.items()}
    return out


def _ids(constants: EngramHash) -> torch.Tensor:
    generator = torch.Generator().manual_seed(constants.rows)
    columns = []
    for prime, offset in zip(constants.primes, constants.offsets, strict=True):
        random = torch.randint(0, prime, (100_000 // len(constants.primes) + 1,), generator=generator)
        columns.append(torch.cat([torch.tensor([0, prime - 1]), random]) + offset)
    return torch.stack(columns, 1)


def main(rank: int, size: int, v41: str, v4: str, out: str) -> None:
    """Leaves OUT/SIZE.RANK with the results, or OUT/error.SIZE.RANK."""
    try:
        _run(rank, size, str(Path(out) / f"rendezvous.{size}"), v41, v4, out)
    except BaseException:
        (Path(out) / f"error.{size}.{rank}").write_text(traceback.format_exc())
        sys.exit(1)


def _run(rank: int, size: int, rendezvous: str, v41: str, v4: str, out: str) -> None:
    torch.set_num_threads(1)
    communicator: Communicator = SingleRank() if size == 1 else TorchGroup(Shard(rank, size), rendezvous, timeout_s=600)
    found = results(Path(v41), Path(v4), communicator) | table_bytes(Path(v41), communicator)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, str(Path(out) / f"{size}.{rank}"))
    if isinstance(communicator, TorchGroup):
        # A rank that leaves while another still exchanges would break it off: all must be done first.
        (Path(out) / f"done.{size}.{rank}").touch()
        while not all((Path(out) / f"done.{size}.{other}").exists() for other in range(size)):
            time.sleep(0.01)
        communicator.close()
