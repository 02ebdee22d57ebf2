"""The kernels that trainings use, against plain PyTorch; run by `test_kernels_interpreted.py`."""

from __future__ import annotations

import pytest
import torch

from lowlat.layers.triton import even, overlap
from lowlat.training import overlap as plain


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
    weights = torch.rand(7, 2, generator=generator)
    found, expected = overlap.likeness(scores, target, heats), plain.likeness(scores, target, heats)
    torch.testing.assert_close(found[:, :2], expected, atol=1e-4, rtol=1e-4)
    wanted = plain.slope_(scores.clone(), target, heats, expected, weights)
    torch.testing.assert_close(overlap.slope_(scores, target, heats, found, weights), wanted, atol=1e-5, rtol=1e-3)
