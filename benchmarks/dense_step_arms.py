"""A decode step of dense models: the persistent kernel beside plain and compiled PyTorch in CUDA graphs, in one run.

    python benchmarks/dense_step_arms.py --out result.json --commit $(git rev-parse HEAD)
    python benchmarks/dense_step_arms.py --forms --out forms.json --commit $(git rev-parse HEAD)

With --forms the arms are forms of the kernels that their plans can choose, of one row and of 2, 4 and 8 at a context of
1,024, of one at 8,192 and of 8 at 1,536 and 2,048 too, and at the end it says which was the fastest where. Needs one
Hopper GPU. The file is written again after every arm, so that an interrupted run keeps what it has.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("LOWLAT_CACHE", "/tmp/lowlat-cubins")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/lowlat-nvidia/src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from dense_step import check_case

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense import reference
from lowlat_nvidia.dense.cases import make_case, one_row
from lowlat_nvidia.dense.pack import DenseWeights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.stamps import attention_us, head_cycles, read_parts, stamped
from lowlat_nvidia.dense.step import DenseStep, StepTensors, load_kernels
from lowlat_nvidia.dense.waits import Waits
from lowlat_nvidia.jit import Function, compile_cubin

Arm = Callable[[], object]
FORMS_OF_ONE: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3-0.6b": ({"slots": 28}, {"waits": Waits()}, {"under_way": 5}, {"busy_under_way": 4}, {"busy_under_way": 6}),
    "llama-1b": ({"slots": 16}, {"waits": Waits()}, {"hold": False}, {"copies": 4}, {"under_way": 3}),
    "qwen3-8b": ({"slots": 36}, {"waits": Waits()}, {"hold": False}, {"copies": 4}, {"under_way": 3}),
}
FORMS_OF_SEVERAL: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen3-0.6b": ({"slots": 28}, {"waits": Waits()}, {"row_warps": 0}, {"row_warps": 1}, {"row_units": 4}),
    "llama-1b": ({"slots": 16}, {"waits": Waits()}, {"row_warps": 0}, {"row_units": 4}, {"watch_each": False}),
    "qwen3-8b": ({"slots": 36}, {"waits": Waits()}, {"row_warps": 0}, {"row_units": 2}, {"watch_each": True}),
}
"""Of each model, options of plans to compare with the default. They leave packed weights as they are."""
CASES = (
    (2, 1024), (4, 1024), (8, 1024), (8, 2048), (1, 2048), (1, 8192), (1, 32_768), (1, 131_072),
)  # fmt: skip
"""(rows, context) of the default's steps beside one row of 1,024 tokens, which PyTorch's arms have too."""


FORM_CASES = ((1, 1024), (1, 8192), (2, 1024), (4, 1024), (8, 1024), (8, 1536), (8, 2048))
"""The same of forms; what the first takes is what the others are compared with at the end."""


class _Reading(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("bytes", ctypes.c_ulonglong), ("out", ctypes.c_void_p))


def read_ceiling() -> float:
    """Bytes a second of a kernel that reads 8.6 GB once; the best of a few runs."""
    data = torch.empty(8_600_000_000 // 8, dtype=torch.int64, device="cuda").fill_(0x5A5A5A5A)
    out = torch.zeros(4, dtype=torch.int32, device="cuda")
    function = Function(compile_cubin("read_ceiling.cu", {})[0], "read_ceiling", 0)
    reading = _Reading(data.data_ptr(), data.numel() * 8, out.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    times = sample({"read": lambda: function.launch(264, 1024, reading, stream)}, 12)["read"]
    return data.numel() * 8 / (min(times) / 1e6)


def sample(arms: dict[str, Arm], rounds: int, warm_seconds: float = 0.3) -> dict[str, list[float]]:
    """Microseconds of every arm, one run of each a round, in a new order every round.

    Steps follow each other without the host, as they do while somebody decodes, and the device has been busy for a
    while before: its clock is then what it stays at.
    """
    order = list(arms)
    shuffle = random.Random(0)
    begin = time.time()
    while time.time() - begin < warm_seconds:
        for name in order:
            arms[name]()
        torch.cuda.synchronize()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in order}
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            arms[name]()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in marks.items()}


def with_plan(built: DenseStep, plan: plans.DensePlan) -> DenseStep:
    """Another kernel, for all steps that are asked of it, on the same packed weights, with exchange buffers of its own:
    kernels that publish more or fewer copies would leave words behind for each other.
    """
    if plan.page_fragments != built.plan.page_fragments:
        raise ValueError(f"{plan} wants weights in pages of {plan.page_fragments} fragments; they are packed otherwise")
    other = copy.copy(built)
    other.plan = plan
    other.functions = load_kernels([plan])[0] * 2
    words = plan.exchange_words()
    other.exchanges = [torch.full((words,), -1, dtype=torch.int32, device=built.state.device)] * 2
    other.state = torch.zeros_like(built.state)
    return other


def forms_of(built: DenseStep, choices: Sequence[dict[str, Any]], rows: int) -> dict[str, DenseStep]:
    """The default, and a kernel for so many rows for each choice of options; all are compiled side by side."""
    made = {}
    for options in choices:
        label = ", ".join(["lowlat-nvidia", *(f"{key} {value}" for key, value in options.items())])
        made[label] = dataclasses.replace(built.plan.kernel(rows), **options)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda plan: compile_cubin("dense_step.cu", plan.definitions()), made.values()))
    return {"lowlat-nvidia": built, **{label: with_plan(built, plan) for label, plan in made.items()}}


class PlainLaunch:
    """A kernel launched without asking that all blocks are resident together; nothing else may run on the device."""

    def __init__(self, function: Function) -> None:
        self.function = function

    def launch(
        self, blocks: int, threads: int, parameters: ctypes.Structure, stream: int, *, early: bool = False
    ) -> None:
        self.function.launch_early(blocks, threads, parameters, stream, dependent=False)


def launched_plainly(built: DenseStep) -> DenseStep:
    other = copy.copy(built)
    other.functions = [PlainLaunch(function) for function in built.functions]  # type: ignore[misc]
    return other


def ends_of(built: DenseStep, inputs: StepTensors) -> str:
    """What of a step lies before the first layer, in the head and behind it, and what a layer's stages take, waits for
    other blocks included, by time stamps, in microseconds; how far apart blocks are in the head."""
    twin = stamped(built)
    for _ in range(20):
        twin.run(inputs)
    twin.check()
    parts, paces = read_parts(twin.stamps), []
    for _ in range(2):
        twin.run(inputs)
        paces.append(head_cycles(twin.stamps).sort())
    attention = ", ".join(f"{name} {value:.1f}" for name, value in attention_us(twin.stamps).items())
    twin.close()
    values, blocks = paces[0]
    again = len({*blocks[:32].tolist()} & {*paces[1].indices[:32].tolist()})
    pace = (
        f"head {values[0]} to {values[-1]} cycles, mean {values.double().mean():.0f}, {again} of the 32 fastest again"
    )
    took = [(part.name, part.end_us - part.start_us) for part in parts if part.depth == 1]
    layers = [value for name, value in took if name == "layer"]
    ends = ", ".join(f"{name} {value:.1f}" for name, value in took if name != "layer")
    stages: dict[str, list[float]] = {}  # of each, all of it and the wait for other blocks
    for part in parts:
        if part.depth == 2:
            stage = stages.setdefault(part.name, [0.0, 0.0])
        if part.depth > 1:
            stage[part.depth - 2] += (part.end_us - part.start_us) / len(layers)
    inside = ", ".join(f"{name} {whole:.1f} ({wait:.1f} waiting)" for name, (whole, wait) in stages.items())
    layer = f"a layer {sorted(layers)[len(layers) // 2]:.1f} (the first {layers[0]:.1f})"
    return f"{ends}, {layer}: {inside}; in attention: {attention}; {pace}"


def check_forms(builds: dict[str, DenseStep], inputs: StepTensors) -> None:
    """Raises unless all forms compute the same bits; a form that is fast and wrong is not an arm."""
    expected = builds["lowlat-nvidia"].run(inputs).clone()
    for label, other in builds.items():
        for _ in range(5):
            other.logits_RV.fill_(float("nan"))
            if not torch.equal(other.run(inputs), expected):
                raise AssertionError(f"{label} has other bits than the default at {len(expected)} rows")
        other.check()


def check_rows(built: DenseStep, inputs: StepTensors) -> None:
    """Raises unless every row of a step of several has the bits that it has alone."""
    together = built.run(inputs).clone()
    built.check()
    for row in range(len(together)):
        if not torch.equal(built.run(one_row(inputs, row))[0], together[row]):
            raise AssertionError(f"row {row} differs from itself alone")
    built.check()


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Median and the ends of its 95 % bootstrap interval."""
    draw = random.Random(1)
    middles = sorted(sorted(draw.choices(values, k=len(values)))[len(values) // 2] for _ in range(1000))
    return sorted(values)[len(values) // 2], middles[25], middles[974]


def in_graph(step: Arm) -> Arm:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def torch_step(
    shape: plans.DenseShape, weights: DenseWeights, context: int
) -> tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    """An ordinary PyTorch decode step of one request with a contiguous cache; projections of a layer are joined."""
    s = shape
    kv = s.kv_heads * s.head_dim
    layers = []
    for w in weights.layers:
        cache = [torch.randn(1, s.kv_heads, context, s.head_dim, device="cuda").bfloat16() for _ in range(2)]
        layers.append((torch.cat([w.q, w.k, w.v]), torch.cat([w.gate, w.up]), w, cache))
    cosine, sine = (torch.randn(1, s.head_dim, device="cuda").bfloat16() for _ in range(2))
    position = torch.tensor([context - 1], device="cuda")
    token = torch.zeros(1, dtype=torch.long, device="cuda")

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine

    def step(token: torch.Tensor) -> torch.Tensor:
        x = weights.embedding[token]
        for qkv, gate_up, w, (keys, values) in layers:
            h = F.rms_norm(x, (s.hidden,), w.norm1, s.eps)
            q, k, v = F.linear(h, qkv).split([s.qdim, kv, kv], -1)
            q, k = q.view(1, s.q_heads, 1, s.head_dim), k.view(1, s.kv_heads, 1, s.head_dim)
            if w.q_norm is not None and w.k_norm is not None:
                q = F.rms_norm(q, (s.head_dim,), w.q_norm, s.eps)
                k = F.rms_norm(k, (s.head_dim,), w.k_norm, s.eps)
            keys.index_copy_(2, position, turn(k))
            values.index_copy_(2, position, v.view(1, s.kv_heads, 1, s.head_dim))
            out = F.scaled_dot_product_attention(turn(q), keys, values, enable_gqa=True)
            x = x + F.linear(out.reshape(1, s.qdim), w.o)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), w.norm2, s.eps), gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w.down)
        return F.linear(F.rms_norm(x, (s.hidden,), weights.norm, s.eps), weights.lm_head).argmax(-1)

    return step, token


