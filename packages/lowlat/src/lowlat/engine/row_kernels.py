"""Which kernels compute decode steps where there are two kinds: measured at the start, with this model's weights.

Legend of shape suffixes: R rows, H hidden, Y heads of the packed projection, D head dimension, S KV slots, K key-value
heads.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from lowlat.cache.layout import KVPool
from lowlat.layers.device_step import DeviceOps, DeviceStep, RowSegments
from lowlat.layers.triton.ahead import compile_all, rehearsal
from lowlat.layers.triton.row_attention import fits as attention_fits
from lowlat.layers.triton.row_product import fits, fits_head
from lowlat.layers.triton_ops import EVERY, TritonOps
from lowlat.models.decoder import GatedMLP
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.parallel.group import Communicator
from lowlat.platform.cuda import CudaLinear

log = logging.getLogger("lowlat.engine")

_ROWS = 8
_NAME = "silu"
_CONTEXT = 512
_LONGEST = 100_000
"""Tokens of a request with much in the cache, where the cache has room for so many."""
_REQUESTS = 8
_BYTES = 16 << 30
"""Of the cache that a chain reads, or one layer's."""
_REPEATS = 5
_SLOWER = 1.1
"""Times as long as a case may take that is not the first."""
# Of the largest entry, in bfloat16: both round what they multiply and what they return.
_TOLERANCE = 0.03

_NAMES = ("row_products", "row_heads", "one_row_attention", "row_attention")
"""Switches of `TritonOps`; those of products are 0 or not."""


class Chain(NamedTuple):
    """What is replayed to be timed."""

    of: str
    run: Callable[[], torch.Tensor]
    written: Callable[[], torch.Tensor] | None = None
    """What else it left that must be right."""


@torch.inference_mode()
def choose_row_kernels(
    model: DeviceDecoder, ops: DeviceOps, kv: KVPool, requests: int, width: int, communicator: Communicator
) -> dict[str, str]:
    """Let `ops` use kernels of ours where they are right, and faster in a chain of all layers than what they stand for:
    products of several rows by cuBLAS, those of layers and that with the head; and attention of one row, and of the
    `width` rows that a request may have, by the kernels of all other steps: of one request, and of several where they
    are faster for those too. Ranks choose the same.

    `kv`: where attention is tried, before there is anything in it. `requests`: the most of a step.

    Returns:
        what the log says, for those who ask later why a step takes as long as it does: for each of the switches whether
        it is used, and what each chain took without and with it.
    """
    assert isinstance(ops, TritonOps)
    times: dict[str, str] = {}
    products = _products(model, ops) if requests * width > 1 else None
    # Larger models gain less by it than their start would lose.
    head = None if products is None else _head(model, ops)
    wanted = {"row_products": [[products]] if products else [], "row_heads": [[head]] if head else []}
    try:
        wanted["one_row_attention"] = attention_chains(model, kv, requests, 1)
        wanted["row_attention"] = attention_chains(model, kv, requests, width) if width > 1 else []
        wanted = {name: groups for name, groups in wanted.items() if groups}
        _compile(wanted, ops, model.decoder.embedding_VH.device)
        for name, groups in wanted.items():
            _choose(name, groups, ops, times)
    except Exception as error:  # whatever a compiler or a driver says: the other kernels are always there
        for name in _NAMES:
            setattr(ops, name, 0)
        log.warning("decode steps go without kernels that are chosen by their times: %s", error)
        times["error"] = str(error)[:200]
    if communicator.shard.size > 1:
        chosen = torch.tensor([float(getattr(ops, name)) for name in _NAMES])
        for name, everywhere in zip(_NAMES, communicator.gather(chosen).amin(0).tolist(), strict=True):
            setattr(ops, name, int(everywhere))
    return {name: _words(getattr(ops, name)) if wanted.get(name) else "not tried" for name in _NAMES} | times


def _compile(wanted: dict[str, list[list[Chain]]], ops: TritonOps, device: torch.device) -> None:
    """All kernels of both ways, side by side."""
    with rehearsal() as found:
        for name, groups in wanted.items():
            for ours in (0, EVERY):
                setattr(ops, name, ours)
                for group in groups:
                    for chain in group:
                        chain.run()
    compile_all(found, device)


def _words(most: int) -> str:
    return {0: "not used", 1: "used for one request"}.get(most, "used")


