"""Packed pages of cache entries: sizes, layout, and that nothing but the written entries changes."""

from __future__ import annotations

import dsv4_formats as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.layers import deepseek_entries as entries
from lowlat.layers.deepseek_entries import EntryPages

FORMATS = {
    "window": (entries.window_format, 512, 528, reference.fp8_entry),
    "v4": (entries.v4_format, 512, 584, reference.v4_entry),
    "main": (entries.main_format, 512, 288, reference.fp4_entry),
    "index": (entries.index_format, 128, 68, reference.fp4_index),
}


def values(count: int, dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(4 * torch.randn(count, 1, generator=generator))
    return (torch.randn(count, dim, generator=generator) * scale).to(torch.bfloat16).float()


@pytest.mark.parametrize("kind", FORMATS)
def test_entry_sizes_and_round_trip(kind: str) -> None:
    make, dim, size, oracle = FORMATS[kind]
    entry = make(dim)
    assert entry.bytes == size
    pages = EntryPages(entry, 5, 64, torch.device("cpu"), alignment=512)
    assert pages.bytes_PB.shape[1] % 512 == 0
    pages.bytes_PB.fill_(0x7F)
    x = values(100, dim)
    slots = torch.randperm(5 * 64, generator=torch.Generator().manual_seed(1))[:100]
    pages.write(slots, x)
    np.testing.assert_array_equal(pages.read(slots).double().numpy(), oracle(x.double().numpy()))
    assert torch.equal(pages.read(slots.view(4, 25)), pages.read(slots).view(4, 25, dim))
    assert torch.equal(pages.round(x.double()), pages.read(slots).double())


@pytest.mark.parametrize("kind", FORMATS)
def test_where_the_bytes_lie(kind: str) -> None:
    """Entry e of a page: data at e * data bytes, scales at page entries * data bytes + e * scale bytes."""
    make, dim, size, _ = FORMATS[kind]
    entry = make(dim)
    pages = EntryPages(entry, 3, 64, torch.device("cpu"))
    pages.bytes_PB.fill_(0xEE)
    x = values(1, dim, seed=3)
    pages.write(torch.tensor([64 + 17]), x)
    data, scales = entry.encode(x)
    page = pages.bytes_PB[1]
    assert torch.equal(page[17 * entry.data_bytes :][: entry.data_bytes], data[0])
    assert torch.equal(page[64 * entry.data_bytes + 17 * entry.scale_bytes :][: entry.scale_bytes], scales[0])
    changed = torch.ones_like(pages.bytes_PB, dtype=torch.bool)
    changed[1, 17 * entry.data_bytes :][: entry.data_bytes] = False
    changed[1, 64 * entry.data_bytes + 17 * entry.scale_bytes :][: entry.scale_bytes] = False
    assert int((~changed).sum()) == size
    assert bool((pages.bytes_PB[changed] == 0xEE).all())


@settings(max_examples=40, deadline=None)
@given(
    page=st.sampled_from([1, 2, 8, 64, 128]),
    writes=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9, unique=True), min_size=1, max_size=12),
    kind=st.sampled_from(sorted(FORMATS)),
)
def test_any_order_of_writes_reads_back_the_last(page: int, writes: list[list[int]], kind: str) -> None:
    make, dim, _, oracle = FORMATS[kind]
    pages = EntryPages(make(dim), 256 // page, page, torch.device("cpu"))
    kept: dict[int, torch.Tensor] = {}
    for seed, slots in enumerate(writes):
        x = values(len(slots), dim, seed)
        pages.write(torch.tensor(slots), x)
        kept |= dict(zip(slots, x, strict=True))
    slots_read = torch.tensor(sorted(kept))
    expected = oracle(torch.stack([kept[slot] for slot in sorted(kept)]).double().numpy())
    np.testing.assert_array_equal(pages.read(slots_read).double().numpy(), expected)


def test_plain_entries_are_kept_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        pages = EntryPages(entries.plain_format(48, dtype), 2, 8, torch.device("cpu"))
        x = torch.randn(5, 48, dtype=dtype)
        pages.write(torch.tensor([0, 15, 3, 7, 8]), x)
        assert torch.equal(pages.read(torch.tensor([8, 0])), x[[4, 0]])


def test_nothing_to_write_and_nothing_to_read() -> None:
    for make, dim, _, _ in FORMATS.values():
        pages = EntryPages(make(dim), 2, 8, torch.device("cpu"))
        none = torch.empty(0, dtype=torch.int64)
        pages.write(none, torch.empty(0, dim))
        assert pages.read(none).shape == (0, dim)
