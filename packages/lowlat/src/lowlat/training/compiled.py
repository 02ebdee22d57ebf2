"""A draft's network with its row-wise parts compiled: they are many small operators, each of which reads all rows."""

from __future__ import annotations

import copy

import torch

from lowlat.speculative.draft_network import DraftLayer, DraftNetwork


def compiled(network: DraftNetwork) -> DraftNetwork:
    """The same weights, for calls whose shapes do not change. Layers that mix are left as they are."""
    shared = (*network.parameters(), *network.buffers())
    fast = copy.deepcopy(network, {id(of): of for of in shared})
    fast.context = torch.compile(fast.context, dynamic=False)  # type: ignore[method-assign]
    for layer in fast.layers:
        if isinstance(layer, DraftLayer) and layer.attention_mixing is None:
            layer.before = torch.compile(layer.before, dynamic=False)  # type: ignore[method-assign]
            layer.after = torch.compile(layer.after, dynamic=False)  # type: ignore[method-assign]
    return fast
