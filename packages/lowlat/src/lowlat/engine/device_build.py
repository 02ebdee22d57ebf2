"""From a model on a GPU to the runner that keeps its state there, where the model and the configuration allow it."""

from __future__ import annotations

import logging
import time

import torch

from lowlat.cache.layout import KVPool
from lowlat.engine.batch import PlanLimits
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.device_sampler import SamplingMode
from lowlat.engine.graphs import CudaGraphs, EagerBodies, StepBodies
from lowlat.engine.runner import ModelRunner
from lowlat.layers.device_reference import ReferenceOps
from lowlat.layers.device_step import DeviceOps
from lowlat.layers.row_sums import CommunicatorSums, RowSums
from lowlat.models.base import Model
from lowlat.models.decoder import Decoder
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.parallel.group import Communicator
from lowlat.parallel.peer_memory import PeerMemoryError
from lowlat_plugin import LowLatency

log = logging.getLogger("lowlat.engine")

# A step with a chunk may hold up running requests for so long, or for three decode steps.
_LONGEST_STEP_S = 0.010
_LEAST_CHUNK = 64
# What a step with a chunk takes beside one whose tokens have nothing to look back at: 8,000 tokens of context or so.
_ATTENTION = 1.3

# Captured before the first request; other modes are when the first request with them comes.
_USUAL = [SamplingMode(), SamplingMode(draws=True), SamplingMode(draws=True, filters=True)]


def device_runner(model: Model, host: ModelRunner, limits: PlanLimits, *, width: int) -> DeviceRunner | None:
    """A runner around `host` whose steps wait for nobody; None, with a warning that says why, where `host` must do.

    `width`: rows that a request may have in a decode step.
    """
    reason = _host_only(model, width, host.communicator.shard.size)
    if reason is not None:
        log.warning("steps are planned and sampled on the host, one after another: %s", reason)
        return None
    assert isinstance(model, Decoder)
    assert isinstance(host.kv, KVPool)
    device = host.kv.keys[0].device
    ops, fused = device_ops(device)
    device_model = DeviceDecoder(model, ops, _row_sums(model, host.communicator, ops, fused=fused))
    bodies: StepBodies = EagerBodies()
    chosen: dict[str, str] = {}
    if fused:
        from lowlat.engine.row_kernels import choose_row_kernels

        chosen = choose_row_kernels(device_model, ops, host.kv, limits.max_batch, width, host.communicator)
    if device.type == "cpu":
        pass
    elif not fused:
        log.warning("triton cannot be imported: attention and norms run as plain PyTorch, without graphs, and slowly")
    elif not device_model.capturable(limits.max_batch * width):
        log.warning("decode steps run without graphs: this model's experts are chosen by the host")
    else:
        bodies = CudaGraphs(device)
    runner = DeviceRunner(device_model, host, limits, bodies)
    runner.chosen = chosen
    return runner


def prepare(runner: DeviceRunner, chunk_tokens: int) -> int:
    """Capture the usual decode steps, and those with chunks of up to `chunk_tokens` tokens.

    Returns the tokens of a chunk to plan with: fewer, where running requests would wait too long for a step.
    """
    started = time.monotonic()
    rows = min(chunk_tokens, runner.max_pages * runner.kv.layout.page_size)
    _compile_ahead(runner, rows)
    # With guesses there are several widths to each.
    runner.prepare(_USUAL if runner.verifier is None else _USUAL[:2])
    runner.prepare_chunks(rows)
    log.info("%d graphs of steps captured in %.1f s", runner.bodies.captured, time.monotonic() - started)
    if not runner.bodies.captured:
        return chunk_tokens
    longest = max(_LONGEST_STEP_S, 3 * _seconds(runner, 0))
    while rows > _LEAST_CHUNK and _seconds(runner, rows) * _ATTENTION > longest:
        chunk_tokens = rows = max(_LEAST_CHUNK, rows // 2)
    log.info("chunks of up to %d tokens", chunk_tokens)
    return chunk_tokens


def _compile_ahead(runner: DeviceRunner, rows: int) -> None:
    """Compile the kernels of the usual steps side by side: the start waits for one after another otherwise."""
    if not isinstance(runner.bodies, CudaGraphs) or runner.verifier is not None:
        return  # steps that check guesses are measured as soon as they are captured
    from lowlat.layers.triton.ahead import compile_all, rehearsal

    started = time.monotonic()
    try:
        with runner.bodies.rehearsed(), runner.model.few_layers(), rehearsal() as found:
            runner.prepare(_USUAL)
            runner.prepare_chunks(rows)
        compile_all(found, runner.device)
    except Exception as error:  # whatever a version of Triton says: kernels are compiled when they come, too
        log.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
        return
    log.info("%d kernels compiled or found in %.1f s", len(found), time.monotonic() - started)


def _seconds(runner: DeviceRunner, rows: int) -> float:
    """As rank 0 measures it: ranks must run the same steps, and what they run next depends on it."""
    measured = torch.tensor([runner.seconds(rows)], dtype=torch.float64)
    return float(runner.host.communicator.broadcast(measured))


def use_kernels(runner: DeviceRunner, low: LowLatency) -> None:
    """Let a proven kernel library compute decode steps, and capture the usual ones."""
    runner.use_kernels(low, _USUAL)
    log.info("%d decode graphs, those of kernels among them", runner.bodies.captured)


def device_ops(device: torch.device) -> tuple[DeviceOps, bool]:
    """The operations between products for a device, and whether they are fused kernels."""
    if device.type == "cpu":
        return ReferenceOps(), False
    try:
        from lowlat.layers.triton.early import starts_early
        from lowlat.layers.triton_ops import TritonOps
    except ImportError:
        return ReferenceOps(), False
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonOps(processors, early_start=starts_early(device)), True


def _row_sums(model: Decoder, communicator: Communicator, ops: DeviceOps, *, fused: bool) -> RowSums | None:
    """How the ranks of a group join their rows: by pushes where GPUs see each other's memory."""
    if communicator.shard.size == 1:
        return None
    sums = CommunicatorSums(communicator, ops)
    if not fused:
        return sums
    from lowlat.layers.push_sums import PushSums
    from lowlat.layers.triton.early import starts_early

    width, dtype, device = model.embedding_VH.shape[1], model.embedding_VH.dtype, model.embedding_VH.device
    try:
        pushes = PushSums(communicator, sums, width, dtype, device, early_start=starts_early(device))
    except PeerMemoryError as error:
        log.warning("ranks sum all rows by NCCL: %s", error)
        return sums
    log.info("ranks sum up to %d rows by pushes into each other's memory, more by NCCL", pushes.rows)
    return pushes


def _host_only(model: Model, width: int, ranks: int) -> str | None:
    if width > 1 and ranks > 1:
        return "guesses of several ranks are made and checked there (--spec off or --tp 1 changes that)"
    if not isinstance(model, Decoder):
        return "this model family has no forward for state on the device"
    return None
