"""Decode attention with rotation and the write to the cache: forms of it beside each other, one user and more.

    python benchmarks/attention_splits.py

takes less than a minute on an H200. Users are cut into as many splits as fill the GPU alone, two programs a processor.
So eight users' programs come in whole waves where two or four have room on a processor; where three have, the last wave
is a third full. What must not change with the number of users is the order of sums:

- `long` tiles have 128 tokens instead of 64 and so other bits;
- a name's number is that of stages, `four`: few enough registers for four programs a processor;
- `lean` loops read page numbers a turn ahead and have no masks over whole tiles, and `twice` has two such tiles in a
  turn; neither changes a bit, and forms of one order are compared bit by bit before anything is timed;
- `rows`: the two launches that ask for the cache before they wait, which an engine takes at its start where they are
  faster for one user and slower for nobody. Their bits are others, too.

The line after each case names the winner; a form is worth having where it wins with eight users and loses nothing with
one, unless it leaves the bits as they are: then each number of users may have its own.

Keys and values are random; a sample is a graph of four layers' launches over one cache, divided by four.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from variants import fields, verdict

from lowlat.bench.arms.torch_step import capture, time_cuda
from lowlat.bench.ceiling import measure_ceiling
from lowlat.bench.presets import DenseShape, find_shape
from lowlat.bench.results import Row, Simulated, check_folder, new_result, row_from_samples, save
from lowlat.bench.stats import alternate
from lowlat.layers.attention import AttentionRule
from lowlat.layers.device_step import DeviceStep, RowSegments
from lowlat.layers.rope import Rope
from lowlat.layers.triton.ahead import compile_all, rehearsal
from lowlat.layers.triton.attention import AttentionShape, attend
from lowlat.layers.triton.rope_write import rope_write
from lowlat.layers.triton.row_attention import row_attend

PAGE, LAUNCHES = 16, 4


class Form(msgspec.Struct, frozen=True):
    """What differs from the default of its tiles; 0: nothing."""

    stages: int = 0
    tokens: int = 0
    registers: int = 0
    lean: int = 0
    rows: bool = False
    """The attention of a few new rows."""

    def shape(self, group: int, dim: int, users: int) -> AttentionShape:
        default = AttentionShape.of(group, 1, dim, 2, segments=1 if self.rows else users)
        return msgspec.structs.replace(
            default, stages=self.stages or default.stages, block_l=self.tokens or default.block_l,
            registers=self.registers or default.registers, lean=self.lean or default.lean,
        )  # fmt: skip


FORMS = {
    "general": Form(),
    "general four": Form(registers=128),
    "general lean-2-four": Form(lean=1, stages=2, registers=128),
    "general lean-4": Form(lean=1, stages=4),
    "general twice-2": Form(lean=2, stages=2),
    "general rows": Form(rows=True),
    "general rows-lean-2-four": Form(rows=True, lean=1, stages=2, registers=128),
    "general rows-lean-3": Form(rows=True, lean=1, stages=3),
    "general rows-lean-4": Form(rows=True, lean=1, stages=4),
    "general rows-twice-2": Form(rows=True, lean=2, stages=2),
    "general rows-long-3": Form(tokens=128, rows=True, stages=3),
    "general rows-long-lean-2": Form(tokens=128, rows=True, lean=1, stages=2),
}
SMALL = {
    "general lean-3-four": Form(lean=1, stages=3, registers=128),
    "general twice-2-four": Form(lean=2, stages=2, registers=128),
    "general rows-twice-2-four": Form(rows=True, lean=2, stages=2, registers=128),
    "general rows-twice-3": Form(rows=True, lean=2, stages=3),
    "general long": Form(tokens=128),
    "general long-lean-2-four": Form(tokens=128, lean=1, stages=2, registers=128),
    "general long-lean-3": Form(tokens=128, lean=1, stages=3),
    "general rows-long": Form(tokens=128, rows=True),
    "general rows-long-lean-2-four": Form(tokens=128, rows=True, lean=1, stages=2, registers=128),
    "general rows-long-lean-3": Form(tokens=128, rows=True, lean=1, stages=3),
    "general rows-long-lean-4": Form(tokens=128, rows=True, lean=1, stages=4),
    "general rows-long-twice-2": Form(tokens=128, rows=True, lean=2, stages=2),
}
"""For heads of 64: of larger ones a processor has no room for so many tiles."""


class Case:
    """Users of one length, and their caches."""

    def __init__(self, shape: DenseShape, users: int, context: int) -> None:
        pages = -(-context // PAGE)
        self.shape, self.users = shape, users
        size = (users * pages * PAGE, shape.kv_heads, shape.head_dim)
        self.keys_SKD, self.values_SKD = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )  # fmt: skip
        heads, dim, kv_heads = shape.heads, shape.head_dim, shape.kv_heads
        self.qkv_RYD = torch.randn(users, heads + 2 * kv_heads, dim, device="cuda").bfloat16()
        table_TP = torch.randperm(users * pages, device="cuda").int().view(users, pages)
        every_B = torch.arange(users, dtype=torch.int32, device="cuda")
        segments = RowSegments(
            every_B, every_B, torch.ones_like(every_B), torch.full_like(every_B, context), most_rows=1, longest=context
        )  # fmt: skip
        last_R = torch.full((users,), context - 1, device="cuda")
        places_R = table_TP[:, (context - 1) // PAGE].long() * PAGE + (context - 1) % PAGE
        self.step = DeviceStep(last_R, last_R, places_R, [segments], table_TP, PAGE, None)
        self.tables = Rope(dim, 10000.0, context, None, torch.device("cuda")).tables
        self.bytes = 2 * self.keys_SKD.numel() * 2

    def run(self, form: Form) -> torch.Tensor:
        """The launches of four layers; the result of the last."""
        group, (segments,) = self.shape.heads // self.shape.kv_heads, self.step.segments
        plan: dict[str, Any] = {
            "programs": 2 * _processors(), "early_start": True,
            "shape": form.shape(group, self.shape.head_dim, self.users),
        }  # fmt: skip
        kv = (self.keys_SKD, self.values_SKD)
        for _ in range(LAUNCHES):
            out = self.qkv_RYD.new_empty(self.users, self.shape.heads, self.shape.head_dim)
            if form.rows:
                row_attend(self.qkv_RYD, *kv, self.step, segments, self.tables, None, AttentionRule(), out, **plan)
                continue
            where = (self.step.positions_R, self.step.write_slots_R)
            q_RND = rope_write(self.qkv_RYD, *kv, *where, self.tables, None, early_start=True)
            attend(q_RND, *kv, self.step.table_TP, PAGE, segments, AttentionRule(), out, **plan)
        return out


def _processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a launch by form; each is compared with the default first, and bit by bit with the first that
    sums in its order."""
    forms = FORMS | (SMALL if case.shape.head_dim <= 64 else {})
    with rehearsal() as found:
        for form in forms.values():
            case.run(form)
    compile_all(found, torch.device("cuda"))
    expected = case.run(FORMS["general"]).float()
    arms: dict[str, Callable[[], list[float]]] = {}
    firsts: dict[tuple[int, bool], torch.Tensor] = {}
    for name, form in forms.items():
        got = case.run(form)
        distance = float((got.float() - expected).norm() / expected.norm())
        assert distance < 1e-2, f"{name}: {distance} from the default"
        if not torch.equal(firsts.setdefault((form.tokens, form.rows), got), got):
            print(f"   {name} has OTHER BITS than the first of its order", flush=True)
        graph = capture(lambda form=form: case.run(form))
        arms[name] = lambda graph=graph: [time / LAUNCHES for time in time_cuda(graph.replay, 8)]
    measured = alternate(arms, rounds)
    for name, error in measured.errors.items():
        print(f"   {name} broke and is left out: {error}", flush=True)
    return {name: measured.samples(name) for name in measured.rounds}


