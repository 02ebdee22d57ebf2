"""Steps of a small model for tools that watch every access: `compute-sanitizer python dense_small.py [plain] [widths]`.

`plain`: the cache is copied by loads and stores. Prints the greedy tokens of steps of several widths, page sizes and
contexts; two runs print the same.
"""

from __future__ import annotations

import sys

from lowlat_nvidia.dense import plan as plans
from lowlat_nvidia.dense.cases import make_case
from lowlat_nvidia.dense.reference import random_weights
from lowlat_nvidia.dense.rotary import frequencies, rotary_table
from lowlat_nvidia.dense.step import DenseStep

CASES = {1: [[37]], 2: [[0], [130]], 5: [[5], [68, 69, 70], [21]], 8: [[i * 13] for i in range(8)]}


def main() -> None:
    shape = plans.DenseShape(2, 1024, 16, 8, 128, 1024, 1100, True, 1e-6)
    weights = random_weights(shape, 3, "cuda")
    rotary = rotary_table(frequencies({}, shape.head_dim), 256, "cuda")
    step = DenseStep(plans.DensePlan(shape, plain_copies="plain" in sys.argv), weights, rotary)
    step.spin_limit = 1 << 30  # a watched step is slow
    for width in [int(text) for text in sys.argv[1:] if text.isdigit()] or list(CASES):
        for page_size in (1, 16):
            inputs, pools = make_case(shape, CASES[width], page_size, width)
            step.bind(pools, page_size)
            for _ in range(2):
                step.run(inputs)
                step.check()
            print(width, page_size, step.next_token_R[:width].tolist(), flush=True)


if __name__ == "__main__":
    main()
