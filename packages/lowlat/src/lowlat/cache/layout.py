"""Where keys and values of a token lie: the one addressing that every kernel and host shares.

Legend of shape suffixes: S slots (one a token), K key-value heads, D head dimension.
"""

from __future__ import annotations

import msgspec
import torch


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Paged keys and values, K and V apart, each [slots, kv heads, head dim] a layer.

    Token `t` of a request lies in slot `page_table[t // page_size] * page_size + t % page_size`. Strides are in
    elements. One page beyond the pool's pages exists for padding rows: `padding_page`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str
    """`float32` or `bfloat16`."""

    @property
    def slots(self) -> int:
        """Slots in each tensor, the padding page included."""
        return (self.pages + 1) * self.page_size

    @property
    def padding_page(self) -> int:
        """Page that padding rows may write; no request ever reads it."""
        return self.pages

    @property
    def slot_stride(self) -> int:
        """Elements between the keys of neighbouring slots."""
        return self.kv_heads * self.head_dim

    @property
    def head_stride(self) -> int:
        """Elements between neighbouring heads of one slot."""
        return self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.layers * self.slot_stride * torch_dtype(self.dtype).itemsize


class KVPool:
    """The tensors of one `KVLayout`: `keys[layer]` and `values[layer]`, each [S, K, D]."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.layout = layout
        shape = (layout.slots, layout.kv_heads, layout.head_dim)
        dtype = torch_dtype(layout.dtype)
        # Not zeroed: on a CPU that would commit the whole pool, and no step reads a slot that none wrote.
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layout.layers)]
        for tensor in self.keys + self.values:
            tensor[layout.padding_page * layout.page_size :].zero_()

    def copy_state(self, source: int, target: int) -> None:
        """Keys and values are all there is: no state a request."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name used in configurations."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
