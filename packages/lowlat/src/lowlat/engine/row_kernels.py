"""Which kernels compute steps of several rows of a small model: measured at the start, with this model's weights.

Legend of shape suffixes: R rows, H hidden, Y heads of the packed projection, D head dimension, S KV slots, K key-value
heads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from lowlat.layers.device_step import DeviceOps, DeviceStep, RowSegments
from lowlat.layers.triton.ahead import compile_all, rehearsal
from lowlat.layers.triton.row_attention import fits as attention_fits
from lowlat.layers.triton.row_product import fits, fits_head
from lowlat.layers.triton_ops import TritonOps
from lowlat.models.decoder import GatedMLP
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.platform.cuda import CudaLinear

log = logging.getLogger("lowlat.engine")

_ROWS = 8
_NAME = "silu"
_CONTEXT = 512
_PAGE = 16
_REPEATS = 5
# Of the largest entry, in bfloat16: both round what they multiply and what they return.
_TOLERANCE = 0.03

Chain = Callable[[], torch.Tensor]


@torch.inference_mode()
def choose_row_kernels(model: DeviceDecoder, ops: DeviceOps, width: int) -> None:
    """Let `ops` use kernels of ours where they are right, and faster in a chain of all layers than what they stand for:
    products by cuBLAS, those of layers and that with the head; and where requests have `width` rows, attention by the
    kernels of all other steps."""
    assert isinstance(ops, TritonOps)
    products = _products(model, ops)
    # Larger models gain less by it than their start would lose.
    head = None if products is None else _head(model, ops)
    wanted = {"row_products": products, "row_heads": head, "row_attention": _attention(model, width)}
    chains = {name: chain for name, chain in wanted.items() if chain is not None}
    try:
        _compile(chains, ops, model.decoder.embedding_VH.device)
        for name, chain in chains.items():
            _choose(name, chain, ops)
    except Exception as error:  # whatever a compiler or a driver says: the other kernels are always there
        ops.row_products = ops.row_heads = ops.row_attention = False
        log.warning("steps of several rows go without kernels of their own: %s", error)


def _compile(chains: dict[str, Chain], ops: TritonOps, device: torch.device) -> None:
    """All kernels of both ways, side by side."""
    with rehearsal() as found:
        for name, chain in chains.items():
            for ours in (False, True):
                setattr(ops, name, ours)
                chain()
    compile_all(found, device)


def _choose(name: str, chain: Chain, ops: TritonOps) -> None:
    results, seconds = {}, {}
    for ours in (False, True):
        setattr(ops, name, ours)
        results[ours], seconds[ours] = _replayed(chain)
    expected, got = results[False].float(), results[True].float()
    right = float((got - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())
    used = right and seconds[True] < seconds[False]
    setattr(ops, name, used)
    log.info(
        "%s: all layers take %.0f us without, %.0f us with (%s)",
        name.replace("_", " "),
        seconds[False] * 1e6,
        seconds[True] * 1e6,
        "used" if used else "not used" if right else "not used: the result differs",
    )


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

    return chain


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

    return chain


def _attention(model: DeviceDecoder, width: int) -> Chain | None:
    """Attention of a request's `width` rows behind `_CONTEXT` tokens, each layer's over a cache of its own and from the
    same rows; None where such steps are not for the kernels. Its result holds what was written to the caches, too."""
    device, dtype = model.decoder.embedding_VH.device, model.decoder.embedding_VH.dtype
    layers = model.decoder.layers
    layer = layers[0]
    kv_heads, dim = layer.rotated_heads - layer.query_heads, layer.head_dim
    places_R = torch.arange(_CONTEXT, _CONTEXT + width, device=device)
    length = _CONTEXT + width
    # In memory as `begin_rows` leaves them: kernels are compiled for how addresses are aligned.
    narrow = torch.tensor([[width], [length], [0], [0]], dtype=torch.int32, device=device)
    rows_B, lengths_B, slots_B, first_B = narrow
    batch = RowSegments(slots_B, first_B, rows_B, lengths_B, most_rows=width, longest=length, tight=True)
    pages = -(-length // _PAGE)
    table_TP = torch.arange(pages, dtype=torch.int32, device=device)[None]
    step = DeviceStep(places_R, places_R, places_R, [batch], table_TP, _PAGE, None)
    if width == 1 or not attention_fits(step, layer.query_heads, kv_heads, dim):
        return None
    qkv_RYD = torch.randn(width, layer.rotated_heads + kv_heads, dim, device=device).to(dtype)
    shape = (len(layers), 2, pages * _PAGE, kv_heads, dim)
    caches = torch.randn(shape, device=device).to(dtype)
    kept = list(zip(layers, caches, strict=True))

    def chain() -> torch.Tensor:
        outputs = [model.mixed(layer, qkv_RYD, keys, values, step) for layer, (keys, values) in kept]
        return torch.cat([torch.stack(outputs).flatten(), caches[:, :, places_R].flatten()])

    return chain


def _replayed(chain: Chain) -> tuple[torch.Tensor, float]:
    """The result, and the seconds of a replay: the best of a few."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = chain()
    best = math.inf
    for _ in range(_REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        best = min(best, before.elapsed_time(after) / 1e3)
    return result.clone(), best
