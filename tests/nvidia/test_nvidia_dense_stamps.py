"""Time stamps of the dense step as one timeline: blocks whose clocks differ, and the numbers that the kernel uses."""

import re
from itertools import pairwise

import pytest
import torch

from lowlat_nvidia.dense.stamps import ATTENTION, ORDER, STAMPS, attention_us, head_cycles, read_parts
from lowlat_nvidia.jit import sources

BLOCKS, LAYERS = 5, 3
STEP = 0.5  # microseconds between stamps


def stamps(spread=0.0):
    """Blocks begin `spread` apart, have counters of their own, and a stamp every half microsecond."""
    found = torch.full((BLOCKS, LAYERS + 1, STAMPS), -1, dtype=torch.int64)
    base = 1_700_000_000_000_000_000
    for block in range(BLOCKS):
        rate, zero, began = 1600 + 100 * block, 10**9 * block + 7, block * spread

        def cycles(at, rate=rate, zero=zero, began=began):
            return zero + round((at - began) * rate)

        at = 10.0  # the beginning of layer 0, of all blocks alike
        for layer in range(LAYERS):
            for number, _, _ in ORDER:
                found[block, layer, number] = cycles(at)
                at += STEP
        found[block, LAYERS, 0] = cycles(at)
        found[block, LAYERS, 1] = cycles(at + 4)
        ended = at + 5 + block * spread
        for index, moment in ((2, began), (4, ended)):
            found[block, LAYERS, index] = cycles(moment)
            found[block, LAYERS, index + 1] = base + round(moment * 1e3)
    return found


@pytest.mark.parametrize("spread", [0.0, 0.25])
def test_the_timeline_is_that_of_all_blocks(spread):
    parts = read_parts(stamps(spread))
    layer = len(ORDER) * STEP
    first = [part for part in parts if part.depth == 1]
    assert [part.name for part in first] == ["start", *["layer"] * LAYERS, "head", "finish"]
    edges = [0.0, *(10 + layer * index for index in range(LAYERS + 1))]
    edges += [edges[-1] + 4, edges[-1] + 5 + (BLOCKS - 1) * spread]
    assert [(part.start_us, part.end_us) for part in first] == [
        (pytest.approx(a, abs=2e-3), pytest.approx(b, abs=2e-3)) for a, b in pairwise(edges)
    ]
    for index in range(LAYERS):
        inside = [p for p in parts if p.depth > 1 and edges[index + 1] - 1e-2 < p.start_us < edges[index + 2] - 1e-2]
        second = [part for part in inside if part.depth == 2]
        assert [part.name for part in second] == list(dict.fromkeys(name for _, name, _ in ORDER))
        assert sum(part.end_us - part.start_us for part in second) == pytest.approx(layer, abs=1e-2)
        waits = [part for part in inside if part.depth == 3]
        assert [part.name for part in waits] == [wait for _, _, wait in ORDER if wait]
        assert all(part.end_us - part.start_us == pytest.approx(STEP, abs=2e-3) for part in waits)


def test_the_head_s_cycles_are_each_block_s():
    assert head_cycles(stamps(0.25)).tolist() == [4 * (1600 + 100 * block) for block in range(BLOCKS)]


def test_the_kernel_uses_these_numbers():
    text = "".join(
        text
        for name, text in sources().items()
        if name in ("dense_step.cu", "attention.cuh", "heads.cuh", "splits.cuh")
    )
    used = {int(number) for number in re.findall(r"\blayer, (\d+)\)", text)}
    assert {number for number, _, _ in ORDER} <= used
    assert max(used) < STAMPS
    assert "stamp(c, LAYERS, 0)" in text
    assert "stamp(c, LAYERS, 1)" in text
    assert re.search(r"stamp_clocks\(p, 2\);(.|\n)*stop", text), "before anything else"
    assert re.search(r"finish_step\(p, parity\);\n  stamp_clocks\(p, 4\);", text)


def test_what_attention_takes_is_the_mean_of_blocks_with_clocks_of_their_own():
    found = stamps(0.25)
    for block in range(BLOCKS):
        rate = 1600 + 100 * block  # cycles a microsecond
        for layer in range(LAYERS):
            for place, (number, _) in enumerate(ATTENTION):
                found[block, layer, number] = 10**9 * block + round(place * (1 + block / 10) * rate)
    assert attention_us(found) == {name: pytest.approx(1.2, abs=1e-2) for _, name in ATTENTION[1:]}
