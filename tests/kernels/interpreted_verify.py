"""Checks of the kernels that draw tokens, check guesses and attend for drafts, under Triton's interpreter, in float32.

test_kernels_interpreted.py runs them in a process of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

import pytest
import torch
from verify_cases import block_case, blocks_by_hand, check_draws, check_finds, check_verification, check_walks

from lowlat.layers import history
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.triton.drawing import draw, walk
from lowlat.layers.triton.history import find_again
from lowlat.layers.triton_ops import TritonOps


@pytest.mark.parametrize("vocabulary", [40, 1024, 2500])
def test_draws(vocabulary):
    check_draws(draw, vocabulary, torch.float32, "cpu")


def test_walks():
    check_walks(walk, 1200, torch.float32, "cpu")


@pytest.mark.parametrize("count", [1, 7])
def test_finds(count):
    check_finds(history.find_again, count, "cpu")
    check_finds(find_again, count, "cpu")


@pytest.mark.parametrize("width", [1, 2, 4, 5, 8])
@pytest.mark.parametrize(("counts", "forced"), [(False, False), (True, False), (True, True)])
def test_verification(width, counts, forced):
    check_verification(TritonOps(4), ReferenceOps(), width, "cpu", counts=counts, forced=forced)


@pytest.mark.parametrize(("lengths", "window"), [([1], 0), ([200, 0, 33], 0), ([150, 7, 64], 20)])
def test_blocks_of_a_draft(lengths, window):
    shape = {"heads": 6, "kv_heads": 2, "dim": 16, "page_size": 7}
    case, step, rule = block_case(lengths, 5, "cpu", torch.float32, window=window, **shape)
    expected = blocks_by_hand(case, step, rule)
    paged = (case.q_RND, case.keys_SKD, case.values_SKD, step, rule)
    torch.testing.assert_close(ReferenceOps().attend(*paged).view_as(expected).double(), expected, rtol=3e-5, atol=3e-5)
    real = torch.cat([torch.full((5,), length > 0) for length in lengths])
    got = TritonOps(12).attend(*paged).view_as(expected).double()
    torch.testing.assert_close(got[real], expected[real], rtol=3e-5, atol=3e-5)
