"""One rank of a tensor-parallel run: `deepseek_ranks.py RANK SIZE RENDEZVOUS V41 V4 OUT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))

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


def results(v41: Path, v4: Path, communicator: Communicator, shared: Path) -> dict[str, torch.Tensor]:
    """What every rank computes; the same at every size of the group."""
    out = {}
    tokens = some_tokens(46, seed=21)
    for placement in ("shards", "peer", "host"):
        model = load(v41, communicator, engram=placement, shared_memory=str(shared))
        runner = Runner(model)
        first = runner.prefill(0, tokens[:40], [17])
        verified = runner.run(runner.rows(0, tokens[40:], 40))
        assert model.draft is not None
        proposals = model.draft.propose([DraftRequest(5, 46, 0)], runner.caches)
        out[f"v41.{placement}"] = torch.cat([first, verified, proposals.logits[0]])
        out[f"v41.{placement}.confidence"] = proposals.confidence
    out["v41.plain"] = Runner(load(v41, communicator, quantised=False)).prefill(0, tokens)
    out["v4.plain"] = Runner(load(v4, communicator, quantised=False)).prefill(0, tokens)
    return out


def table_bytes(v41: Path, communicator: Communicator, shared: Path) -> dict[str, torch.Tensor]:
    """Bytes of 10^5 random ids, and of each column's first and last row, from every placement."""
    checkpoint = open_folder(v41)
    config = read_deepseek_config(checkpoint.config)
    weights = Weights(checkpoint, config, Numerics.make(True, 32))
    out = {}
    for layer, constants in layer_hashes(config).items():
        name = f"layers.{layer}.engram.embed"
        part = read_part(weights, name, column_part(constants, communicator.shard)[1])
        ids = _ids(constants)
        out[f"{layer}.host"] = HostTable.open(weights, name).rows(ids)
        out[f"{layer}.shards"] = ShardedTable(part, constants, communicator).rows(ids)
        PeerTable.publish(part, shared / f"test.{layer}.{communicator.shard.rank}")
        communicator.all_reduce(torch.ones(1))
        parts = [
            PeerTable.map_part(shared / f"test.{layer}.{rank}", part.shape[1])
            for rank in range(communicator.shard.size)
        ]
        out[f"{layer}.peer"] = PeerTable(parts, constants).rows(ids)
    return out


def _ids(constants: EngramHash) -> torch.Tensor:
    generator = torch.Generator().manual_seed(constants.rows)
    columns = []
    for prime, offset in zip(constants.primes, constants.offsets, strict=True):
        random = torch.randint(0, prime, (100_000 // len(constants.primes) + 1,), generator=generator)
        columns.append(torch.cat([torch.tensor([0, prime - 1]), random]) + offset)
    return torch.stack(columns, 1)


def main(rank: int, size: int, rendezvous: str, v41: str, v4: str, out: str) -> None:
    torch.set_num_threads(1)
    communicator: Communicator = SingleRank() if size == 1 else TorchGroup(Shard(rank, size), rendezvous)
    shared = Path(out) / f"shared.{size}"
    shared.mkdir(exist_ok=True)
    found = results(Path(v41), Path(v4), communicator, shared) | table_bytes(Path(v41), communicator, shared)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, str(Path(out) / f"{size}.{rank}"))
    if isinstance(communicator, TorchGroup):
        # A rank that leaves while another still exchanges would break it off: all must be done first.
        (Path(out) / f"done.{size}.{rank}").touch()
        while not all((Path(out) / f"done.{size}.{other}").exists() for other in range(size)):
            time.sleep(0.01)
        communicator.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:7])
