"""One rank of a check of `PushSums`: sums eager and replayed, beside exact ones; then a rank that does not come.

    python push_rank.py RANK RANKS FOLDER [GPUS]

`GPUS`: how many the ranks share, fewer than they are: a GPU takes turns between its ranks, which is right, but slow.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from lowlat.layers.push_sums import PushSums
from lowlat.layers.row_sums import CommunicatorSums, RankLostError
from lowlat.layers.triton_ops import TritonOps
from lowlat.parallel import peer_memory
from lowlat.parallel.group import TorchGroup
from lowlat.parallel.shard import Shard

EPS = 1e-6
DEADLINE_S = 3.0


def exact(parts: list[torch.Tensor], residual: torch.Tensor) -> torch.Tensor:
    """Sum in the order of ranks in float32, rounded, added, rounded."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.bfloat16() + residual


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), EPS).bfloat16()


class Check:
    """The checks of one rank, for rows of one width."""

    def __init__(self, group: TorchGroup, device: torch.device, width: int) -> None:
        self.group, self.device, self.width = group, device, width
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        others = CommunicatorSums(group, TritonOps(processors))
        self.sums = PushSums(group, others, width, torch.bfloat16, device)

    def draw(self, rows: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Every rank's rows, the residual stream and a norm's weight: the same on all ranks."""
        torch.manual_seed(seed)
        parts = [torch.randn(rows, self.width).bfloat16() for _ in range(self.group.shard.size)]
        return parts, torch.randn(rows, self.width).bfloat16(), torch.randn(self.width).bfloat16()

    def eager(self, rows: int, seed: int) -> None:
        """One reduction."""
        parts, residual, weight = self.draw(rows, seed)
        mine, stream = parts[self.group.shard.rank].to(self.device), residual.to(self.device)
        out = self.sums.reduce_add_norm(mine, stream, weight.to(self.device), EPS)
        total = exact(parts, residual)
        assert torch.equal(stream.cpu(), total), f"{rows} rows, seed {seed}"
        torch.testing.assert_close(out.cpu().float(), normed(total, weight).float(), rtol=0.01, atol=0.01)
        self.sums.check()

    def replayed(self, rows: int, replays: int) -> None:
        """Three reductions in a graph, replayed."""
        parts, residual, weight = self.draw(rows, 99)
        mine, stream, weight = (tensor.to(self.device) for tensor in (parts[self.group.shard.rank], residual, weight))
        self.sums.reduce_add_norm(mine, stream.clone(), weight, EPS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(3):
                out = self.sums.reduce_add_norm(mine, stream, weight, EPS)
        for _ in range(replays):
            graph.replay()
        total = residual
        for _ in range(3 * replays):
            total = exact(parts, total)
        assert torch.equal(stream.cpu(), total)
        torch.testing.assert_close(out.cpu().float(), normed(total, weight.cpu()).float(), rtol=0.01, atol=0.01)
        self.sums.check()

    def picks(self, rows: int, columns: int) -> None:
        """Tokens, eager and replayed, beside argmax of all columns."""
        shard = self.group.shard
        newest = torch.full((rows + 1,), 77, device=self.device)
        slots = torch.arange(rows, device=self.device)
        mine = torch.zeros(rows, columns, device=self.device)

        def pick() -> torch.Tensor:
            return self.sums.pick(mine, shard.rank * columns, slots, newest)

        pick()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = pick()
        for seed in range(6):
            torch.manual_seed(seed)
            logits = torch.randint(-1000, 1000, (rows, shard.size * columns)).float()
            expected = logits.argmax(-1)
            if seed == 3:
                logits[0, 5], expected[0] = float("nan"), -1
            mine.copy_(logits[:, shard.rank * columns : (shard.rank + 1) * columns])
            graph.replay()
            assert out.tolist() == expected.tolist()
            assert newest.tolist() == [*expected.clamp(min=0).tolist(), 77]
        self.sums.check()

    def lost(self) -> None:
        """The last rank does not come: all others say so, then it, and all GPUs go on working."""
        parts, residual, weight = self.draw(2, 7)
        mine, stream, weight = (tensor.to(self.device) for tensor in (parts[self.group.shard.rank], residual, weight))
        self.group.all_reduce(torch.zeros(1))
        late = self.group.shard.rank == self.group.shard.size - 1
        begun = time.monotonic()
        if late:
            time.sleep(2 * DEADLINE_S)
        for _ in range(20):  # only the first wait is long
            out = self.sums.reduce_add_norm(mine, stream, weight, EPS)
        torch.cuda.synchronize()
        waited = time.monotonic() - begun
        assert out.isnan().all()
        assert waited < 2 * DEADLINE_S + 2, waited
        try:
            self.sums.check()
        except RankLostError as error:
            print(f"rank {self.group.shard.rank} after {waited:.1f} s: {error}", flush=True)
        else:
            raise AssertionError("nobody was missed")
        assert torch.ones(100, device=self.device).sum().item() == 100


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    gpus = int(sys.argv[4]) if sys.argv[4:] else ranks
    same = gpus < ranks
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if same:
        peer_memory._check_access = lambda ranks, device: None
    backend = "gloo" if same else "cpu:gloo,cuda:nccl"
    group = TorchGroup(Shard(rank, ranks), str(Path(folder, "rendezvous")), backend=backend, timeout_s=DEADLINE_S)
    for width in (4096, 7168, 1024, 90):
        check = Check(group, device, width)
        for seed, rows in enumerate([1, 6, 1, 3, check.sums.rows, 2, 8]):
            check.eager(rows, seed)
        check.replayed(6, 10 if same else 200)
        check.picks(5, 75968)
        print(f"rank {rank}: width {width} is right, up to {check.sums.rows} rows", flush=True)
    check.lost()
    print(f"rank {rank}: done", flush=True)
    group.close()


if __name__ == "__main__":
    main()
