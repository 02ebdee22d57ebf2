"""All weight products of a SmolLM2 step on a CPU: PyTorch's linear beside the packed form that lowlat uses.

One thread, random weights of the model's shapes, float32. The arm `general` is packed for eight rows, with a note where
it is packed for one; `torch-eager-graph` is `torch.nn.functional.linear`. See docs/decisions/0102.

    python benchmarks/cpu_products.py --save
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lowlat.bench import results, stats

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
ROWS = (1, 2, 4, 8, 16)


def packed(weights: list[torch.Tensor], for_rows: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """One callable a weight, packed for so many rows."""
    multiply = torch.ops.mkldnn._linear_pointwise.default
    forms = [torch.ops.mkldnn._reorder_linear_weight(weight, for_rows) for weight in weights]
    return [lambda x, form=form: multiply(x, form, None, "none", [], "") for form in forms]


def milliseconds(products: list[Callable[[torch.Tensor], torch.Tensor]], rows: int) -> float:
    """Time of all products once."""
    inputs = {columns: torch.randn(rows, columns) for columns in (576, 1536)}
    begin = time.perf_counter()
    for product, (_, columns) in zip(products, SHAPES, strict=True):
        product(inputs[columns])
    return (time.perf_counter() - begin) * 1e3


@torch.inference_mode()
def main() -> None:
    """Measure in alternation, print, and write a result file if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write it under benchmarks/results")
    arguments = parser.parse_args()
    if arguments.save:
        results.check_folder()
    torch.set_num_threads(1)
    weights = [torch.randn(shape) * 0.02 for shape in SHAPES]
    forms = {
        "packed for 8": packed(weights, 8),
        "packed for 1": packed(weights, 1),
        "F.linear": [lambda x, weight=weight: F.linear(x, weight) for weight in weights],
    }
    result = results.new_result("cpu-products", simulated=results.Simulated(weights=True, acceptance=False), gpus=0)
    for rows in ROWS:
        arms = {name: functools.partial(milliseconds, form, rows) for name, form in forms.items()}
        measured = stats.alternate(arms, arguments.rounds)
        for name in forms:
            row = results.row_from_samples(
                measured.samples(name),
                workload="smollm2 products" if name != "packed for 1" else "smollm2 products, packed for one row",
                arm="torch-eager-graph" if name == "F.linear" else "general",
                metric="latency_ms",
                rows=rows,
                dtype="float32",
                note=name,
            )
            result.rows.append(row)
            print(f"{rows:3} rows, {name:13} {row.median:7.1f} ms ({row.low:.1f} to {row.high:.1f})")
    if arguments.save:
        print(results.save(result), file=sys.stderr)


if __name__ == "__main__":
    main()
