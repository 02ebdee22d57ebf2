"""Which kernels multiply several rows with small weights: measured at the start, with this model's weights.

Legend of shape suffixes: R rows, H hidden.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch

from lowlat.layers.device_step import DeviceOps
from lowlat.layers.triton.row_product import fits
from lowlat.layers.triton_ops import TritonOps
from lowlat.models.decoder import GatedMLP
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.platform.cuda import CudaLinear

log = logging.getLogger("lowlat.engine")

_ROWS = 8
_NAME = "silu"
_REPEATS = 5
# Of the largest entry, in bfloat16: both round what they multiply and what they return.
_TOLERANCE = 0.03


@torch.inference_mode()
def choose_row_products(model: DeviceDecoder, ops: DeviceOps) -> None:
    """Let `ops` use kernels of ours where they are right, and faster than cuBLAS in a chain of all layers' products."""
    assert isinstance(ops, TritonOps)
    chain = _chain(model, ops)
    if chain is None:
        return
    results, seconds = {}, {}
    try:
        for ours in (False, True):
            ops.row_products = ours
            results[ours], seconds[ours] = _replayed(chain)
    except Exception as error:  # whatever a compiler or a driver says: cuBLAS is always there
        ops.row_products = False
        log.warning("products of several rows go to cuBLAS: %s", error)
        return
    expected, got = results[False].float(), results[True].float()
    right = float((got - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())
    ops.row_products = right and seconds[True] < seconds[False]
    log.info(
        "products of %d rows: %.0f us a step by cuBLAS, %.0f us by our kernels (%s)",
        _ROWS,
        seconds[False] * 1e6,
        seconds[True] * 1e6,
        "used" if ops.row_products else "not used" if right else "not used: their result differs",
    )


def _chain(model: DeviceDecoder, ops: TritonOps) -> Callable[[], torch.Tensor] | None:
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


def _replayed(chain: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
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
