"""Top-k, top-p and min-p by search on a GPU: the tokens that a sort keeps."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [513, 49152, 128256])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_tokens_pass_as_by_a_sort(vocabulary: int, seed: int) -> None:
    from filter_cases import filter_case

    from lowlat.layers import filtering as reference
    from lowlat.layers.triton import filtering

    case = filter_case(vocabulary, seed, "cuda")
    found, expected = filtering.keep_likely(*case), reference.keep_likely(*case)
    # Sums in another order may let a token more or less reach top-p.
    differ = (found.isfinite() != expected.isfinite()).sum(1)
    assert (differ <= 1).all(), differ
    assert (differ[case[3] >= 1.0] == 0).all()
    assert torch.equal(found[0, found[0].isfinite()], case[0][0, found[0].isfinite()])
    assert torch.equal(filtering.keep_likely(*case), found), "the same bits every time"


def test_in_a_graph() -> None:
    from filter_cases import filter_case

    from lowlat.bench.arms.torch_step import capture, time_cuda
    from lowlat.layers.triton import filtering

    case = filter_case(128256, 1, "cuda")
    expected = filtering.keep_likely(*case)
    found = torch.empty_like(expected)
    graph = capture(lambda: found.copy_(filtering.keep_likely(*case)))
    found.fill_(0.0)
    graph.replay()
    assert torch.equal(found, expected)
    one = capture(lambda: filtering.keep_likely(*(part[:1] for part in case)))
    for name, run in (("1 row", one), ("8 rows", graph)):
        print(f"filter {name}: {sorted(time_cuda(run.replay, 21))[10]:.1f} us")
