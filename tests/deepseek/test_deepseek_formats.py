"""Codecs against the reference's tables: every code, every bfloat16 value, every scale."""

from __future__ import annotations

import dsv4_formats as reference
import numpy as np
import pytest
import torch

from lowlat.layers import fp4, fp8
from lowlat.layers.deepseek_entries import v4_format


def all_bf16() -> torch.Tensor:
    """Every finite bfloat16 value."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite()]


def test_every_e4m3_code_decodes_to_its_value_and_back() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    np.testing.assert_array_equal(fp8.e4m3_decode(codes).double().numpy(), reference.E4M3)
    finite = codes[torch.from_numpy(np.isfinite(reference.E4M3))]
    assert torch.equal(fp8.e4m3_encode(fp8.e4m3_decode(finite)), finite)


def test_e4m3_rounds_every_bf16_value_as_the_table_does() -> None:
    x = all_bf16()
    mine = fp8.e4m3_decode(fp8.e4m3_encode(x)).double().numpy()
    np.testing.assert_array_equal(mine, reference.e4m3_round(x.double().numpy()))


def test_e4m3_rounds_midpoints_and_their_neighbours() -> None:
    grid = torch.from_numpy(reference.E4M3[:127]).float()
    middles = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))])
    x = torch.cat([x, -x])
    mine = fp8.e4m3_decode(fp8.e4m3_encode(x)).double().numpy()
    np.testing.assert_array_equal(mine, reference.e4m3_round(x.double().numpy()))


def test_every_ue8m0_byte() -> None:
    scales = torch.arange(255, dtype=torch.int32).to(torch.uint8)
    np.testing.assert_array_equal(fp8.ue8m0_decode(scales).double().numpy(), 2.0 ** (np.arange(255) - 127.0))
    torch_values = scales.view(torch.float8_e8m0fnu).float()
    assert torch.equal(fp8.ue8m0_decode(scales), torch_values)


def test_ue8m0_ceiling_of_every_positive_normal_bf16_and_neighbours() -> None:
    x = all_bf16()
    x = x[(x >= 2.0**-126) & (x <= 2.0**126)]
    x = torch.cat([x, torch.nextafter(x, torch.tensor(1e38)), torch.nextafter(x[1:], torch.tensor(0.0))])
    x = x[x >= 2.0**-126]
    mine = fp8.ue8m0_decode(fp8.ue8m0_ceiling(x)).double().numpy()
    np.testing.assert_array_equal(mine, reference.power_of_two_above(x.double().numpy()))


def test_every_e2m1_code_and_packed_byte() -> None:
    codes = torch.arange(16, dtype=torch.int32).to(torch.uint8)
    np.testing.assert_array_equal(fp4.e2m1_decode(codes).double().numpy(), reference.E2M1)
    assert torch.equal(fp4.e2m1_encode(fp4.e2m1_decode(codes)), codes)
    packed = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    pairs = fp4.unpack(packed)
    assert pairs[2 * 0x53].item() == 3, "the even index is in the low half"
    assert pairs[2 * 0x53 + 1].item() == 5
    assert torch.equal(fp4.pack(pairs), packed)
    assert torch.equal(fp4.unpack(packed.view(torch.int8)), pairs)


def test_e2m1_rounds_every_bf16_value_as_the_table_does() -> None:
    x = all_bf16()
    mine = fp4.e2m1_decode(fp4.e2m1_encode(x)).double().numpy()
    np.testing.assert_array_equal(mine, reference.e2m1_round(x.double().numpy()))


@pytest.mark.parametrize("scale_code", range(1, 127))
def test_fp4_entries_for_every_scale_and_every_mantissa(scale_code: int) -> None:
    """All bfloat16 mantissas at amax and below, around each e4m3 scale: the quotient's rounding is exact division's."""
    scale = reference.E4M3[scale_code]
    mantissas = 1 + torch.arange(128) / 128
    top = reference.bf16(np.array(scale * 6.0)) * 1.0
    groups = []
    for power in range(-7, 1):
        values = (mantissas * top * 2.0**power).clamp(max=float(top)).to(torch.bfloat16).float()
        group = values.view(-1, 8)
        amax = torch.full((len(group), 1), float(top))
        groups.append(torch.cat([group, -group[:, :7], amax], 1))
    x = torch.cat(groups)
    packed, scales = fp4.quantise_main_entries(x)
    assert packed.shape == (len(x), 8)
    assert scales.shape == (len(x), 1)
    values = fp4.dequantise_main_entries(packed, scales)
    np.testing.assert_array_equal(values.double().numpy(), reference.fp4_entry(x.double().numpy()))
    assert torch.equal(values, values.to(torch.bfloat16).float()), "value x scale must be exact in bfloat16"


def test_scales_of_fp4_entries_for_every_bf16_amax() -> None:
    x = all_bf16()
    x = torch.nn.functional.pad(x[x >= 0].unsqueeze(1), (0, 15))
    values = fp4.dequantise_main_entries(*fp4.quantise_main_entries(x)).double().numpy()
    np.testing.assert_array_equal(values, reference.fp4_entry(x.double().numpy()))


def test_scales_of_window_entries_index_keys_and_activations_for_every_bf16_amax() -> None:
    x = all_bf16()
    x = x[(x >= 0) & (x < 2.0**120)]
    x = torch.nn.functional.pad(x.unsqueeze(1), (0, 31))
    x[:, 1] = x[:, 0] * 0.37
    pairs = [
        (fp8.dequantise_groups(*fp8.quantise_window_entries(x)), reference.fp8_entry),
        (fp4.dequantise_groups(*fp4.quantise_groups(x)), reference.fp4_index),
        (fp8.dequantise_groups(*fp8.quantise_activations(x, 32)), lambda v: reference.fp8_activation(v, 32)),
    ]
    for mine, oracle in pairs:
        np.testing.assert_array_equal(mine.double().numpy(), oracle(x.double().numpy()))
    assert fp8.quantise_window_entries(x)[1].min() == 127 - 13


def test_v4_entries_for_every_bf16_amax_and_every_tail() -> None:
    """Every bfloat16 value as the largest of a group, beside a smaller one, and as a rotated value."""
    x = all_bf16()
    x = x[x.abs() < 2.0**120]
    rows = torch.zeros(len(x), 128)
    rows[:, 0], rows[:, 1], rows[:, 64:] = x, x * 0.37, x.unsqueeze(1)
    entry = v4_format(128)
    assert (entry.data_bytes, entry.scale_bytes) == (64 + 128, 8)
    data, scales = entry.encode(rows)
    assert torch.equal(entry.decode(data, scales)[:, 64:], rows[:, 64:]), "rotated values are kept as they are"
    np.testing.assert_array_equal(
        entry.decode(data, scales).double().numpy(), reference.v4_entry(rows.double().numpy())
    )
    assert int(scales[:, 0].min()) == 127 - 13
    assert not scales[:, 1:].any(), "padding"
    with pytest.raises(ValueError, match="groups of 64"):
        v4_format(100)


@pytest.mark.parametrize("group", [32, 128])
def test_activations_of_random_rows(group: int) -> None:
    x = torch.randn(50, 512, generator=torch.Generator().manual_seed(group)) * 10
    x[3] = 0
    x[4, :group] = 1e-12
    codes, scales = fp8.quantise_activations(x, group)
    assert scales.shape == (50, 512 // group)
    mine = fp8.dequantise_groups(codes, scales).double().numpy()
    np.testing.assert_array_equal(mine, reference.fp8_activation(x.double().numpy(), group))


@pytest.mark.parametrize(("block", "shape"), [(32, (96, 64)), (128, (256, 384)), (128, (200, 130)), (32, (33, 31))])
def test_weight_blocks(block: int, shape: tuple[int, int]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    codes, scales = fp8.quantise_blocks(w, block)
    assert scales.shape == (-(-shape[0] // block), -(-shape[1] // block))
    mine = fp8.dequantise_blocks(codes, scales, block)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            tile = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scale = reference.power_of_two_above(w[tile].abs().max().double().numpy() / 448.0)
            expected = reference.e4m3_round(w[tile].double().numpy() / scale) * scale
            np.testing.assert_array_equal(mine[tile].double().numpy(), expected)


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 32"):
        fp8.quantise_activations(torch.zeros(2, 40), 32)
    with pytest.raises(ValueError, match="do not fit"):
        fp8.dequantise_blocks(torch.zeros(64, 64, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.uint8), 32)