def _choose(name: str, groups: list[list[Chain]], ops: TritonOps, times: dict[str, str]) -> None:
    """Ours for one request where the first group says so, and for more where the others do too."""
    better = len(list(itertools.takewhile(lambda group: _better(name, group, ops, times), groups)))
    most = EVERY if better == len(groups) else min(better, 1)
    setattr(ops, name, most)
    log.info("%s: %s", name.replace("_", " "), _words(most))


def _better(name: str, chains: list[Chain], ops: TritonOps, times: dict[str, str]) -> bool:
    """Whether ours are right, faster in the first chain and in all together, and in no other one much slower."""
    title, right, saved, ratios = name.replace("_", " "), True, 0.0, []
    for chain in chains:
        results, seconds = {}, {}
        for ours in (0, EVERY):
            setattr(ops, name, ours)
            results[ours], seconds[ours] = _replayed(chain)
        alike = all(map(_alike, results[0], results[EVERY]))
        right = right and alike
        saved += seconds[0] - seconds[EVERY]
        ratios.append(seconds[EVERY] / seconds[0])
        took = f"{seconds[0] * 1e6:.0f} us without, {seconds[EVERY] * 1e6:.0f} us with"
        times[f"{name}, {chain.of}"] = took if alike else f"{took}, but the result differs"
        log.info("%s: %s: %s", title, chain.of, times[f"{name}, {chain.of}"])
    return right and ratios[0] < 1 and saved > 0 and max(ratios) <= _SLOWER


def _alike(expected: torch.Tensor, got: torch.Tensor) -> bool:
    return float((got.float() - expected.float()).abs().max()) <= _TOLERANCE * float(expected.abs().max())


def _products(model: DeviceDecoder, ops: TritonOps) -> Chain | None:
    """The products of a step without what lies between, each layer's from the same input, so that roundings do not add
    up; None where no weight is small."""
    decoder = model.decoder
    layers = [(layer, layer.mlp) for layer in decoder.layers if isinstance(layer.mlp, GatedMLP)]
    weights = [linear for layer, mlp in layers for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down)]
    small = [linear for linear in weights if isinstance(linear, CudaLinear) and fits(_ROWS, linear.weight_OI)]
    if not layers or len(small) < len(weights):
        return None
    width = decoder.embedding_VH.shape[1]
    x_RH = torch.randn(_ROWS, width, device=decoder.embedding_VH.device).to(decoder.embedding_VH.dtype)
    heads_RX = x_RH.repeat(1, 8)

    def chain() -> torch.Tensor:
        outputs = []
        for layer, mlp in layers:
            ops.add_norm_product(x_RH, x_RH.clone(), layer.input_norm_H, layer.eps, layer.qkv)
            inputs = layer.query_heads * layer.head_dim
            ops.product(heads_RX[:, :inputs].contiguous(), layer.output)
            active_RI, _ = ops.add_norm_product(x_RH, x_RH.clone(), layer.mlp_norm_H, layer.eps, mlp.gate_up, _NAME)
            outputs.append(ops.product(active_RI, mlp.down))
        return torch.stack(outputs)

    return Chain("all layers", chain)


def _head(model: DeviceDecoder, ops: TritonOps) -> Chain | None:
    """The end of a step, four times; None where the head is not for the kernels."""
    decoder = model.decoder
    if not isinstance(decoder.head, CudaLinear) or not fits_head(_ROWS, decoder.head.weight_OI):
        return None
    x_RH = torch.randn(_ROWS, decoder.embedding_VH.shape[1], device=decoder.embedding_VH.device)
    x_RH = x_RH.to(decoder.embedding_VH.dtype)

    def chain() -> torch.Tensor:
        norm, eps, wide = decoder.norm_H, decoder.config.rms_norm_eps, torch.float32
        ends = [ops.add_norm_product(x_RH, x_RH.clone(), norm, eps, decoder.head, None, wide) for _ in range(4)]
        return ends[-1][0]

    return Chain("four steps", chain)


