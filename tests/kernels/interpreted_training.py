"""The kernels that trainings use, against plain PyTorch; run by `test_kernels_interpreted.py`."""

from __future__ import annotations

import pytest
import torch

from lowlat.layers.triton import block_attention, even, overlap
from lowlat.training import overlap as plain
from lowlat.training.draft_loss import attend_plainly


@pytest.mark.parametrize(("length", "room"), [(1, 70), (64, 70), (69, 70)])
def test_attention_of_requests_of_one_length(length: int, room: int):
    requests, kv_heads, group, dim = 3, 2, 3, 16
    generator = torch.Generator().manual_seed(length)
    qkv = torch.randn(requests, kv_heads * group + 4, dim, generator=generator)
    q = qkv[:, : kv_heads * group]
    keys, values = torch.randn(2, requests * room + 5, kv_heads, dim, generator=generator)
    for pool in (keys, values):
        pool[: requests * room].view(requests, room, kv_heads, dim)[:, length:] = float("nan")
    got = even.even_attention(q, keys, values, torch.tensor([length]), room, 0.3)
    seen = [pool[: requests * room].view(requests, room, kv_heads, dim)[:, :length] for pool in (keys, values)]
    k, v = (part.repeat_interleave(group, 2).transpose(1, 2) for part in seen)
    expected = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k, v, scale=0.3)[:, :, 0]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [5000, 4096, 100])
def test_likeness_and_its_slope(vocabulary: int):
    generator = torch.Generator().manual_seed(vocabulary)
    scores, target = 4 * torch.randn(2, 7, vocabulary, generator=generator)
    target += scores
    scores[3] *= 6
    heats = 0.5 + 4 * torch.rand(7, 3, generator=generator)
    weights = torch.rand(7, 3, generator=generator)
    wanted = torch.randint(0, vocabulary + 1, (7,), generator=generator)
    wanted[2], wanted[4] = target[2].argmax(), vocabulary
    for asked in ({}, {"cross": False}, {"match": False}):
        found, expected = (of.likeness(scores, target, wanted, heats, **asked) for of in (overlap, plain))
        torch.testing.assert_close(found[:, :2], expected[:, :2], atol=1e-4, rtol=1e-4)
        if "match" not in asked:
            torch.testing.assert_close(
                overlap.parts(found, target, heats), plain.parts(expected, target, heats), atol=1e-4, rtol=1e-3
            )
        aims = (scores.clone(), target, heats, expected, weights, wanted)
        expected = plain.slope_(*aims, **asked)
        mine = overlap.slope_(scores.clone(), target, heats, found, weights, wanted, **asked)
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("window", [0, 40, 100])
def test_attention_of_blocks_and_its_slopes(window: int):
    sequences, tokens, anchors, rows, kv_heads, group, dim = 3, 150, 4, 6, 2, 3, 16
    generator = torch.Generator().manual_seed(window)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    q = some(sequences * anchors, rows, kv_heads * group, dim)
    context = some(sequences, tokens, kv_heads, dim), some(sequences, tokens, kv_heads, dim)
    own = some(sequences * anchors, rows, kv_heads, dim), some(sequences * anchors, rows, kv_heads, dim)
    places = torch.tensor([[20, 149, 64, 0], [150, 7, 65, 130], [33, 96, 33, 110]])
    begins = torch.tensor([0, 5, 33])
    parts = (q, *context, *own)
    got = block_attention.block_attention(q, context, own, places, begins, window)
    expected = attend_plainly([context], places, begins, window)(0, q, *own)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    slope = torch.randn(got.shape, generator=generator)
    slopes = torch.autograd.grad(got, parts, slope), torch.autograd.grad(expected, parts, slope)
    for mine, its in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, its, atol=2e-5, rtol=1e-4)
