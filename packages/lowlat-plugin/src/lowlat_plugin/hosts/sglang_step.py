"""A step of SGLang's as the contract's: what its built objects are asked to plan and to run.

Shape suffixes: R rows, Q requests, P pages a request, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.kernel import Kernel, Plan
from lowlat_plugin.registry import Candidate
from lowlat_plugin.routing import Counters, Path, Route, RoutingTable
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Binding, KVLayout, LayerKV, StepInputs

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_INPUTS = Route(Path.GENERAL, "special-inputs")


class Steps:
    """What both of SGLang's contracts need. Binds at the first step, when pools exist, and again when they moved.

    `counters` counts calls of Python: eager steps, warm-ups and captures. A replayed graph does not pass here.
    """

    def __init__(self, candidate: Candidate, kernel: Kernel, plan: Plan, facts: EngineFacts, model: Any) -> None:
        self.candidate, self.kernel, self.facts = candidate, kernel, facts
        self.table = RoutingTable(plan.shapes, "sglang")
        self.counters = Counters()
        self.widths = tuple(sorted({shape.rows for shape in plan.shapes}))
        self._layers = int(facts.config["num_hidden_layers"])
        self._seal: tuple[int, ...] = ()
        self._starts: dict[tuple[int, int], Tensor] = {}
        self._notes = plan.notes

    def summary(self) -> str:
        return f"{self.kernel.summary()} {self._notes}".strip()

    def route(self, rows: int, batch: Any, special: bool) -> Route:
        mode = _mode(batch.forward_mode)
        route = self.table.route(mode, int(batch.batch_size), rows)
        if route.kernels and (special or _wants_more(batch)):
            route = SPECIAL_INPUTS
        self.counters.add(route)
        return route

    def run(self, input_ids: Tensor, positions: Tensor, batch: Any) -> Any:
        """Bind if pools are new, run the kernels, return what SGLang's models return."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        binding = self._binding(backend.token_to_kv_pool)
        if binding.addresses() != self._seal:
            self.kernel.bind(binding)
            self._seal = binding.addresses()
        step = self._inputs(input_ids, positions, batch, backend.req_to_token_pool.req_to_token)
        return LogitsProcessorOutput(next_token_logits=self.kernel.forward(step))

    def _binding(self, pool: Any) -> Binding:
        first = int(getattr(pool, "start_layer", 0) or 0)
        layers = tuple(LayerKV(*pool.get_kv_buffer(first + index)) for index in range(self._layers))
        k_SHD = layers[0].k_SHD
        slots, heads, dim = k_SHD.shape
        dtype = str(k_SHD.dtype).removeprefix("torch.")
        stride, head_stride, _ = k_SHD.stride()
        layout = KVLayout(heads, dim, self.facts.page_size, dtype, stride, head_stride, slots)
        return Binding(1, layout, layers)

    def _inputs(self, input_ids: Tensor, positions: Tensor, batch: Any, req_to_token: Tensor) -> StepInputs:
        mode, requests, rows = _mode(batch.forward_mode), int(batch.batch_size), int(input_ids.shape[0])
        # In a verify step SGLang's lengths do not count the rows yet.
        lengths = batch.seq_lens if mode is Mode.DECODE else batch.seq_lens + rows // requests
        size, table_rows_Q = self.facts.page_size, None
        if size == 1 and self.kernel.table_rows:
            table_QP, table_rows_Q = req_to_token, batch.req_pool_indices.int()
        else:
            slots_QT = req_to_token.index_select(0, batch.req_pool_indices)
            table_QP = slots_QT if size == 1 else slots_QT[:, ::size] // size
        return StepInputs(
            mode,
            input_ids.long(),
            positions.long(),
            self._query_start(requests, rows, input_ids),
            lengths.int(),
            table_QP.int(),
            batch.out_cache_loc.long(),
            table_rows_Q=table_rows_Q,
        )

    def _query_start(self, requests: int, rows: int, like: Tensor) -> Tensor:
        """Kept for each shape: a captured graph must find it where it was."""
        import torch

        key = (requests, rows)
        if key not in self._starts:
            starts = torch.arange(0, rows + 1, rows // requests, dtype=torch.int32, device=like.device)
            self._starts[key] = starts
        return self._starts[key]


class MegakernelSteps(Steps):
    """What SGLang's NVIDIA contract calls a built megakernel."""

    draft_sampler = None

    def plan(self, input_ids: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.kernels.plugin_kernels.nvidia.spec import Step

        special = _given(args) or _given(kwargs.values())
        route = self.route(int(input_ids.shape[0]), forward_batch, special)
        mode = "decode" if _mode(forward_batch.forward_mode) is Mode.DECODE else "target_verify"
        return Step(mode=mode, rows=int(input_ids.shape[0])) if route.kernels else None

    def forward(
        self, step: Any, original: Any, input_ids: Any, positions: Any, forward_batch: Any, *_: Any, **__: Any
    ) -> Any:
        return self.run(input_ids, positions, forward_batch)


class MonokernelSteps(Steps):
    """What SGLang's AMD contract calls built monokernels; it offers no way back to the model's own forward."""

    def forward(self, plan: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        special = _given(args) or _given(kwargs.values())
        route = self.route(int(input_ids.shape[0]), forward_batch, special)
        if not route.kernels:
            raise RuntimeError(f"{self.candidate.key} does not cover this step ({route.reason}): {plan.key}")
        return self.run(input_ids, positions, forward_batch)


def _mode(forward_mode: Any) -> Mode:
    if forward_mode.is_decode():
        return Mode.DECODE
    return Mode.VERIFY if forward_mode.is_target_verify() else Mode.PREFILL


def _given(values: Any) -> bool:
    """Whether a forward got more than ids, positions and batch: embeddings, or tensors of a pipeline."""
    return any(value is not None and value is not False for value in values)


def _wants_more(batch: Any) -> bool:
    """Hidden states, or embeddings in place of ids."""
    capture = getattr(batch, "capture_hidden_mode", None)
    wanted = capture is not None and bool(getattr(capture, "need_capture", lambda: False)())
    return wanted or getattr(batch, "input_embeds", None) is not None