class Report:
    def __init__(self, path: Path, name: str, commit: str, tree: str, ceiling: float) -> None:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        driver = driver.partition("\n")[0]  # a line a GPU
        self.path, self.ceiling = path, ceiling
        cpu = next(
            (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
        )
        machine = {"gpu": torch.cuda.get_device_name(), "gpus": 1, "driver": driver, "cpu": cpu}
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        command = " ".join(["python benchmarks/dense_step_arms.py", *sys.argv[1:]])
        command = command.replace(str(path), path.name)  # its folder is this machine's own
        self.body = {
            "schema": 1, "name": name, "date": now, "commit": commit, "tree": tree, "command": command,
            "machine": {**machine, "torch": torch.__version__, "python": platform.python_version()},
            "simulated": {"weights": True, "acceptance": False}, "read_ceiling_tb_s": round(ceiling / 1e12, 3),
            "rows": [],
        }  # fmt: skip

    def add(
        self, workload: str, arm: str, rows: int, context: int, size: int, values: list[float], note: str = ""
    ) -> None:
        """One line of the table; a form of the kernel is named behind the model, as its workload."""
        middle, low, high = median_interval(values)
        fraction = size / self.ceiling * 1e6 / middle
        arm, _, form = arm.partition(", ")
        workload = f"{workload}, {form}" if form else workload
        row = {
            "workload": workload, "rows": rows, "context": context, "tp": 1, "dtype": "bfloat16", "arm": arm,
            "metric": "step_us", "concurrency": rows, "median": round(middle, 2), "low": round(low, 2),
            "high": round(high, 2),
            "samples": len(values), "bytes": size, "ceiling_fraction": round(fraction, 4), "note": note,
        }  # fmt: skip
        self.body["rows"].append(row)  # type: ignore[attr-defined]
        print(
            f"{workload} {arm} rows {rows} context {context}: {middle:.1f} us [{low:.1f}, {high:.1f}] {fraction:.1%}",
            flush=True,
        )
        self.path.write_text(json.dumps(self.body, indent=1) + "\n")


def fastest(times: dict[str, list[float]]) -> str:
    """The arm of the smallest median, and what it is of the default's; "undecided" where their intervals meet."""
    best = min(times, key=lambda label: median_interval(times[label])[0])
    middle, low, high = median_interval(times["lowlat-nvidia"])
    value, least, most = median_interval(times[best])
    if best == "lowlat-nvidia":
        return f"the default, {middle:.1f} us"
    word = "" if most < low else " (undecided: the intervals meet)"
    return f"{best}: {value:.1f} us [{least:.1f}, {most:.1f}], the default {middle:.1f} [{low:.1f}, {high:.1f}]{word}"


def time_forms(report: Report, name: str, built: DenseStep) -> list[str]:
    """All forms at 1, 2, 4 and 8 rows of context 1,024, and 1 and 8 of longer ones, compared bit for bit first; what
    was fastest at each.
    """
    shape, verdicts, one = built.plan.shape, [], 0.0
    of_one, of_several = forms_of(built, FORMS_OF_ONE[name], 1), forms_of(built, FORMS_OF_SEVERAL[name], 8)
    of_one["lowlat-nvidia, launched plainly"] = launched_plainly(built)
    for rows, context in FORM_CASES:
        builds = of_one if rows == 1 else of_several
        inputs, pools = make_case(shape, [[context - 1]] * rows, 16, 3)
        for other in builds.values():
            other.bind(pools, 16)
        check_forms(builds, inputs)
        check_rows(built, inputs)
        arms: dict[str, Arm] = {
            label: lambda other=other, inputs=inputs: other.run(inputs)  # type: ignore[misc]
            for label, other in builds.items()
        }
        times = sample(arms, 30, 0.2)
        for other in builds.values():
            other.check()
        where = f"{rows} rows of {context}"
        print(f"{name}, {where}, us: {ends_of(built, inputs)}", flush=True)
        best = min(times, key=lambda label: median_interval(times[label])[0])
        if rows == 8 and best != "lowlat-nvidia":
            print(f"{best}, {where}, us: {ends_of(builds[best], inputs)}", flush=True)
        size = shape.weight_bytes() + rows * shape.kv_bytes(context)
        for arm, values in times.items():
            report.add(name, arm, rows, context, size, values)
        least = min(median_interval(values)[0] for values in times.values())
        one = one or least
        verdicts.append(f"{name}, {where} ({least / one:.2f} of one of 1024): {fastest(times)}")
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=os.environ.get("LOWLAT_COMMIT", ""))
    parser.add_argument("--tree", default=os.environ.get("LOWLAT_TREE", ""))
    parser.add_argument("--models", default="qwen3-0.6b,llama-1b,qwen3-8b")
    parser.add_argument("--no-compile", action="store_true", help="leave the torch.compile arm out")
    parser.add_argument("--forms", action="store_true", help="time forms of the kernel; say which is fastest")
    parser.add_argument("--seconds", type=float, default=1e9, help="compile nothing more after this long")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here; the kernels need a Hopper one")
    begin = time.time()
    report = Report(
        args.out, "dense-step-forms" if args.forms else "dense-step", args.commit, args.tree, read_ceiling()
    )
    print(f"read ceiling {report.ceiling / 1e12:.3f} TB/s", flush=True)
    verdicts: list[str] = []
    for name in args.models.split(","):
        shape = plans.PRESETS[name]
        weights = reference.random_weights(shape, 1, "cuda")
        built = DenseStep(
            plans.DensePlan(shape),
            weights,
            rotary_table(frequencies({"rope_theta": 5e5}, shape.head_dim), 131_100, "cuda"),
        )
        for positions in ([[1023]], [[31], [900, 901]]):
            error, _ = check_case(built, weights, positions, 16, 5)
            print(f"{name} {positions}: relative error {error:.2e}", flush=True)
        if args.forms:
            verdicts += time_forms(report, name, built)
            del built, weights
            torch.cuda.empty_cache()
            continue
        inputs, pools = make_case(shape, [[1023]], 16, 3)
        built.bind(pools, 16)
        step, token = torch_step(shape, weights, 1024)
        arms: dict[str, Arm] = {"lowlat-nvidia": lambda built=built, inputs=inputs: built.run(inputs)}  # type: ignore[misc]
        with torch.no_grad():
            arms["torch-eager-graph"] = in_graph(lambda step=step, token=token: step(token))
            if not args.no_compile and time.time() - begin < args.seconds:
                start = time.time()
                compiled = torch.compile(step, fullgraph=True)
                arms["torch-compile"] = in_graph(lambda compiled=compiled, token=token: compiled(token))
                print(f"{name}: compiled in {time.time() - start:.0f} s", flush=True)
            times = sample(arms, 40)
        built.check()
        size = shape.weight_bytes() + shape.kv_bytes(1024)
        for arm, values in times.items():
            report.add(name, arm, 1, 1024, size, values)
        note = "computed: bytes over the read ceiling of this run"
        report.add(name, "read-floor", 1, 1024, size, [size / report.ceiling * 1e6], note)
        for rows, context in CASES:
            del inputs, pools
            inputs, pools = make_case(shape, [[context - 1]] * rows, 16, 3)
            built.bind(pools, 16)
            if rows == 8:
                check_rows(built, inputs)
            arms = {"lowlat-nvidia": lambda built=built, inputs=inputs: built.run(inputs)}  # type: ignore[misc]
            times = sample(arms, 30 if context < 10_000 else 12, 0.1)
            built.check()
            size = shape.weight_bytes() + rows * shape.kv_bytes(context)
            for arm, values in times.items():
                report.add(name, arm, rows, context, size, values)
        del arms, built, weights, step, inputs, pools
        torch.compiler.reset()
        torch.cuda.empty_cache()
    print("\n".join(verdicts))


if __name__ == "__main__":
    main()
