"""Cache entries in packed pages: 528, 288 and 68 bytes at V4.1's head dimensions, 584 at V4's, or plain numbers.

Legend of shape suffixes: E entries, D values of an entry, B bytes.

A page holds the data of all its entries, then the scales of all its entries, so that data rows keep their alignment
(see docs/decisions/0601-pages-keep-scales-apart.md).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from lowlat.layers import fp4, fp8

Encode = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Decode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class EntryFormat(msgspec.Struct, frozen=True):
    """A number format of cache entries: `values` to `data_bytes` and `scale_bytes`."""

    name: str
    values: int
    data_bytes: int
    scale_bytes: int
    encode: Encode
    decode: Decode

    @property
    def bytes(self) -> int:
        """Bytes of one entry."""
        return self.data_bytes + self.scale_bytes


def window_format(values: int) -> EntryFormat:
    """Sliding-window KV: e4m3 and a ue8m0 scale for 32 values; 528 bytes for 512."""
    return EntryFormat("window_fp8", values, values, values // 32, fp8.quantise_window_entries, fp8.dequantise_groups)


def main_format(values: int) -> EntryFormat:
    """Compressed KV: e2m1 pairs and an e4m3 scale for 16 values; 288 bytes for 512."""
    return EntryFormat(
        "main_fp4", values, values // 2, values // 16, fp4.quantise_main_entries, fp4.dequantise_main_entries
    )


def index_format(values: int) -> EntryFormat:
    """Index keys: e2m1 pairs and a ue8m0 scale for 32 values; 68 bytes for 128."""
    return EntryFormat("index_fp4", values, values // 2, values // 32, fp4.quantise_groups, fp4.dequantise_groups)


def v4_format(values: int, rotated: int = 64) -> EntryFormat:
    """V4's window and compressed KV: e4m3 and a ue8m0 scale for 64 values; the last `rotated` values are bfloat16.

    584 bytes for 512 values: 448 codes, 128 bytes of bfloat16; 7 scales and one byte of padding.

    Raises:
        ValueError: the values before the rotated ones do not divide into groups of 64.
    """
    plain, group = values - rotated, 64
    if plain < group or plain % group:
        raise ValueError(f"{plain} values that are not rotated do not divide into groups of {group}")
    scales = plain // group
    padding = -scales % 8

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale_bytes = fp8.quantise_window_entries(x[..., :plain], group)
        tail = x[..., plain:].to(torch.float32).to(torch.bfloat16).contiguous().view(torch.uint8)
        return torch.cat([codes, tail], -1), torch.nn.functional.pad(scale_bytes, (0, padding))

    def decode(data: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
        head = fp8.dequantise_groups(data[..., :plain].contiguous(), scale_bytes[..., :scales].contiguous())
        tail = data[..., plain:].contiguous().view(torch.bfloat16)
        return torch.cat([head, tail.to(torch.float32)], -1)

    return EntryFormat("v4_fp8", values, plain + 2 * rotated, scales + padding, encode, decode)


def plain_format(values: int, dtype: torch.dtype) -> EntryFormat:
    """Numbers as they are, for computing without quantisation."""
    size = dtype.itemsize

    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        data = x.to(dtype).contiguous().view(torch.uint8)
        return data, data.new_empty(*data.shape[:-1], 0)

    def decode(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return data.contiguous().view(dtype)

    return EntryFormat("plain", values, values * size, 0, encode, decode)


class EntryPages:
    """`pages` pages of `page_entries` entries; entry slot s is entry s % page_entries of page s // page_entries.

    `bytes_PB` [pages, page bytes] is the memory; a page is padded to a multiple of `alignment` bytes.
    """

    def __init__(
        self, entry: EntryFormat, pages: int, page_entries: int, device: torch.device, *, alignment: int = 64
    ) -> None:
        self.format = entry
        self.page_entries = page_entries
        self.scales_at = page_entries * entry.data_bytes
        page_bytes = self.scales_at + page_entries * entry.scale_bytes
        page_bytes += -page_bytes % alignment
        # Not zeroed: no entry is read before it is written.
        self.bytes_PB = torch.empty(pages, page_bytes, dtype=torch.uint8, device=device)
        data = self.bytes_PB[:, : self.scales_at]
        scales = self.bytes_PB[:, self.scales_at : self.scales_at + page_entries * entry.scale_bytes]
        self._data = data.view(pages, page_entries, entry.data_bytes)
        self._scales = scales.view(pages, page_entries, entry.scale_bytes)

    def write(self, slots_E: torch.Tensor, values_ED: torch.Tensor) -> None:
        """Encode and store entries."""
        data, scales = self.format.encode(values_ED)
        page, place = self._where(slots_E)
        self._data[page, place] = data
        self._scales[page, place] = scales

    def read(self, slots_E: torch.Tensor) -> torch.Tensor:
        """Decoded values [..., D]; `slots_E` may have any shape."""
        page, place = self._where(slots_E)
        return self.format.decode(self._data[page, place], self._scales[page, place])

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """What reading gives back after writing `values`, in their type."""
        return self.format.decode(*self.format.encode(values)).to(values.dtype)

    def _where(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page = torch.div(slots, self.page_entries, rounding_mode="floor")
        return page, slots - page * self.page_entries