def main() -> Path:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-8b,llama-1b")
    parser.add_argument("--users", default="8,1")
    parser.add_argument("--contexts", default="100000,1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=None, help="folder of the result; default: benchmarks/results")
    got = parser.parse_args()
    folder = check_folder(got.results)
    ceiling = measure_ceiling("cuda")
    result = new_result("attention-splits", simulated=Simulated(weights=True), read_ceiling_tb_s=ceiling.tb_s, gpus=1)
    for model in got.models.split(","):
        for users, context in itertools.product(*(map(int, text.split(",")) for text in (got.users, got.contexts))):
            case = Case(find_shape(model), users, context)
            with torch.inference_mode():
                samples = measure(case, got.rounds)
            rows: list[Row] = [
                row_from_samples(
                    times, metric="step_us", rows=users, context=context, dtype="bfloat16",
                    bytes=case.bytes, read_ceiling_tb_s=ceiling.tb_s, note="one layer", **fields(name, model),
                )
                for name, times in samples.items()
            ]  # fmt: skip
            result.rows += rows
            print(f"{model}, {users} users, {context} tokens: a layer's attention", flush=True)
            print(verdict(samples, arm="general"), flush=True)
            del case
            torch.cuda.empty_cache()
    path = save(result, folder)
    print(path)
    return path


if __name__ == "__main__":
    main()
