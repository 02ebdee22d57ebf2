"""Decode attention with rotation and the write to the cache: forms of it beside each other, one user and more.

    python benchmarks/attention_splits.py

takes less than twenty seconds on an H200. `rows` are the two launches that ask for the cache before they wait, which an
engine takes at its start where they are faster for one user and slower for nobody. Their bits are others than those of
`general`, the launches of all other steps. Of the forms of either, the default first, none differs in a bit, which is
looked at before anything is timed:

- `free` has as many registers as the compiler takes, `four` so few that four programs have room on a processor
  (`register_limit` in `layers/triton/attention_shape.py` decides which an engine has);
- `masked` has masks for whole tiles too, which more than two users with heads of 64 go without by default;
- `rows-lean` has no masks over whole tiles and reads page numbers a turn before the tokens that they place;
- `rows-masked` has masks, and reads page numbers right before.

The line after each case names the winner. What wins here need not win in a step, where kernels before and behind share
the processors (`general_step.py`).

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
from lowlat.layers.triton.attention import attend
from lowlat.layers.triton.attention_shape import AttentionShape
from lowlat.layers.triton.rope_write import rope_write
from lowlat.layers.triton.row_attention import RowShape, row_attend

PAGE, LAUNCHES = 16, 4


class General(msgspec.Struct, frozen=True):
    """The launches of all other steps."""

    registers: int | None = None
    """None: the default."""
    lean: bool = True
    """Without masks over whole tiles where that is the default."""


class Rows(msgspec.Struct, frozen=True):
    """The launches of a few new rows, and what differs from their default; 0: nothing."""

    stages: int = 0
    lean: bool = True


Form = General | Rows
FORMS: dict[str, Form] = {
    "general": General(),
    "general free": General(registers=0),
    "general four": General(registers=128),
    "general masked": General(lean=False),
    "general rows": Rows(),
    "general rows-lean": Rows(stages=3),
    "general rows-masked": Rows(stages=5, lean=False),
}


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
        weights = (1 + torch.randn(2, dim, device="cuda") / 8).bfloat16()
        self.norms = (weights[0], weights[1], 1e-6) if shape.qk_norm else None
        self.bytes = 2 * self.keys_SKD.numel() * 2

    def run(self, form: Form) -> torch.Tensor:
        """The launches of four layers; the result of the last."""
        (segments,), kv, rule = self.step.segments, (self.keys_SKD, self.values_SKD), AttentionRule()
        plan: dict[str, Any] = {"programs": 2 * _processors(), "early_start": True}
        for _ in range(LAUNCHES):
            out = self.qkv_RYD.new_empty(self.users, self.shape.heads, self.shape.head_dim)
            if isinstance(form, Rows):
                given = (self.step, segments, self.tables, self.norms, rule)
                row_attend(self.qkv_RYD, *kv, *given, out, shape=self._of(form), **plan)
                continue
            where = (self.step.positions_R, self.step.write_slots_R)
            q_RND = rope_write(self.qkv_RYD, *kv, *where, self.tables, self.norms, early_start=True)
            paged = (*kv, self.step.table_TP, PAGE)
            shape = None
            if not form.lean:
                shape = AttentionShape.of(self._group, 1, self.shape.head_dim, 2, segments=self.users)
            attend(q_RND, *paged, segments, rule, out, registers=form.registers, shape=shape, **plan)
        return out

    @property
    def _group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    def _of(self, form: Rows) -> RowShape:
        default = RowShape.of(self._group, 1, self.shape.head_dim, 2, PAGE, 0)
        if form == Rows():
            return default
        return msgspec.structs.replace(default, lean=form.lean, stages=form.stages)


def _processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a launch by form; each is compared with the launches of other steps first, and bit by bit with
    the default of its kind."""
    with rehearsal() as found:
        for form in FORMS.values():
            case.run(form)
    compile_all(found, torch.device("cuda"))
    defaults = {type(form): case.run(form) for form in (General(), Rows())}
    expected = defaults[General].float()
    arms: dict[str, Callable[[], list[float]]] = {}
    for name, form in FORMS.items():
        got = case.run(form)
        distance = float((got.float() - expected).norm() / expected.norm())
        assert distance < 1e-2, f"{name}: {distance} from the other steps' launches"
        if not torch.equal(defaults[type(form)], got):
            print(f"   {name} has OTHER BITS than the default", flush=True)
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
