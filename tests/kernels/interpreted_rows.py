"""Checks of the products of several rows on tensor cores, under Triton's interpreter, in float32.

test_kernels_interpreted.py runs them in a process of its own, since a process either interprets or compiles.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lowlat.layers.activation import GATED
from lowlat.layers.triton import row_product as row_products
from lowlat.layers.triton.row_product import row_product


@pytest.mark.parametrize(
    ("rows", "width", "outputs", "activation", "add", "norm", "bias"),
    [
        (5, 72, 40, None, True, True, False),
        (8, 96, 64, "silu", True, True, True),
        (3, 200, 32, "gelu_pytorch_tanh", False, True, False),
        (16, 64, 33, None, False, False, True),
        (2, 1500, 17, None, True, False, False),
        (7, 40, 133, None, True, True, False),  # of more programs where it is a head
    ],
)
@pytest.mark.parametrize("least_head", [64, 16384])
def test_products(rows, width, outputs, activation, add, norm, bias, least_head, monkeypatch):
    monkeypatch.setattr(row_products, "_LEAST_HEAD", least_head)
    weight = torch.randn(outputs * (2 if activation else 1), width) * 0.1
    x, stream, weights = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    offset = torch.randn(len(weight)) if bias else None
    got, total = row_product(
        x, weight, offset, stream_RI=stream if add else None, norm_I=weights if norm else None, eps=1e-5,
        activation=activation,
    )  # fmt: skip
    summed = x + stream if add else x
    assert torch.equal(total, summed)
    expected = F.linear(F.rms_norm(summed, (width,), weights, 1e-5) if norm else summed, weight, offset)
    if activation:
        expected = GATED[activation](*expected.chunk(2, -1))
    torch.testing.assert_close(got, expected, rtol=3e-5, atol=3e-5)