def attention_chains(model: DeviceDecoder, kv: KVPool, requests: int, width: int) -> list[list[Chain]]:
    """Attention of `width` rows a request: of one request, then of several, each behind few tokens and behind many;
    none where such steps are not for the kernels."""
    layer = model.decoder.layers[0]
    batch = _Batch(model, kv, 1, 1, width).step.segments[0]
    if not attention_fits(batch, layer.query_heads, layer.rotated_heads - layer.query_heads, layer.head_dim):
        return []
    page = kv.layout.page_size
    groups = []
    for count in dict.fromkeys((1, min(_REQUESTS, requests))):
        room = min(kv.layout.pages // count * page, len(model.decoder.ropes[layer.window].tables[0]), _LONGEST) - width
        sizes = [before for before in dict.fromkeys((min(_CONTEXT, room), room)) if before > 0]
        batches = [_Batch(model, kv, count, before, width) for before in sizes]
        chains = [chain for batch in batches if (chain := batch.chain(model, kv)) is not None]
        if not chains:
            break
        groups.append(chains)
    return groups


class _Batch:
    """Requests with `width` new rows each behind `before` tokens in the first pages of a pool."""

    def __init__(self, model: DeviceDecoder, kv: KVPool, count: int, before: int, width: int) -> None:
        device, page = model.decoder.embedding_VH.device, kv.layout.page_size
        self.of = f"{count} x {width} rows behind {before} tokens"
        length, rows = before + width, count * width
        self.each = -(-length // page)
        self.pages = count * self.each
        # In memory as `begin_decodes` and `begin_rows` leave them: kernels are compiled for how addresses are aligned.
        wide_XR = torch.empty(5, rows, dtype=torch.int64, device=device)
        every_B = torch.arange(count, device=device)
        positions_R, places_R = wide_XR[1], wide_XR[3 if width == 1 else 2]
        new_W = torch.arange(before, length, device=device)
        wide_XR[:] = new_W.repeat(count)
        places_R += (every_B * self.each * page).repeat_interleave(width)
        narrow_XB = torch.empty(4, count, dtype=torch.int32, device=device)
        slots, first, own, lengths = (narrow_XB[place] for place in ((0, 1, 2, 3) if width == 1 else (2, 3, 0, 1)))
        slots[:], first[:], own[:], lengths[:] = every_B, every_B * width, width, length
        batch = RowSegments(slots, first, own, lengths, width, length, tight=width > 1)
        table_TP = torch.arange(self.pages, dtype=torch.int32, device=device).view(count, self.each)
        self.step = DeviceStep(wide_XR[0], positions_R, places_R, [batch], table_TP, page, None)

    def chain(self, model: DeviceDecoder, kv: KVPool) -> Chain | None:
        """Each layer's attention over its own part of the pool and from the same rows, of as many layers as are enough
        to time, between the products that stand before and behind it: programs that start while those still run may
        crowd on some processors, so that what wins alone may lose in a step. None where no layer has so many pages."""
        layers = [
            (layer, keys, values)
            for index, (layer, keys, values) in enumerate(zip(model.decoder.layers, kv.keys, kv.values, strict=True))
            if kv.layout.pages_of(index) >= self.pages
        ]
        slots = self.pages * kv.layout.page_size
        layers = layers[: max(1, _BYTES // (slots * kv.layout.bytes_per_layer))]
        if not layers:
            return None
        layer, places_R = layers[0][0], self.step.write_slots_R
        heads = 2 * layer.rotated_heads - layer.query_heads
        device, dtype = model.decoder.embedding_VH.device, model.decoder.embedding_VH.dtype
        qkv_RYD = torch.randn(len(places_R), heads, layer.head_dim, device=device).to(dtype)
        stream_RH = torch.randn(len(places_R), model.decoder.embedding_VH.shape[1], device=device).to(dtype)
        pools = [pool for _, *both in layers for pool in both]
        for pool in pools:
            pool[:slots].normal_()

        def run() -> torch.Tensor:
            found = []
            for layer, keys, values in layers:
                model.ops.add_norm_product(None, stream_RH, layer.input_norm_H, layer.eps, layer.qkv)
                found.append(model.mixed(layer, qkv_RYD, keys, values, self.step))
                model.ops.product(found[-1], layer.output)
            return torch.stack(found)

        def written() -> torch.Tensor:
            found = torch.stack([pool[places_R] for pool in pools])
            for pool in pools:
                pool[places_R] = 0  # so that the other way has to write it, too
            return found

        return Chain(self.of, run, written)


def _replayed(chain: Chain) -> tuple[list[torch.Tensor], float]:
    """Results, and the seconds of a replay: the best of a few."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = chain.run()
    best = math.inf
    for _ in range(_REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) / 1e3)
    return [result.clone()] + ([] if chain.written is None else [chain.written()]), best
