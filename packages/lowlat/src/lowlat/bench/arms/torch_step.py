"""The same decode step as an ordinary PyTorch user writes it, in a CUDA graph where there is a GPU.

Attention covers exactly the context and the new token, without a mask, so that the fast attention kernels take it. For
`torch-compile` each layer is compiled with the addition before its first norm inside: nothing that the whole graph
would fuse is left apart, and it takes seconds instead of a minute.

Legend of shape suffixes: B requests (one row each), H hidden, N query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from lowlat.bench.arms.base import ArmUnavailableError, StepCase
from lowlat.bench.presets import DenseShape
from lowlat.bench.region_recorder import Marks

Weights = dict[str, torch.Tensor]


class TorchStep:
    """A dense decoder with random weights, a static cache, and one row for each request at position `context`."""

    def __init__(self, case: StepCase, regions: Marks | None = None, *, compiled: bool = False) -> None:
        self.shape = shape = case.dense
        self.regions = regions
        self.device = torch.device(case.device)
        self.dtype = getattr(torch, case.dtype)
        generator = torch.Generator(device=self.device).manual_seed(case.seed)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=self.device, dtype=self.dtype) * 0.02

        def ones(size: int) -> torch.Tensor:
            return torch.ones(size, device=self.device, dtype=self.dtype)

        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        cache = (case.requests, shape.kv_heads, case.context + 1, shape.head_dim)
        self.layers = [
            {
                "attention_norm": ones(shape.hidden),
                "mlp_norm": ones(shape.hidden),
                "query_norm": ones(shape.head_dim),
                "key_norm": ones(shape.head_dim),
                "qkv": random(query + 2 * key_value, shape.hidden),
                "out": random(shape.hidden, query),
                "gate_up": random(2 * shape.intermediate, shape.hidden),
                "down": random(shape.hidden, shape.intermediate),
                "keys": random(*cache),
                "values": random(*cache),
            }
            for _ in range(shape.layers)
        ]
        self.embedding = random(shape.vocab, shape.hidden)
        self.head = self.embedding if shape.tied else random(shape.vocab, shape.hidden)
        self.norm = ones(shape.hidden)
        self.tokens = torch.zeros(case.requests, dtype=torch.long, device=self.device)
        self.position = torch.tensor([case.context], device=self.device)
        angles = case.context / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        both = torch.cat((angles, angles)).to(self.device)
        self.cos_D, self.sin_D = both.cos().to(self.dtype), both.sin().to(self.dtype)
        self.layer: Callable[..., tuple[torch.Tensor, torch.Tensor]] = self._layer
        if compiled:
            self.layer = torch.compile(self._layer, fullgraph=True, dynamic=False)

    def _rotate(self, x_BKD: torch.Tensor) -> torch.Tensor:
        half = self.shape.head_dim // 2
        turned = torch.cat((-x_BKD[..., half:], x_BKD[..., :half]), -1)
        return x_BKD * self.cos_D + turned * self.sin_D

    @contextlib.contextmanager
    def _region(self, name: str) -> Iterator[None]:
        if self.regions is None:
            yield
        else:
            with self.regions.region(name):
                yield

    def _attention(self, layer: Weights, h_BH: torch.Tensor) -> torch.Tensor:
        shape: DenseShape = self.shape
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q, k, v = F.linear(h_BH, layer["qkv"]).split([query, key_value, key_value], -1)  # type: ignore[no-untyped-call]
        q_BND = q.view(-1, shape.heads, shape.head_dim)
        k_BKD, v_BKD = (part.view(-1, shape.kv_heads, shape.head_dim) for part in (k, v))
        if shape.qk_norm:
            q_BND = F.rms_norm(q_BND, (shape.head_dim,), layer["query_norm"], shape.eps)
            k_BKD = F.rms_norm(k_BKD, (shape.head_dim,), layer["key_norm"], shape.eps)
        q_BND, k_BKD = self._rotate(q_BND), self._rotate(k_BKD)
        layer["keys"].index_copy_(2, self.position, k_BKD.unsqueeze(2))
        layer["values"].index_copy_(2, self.position, v_BKD.unsqueeze(2))
        mixed = F.scaled_dot_product_attention(q_BND.unsqueeze(2), layer["keys"], layer["values"], enable_gqa=True)
        return F.linear(mixed.reshape(-1, query), layer["out"])

    def _mlp(self, layer: Weights, h_BH: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(h_BH, layer["gate_up"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer["down"])

    def _layer(self, x_BH: torch.Tensor, delta_BH: torch.Tensor, layer: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream before the MLP is added, and what the MLP adds; `delta_BH` is what the layer before added."""
        size = (self.shape.hidden,)
        x_BH = x_BH + delta_BH
        with self._region("attention"):
            x_BH = x_BH + self._attention(layer, F.rms_norm(x_BH, size, layer["attention_norm"], self.shape.eps))
        with self._region("mlp"):
            return x_BH, self._mlp(layer, F.rms_norm(x_BH, size, layer["mlp_norm"], self.shape.eps))

    def __call__(self) -> torch.Tensor:
        """Greedy next tokens [requests] of the step; regions are marked where a recorder was given."""
        x_BH = F.embedding(self.tokens, self.embedding)
        delta_BH = torch.zeros_like(x_BH)
        for layer in self.layers:
            with self._region("layer"):
                x_BH, delta_BH = self.layer(x_BH, delta_BH, layer)
        with self._region("head"):
            x_BH = F.rms_norm(x_BH + delta_BH, (self.shape.hidden,), self.norm, self.shape.eps)
            return F.linear(x_BH, self.head).argmax(-1)

    def reference_bytes(self) -> int:
        """Bytes of all weights that the step reads whole, counted on the tensors themselves."""
        names = ["attention_norm", "mlp_norm", "qkv", "out", "gate_up", "down"]
        names += ["query_norm", "key_norm"] if self.shape.qk_norm else []
        tensors = [layer[name] for layer in self.layers for name in names] + [self.norm, self.head]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def capture(step: Callable[[], object]) -> Any:
    """A CUDA graph of `step`, warmed up on a side stream first."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.step = step  # its tensors must live as long as the graph that reads and writes them
    return graph


def time_cuda(run: Callable[[], object], steps: int) -> list[float]:
    """Microseconds from the end of one run to the end of the next, for `steps` runs queued behind one more.

    So the time in which the host launches counts only where the device waits for it, as in a server that runs ahead.
    """
    make: Callable[..., Any] = torch.cuda.Event
    ends = [make(enable_timing=True) for _ in range(steps + 1)]
    for end in ends:
        run()
        end.record()
    ends[-1].synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(ends)]


def time_cpu(run: Callable[[], object], steps: int) -> list[float]:
    """Microseconds of each of `steps` runs."""
    samples = []
    for _ in range(steps):
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


class TorchArm:
    """`torch-eager-graph` and `torch-compile`. On a CPU there is no graph, and the note says so."""

    weight_bytes: int | None = None

    def __init__(self, case: StepCase, *, compiled: bool) -> None:
        if case.dense and case.model is not None:
            raise ArmUnavailableError("the plain PyTorch step has random weights only: leave out --model-folder")
        self._steps = case.steps
        self._cuda = case.device == "cuda"
        self._compiled = compiled
        self.note = "" if self._cuda else "no CUDA graph on a CPU"
        with torch.inference_mode():
            step = TorchStep(case, compiled=compiled)
            for _ in range(2):
                step()
            self._run: Callable[[], object] = capture(step).replay if self._cuda else step

    def measure(self) -> list[float]:
        """Microseconds of each step."""
        with torch.inference_mode():
            return time_cuda(self._run, self._steps) if self._cuda else time_cpu(self._run, self._steps)

    def close(self) -> None:
        """Drop weights and graph, and what was compiled: each case compiles the layer for its own sizes, and PyTorch
        refuses the ninth version of a function."""
        del self._run
        if self._compiled:
            torch.compiler.reset()
        if self._cuda:
            torch.cuda.empty_cache()
