"""The kernel library's side of the contract: checks the file, packs it, and calls the compiled step."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from lowlat_cpu import gguf, native, weights
from lowlat_plugin import (
    Binding,
    BuildContext,
    Code,
    Kernel,
    KernelSpec,
    Mode,
    Plan,
    Reason,
    Shape,
    StepInputs,
    decode_shapes,
)

COMPARED = "model.layers.0.self_attn.k_proj.weight"


class LlamaKernel(Kernel):
    """Decode and verify steps of a Llama whose checkpoint is a GGUF file."""

    def __init__(self, spec: KernelSpec) -> None:
        super().__init__(spec)
        self._library = native.load()
        self._model: weights.PackedModel | None = None
        self._step = native.Step()

    def model_reasons(self, context: BuildContext) -> Iterable[Reason]:
        """The file must be there, hold only what is covered, and hold the weights that the model has."""
        path = context.checkpoint
        if path is None or path.suffix != ".gguf":
            return [Reason(Code.LIBRARY, "checkpoint", str(path), "a .gguf file", "start with --model FILE.gguf")]
        try:
            file = gguf.GGUFFile(path)
        except (OSError, ValueError) as error:
            return [Reason(Code.LIBRARY, "checkpoint", str(error), "a readable GGUF file")]
        faults = weights.file_faults(file) or weights.shape_faults(file)
        reasons = [Reason(Code.LIBRARY, path.name, fault) for fault in faults]
        return reasons or _other_weights(file, context)

    def probe(self, context: BuildContext) -> Plan:
        widths = context.limits_widths
        shapes = decode_shapes(widths)
        if context.tokens_per_request > 1:
            shapes |= {Shape(Mode.VERIFY, requests, rows) for rows in widths for requests in range(1, rows)}
        file = gguf.GGUFFile(_path(context))
        return Plan(shapes, workspace_bytes=weights.packed_bytes(file), notes=self._library.instruction_set)

    def build(self, context: BuildContext) -> None:
        file = gguf.GGUFFile(_path(context))
        memory = context.workspace.empty((weights.packed_bytes(file),), torch.uint8).numpy()
        native.ask_for_huge_pages(memory)
        allocate = weights.in_one_piece(memory)
        self._model = weights.PackedModel(_path(context), self._library, allocate, torch.get_num_threads())
        self._longest = int(context.config["max_position_embeddings"])
        floats = self._library.workspace(c.byref(self._model.struct), native.MOST_ROWS, self._longest)
        self._scratch = context.workspace.empty((floats,), torch.float32)
        self._vocabulary = self._model.struct.vocabulary
        self._taps = (c.c_int32 * len(context.taps))(*context.taps)
        self._features_width = len(context.taps) * self._model.struct.hidden
        self._features_RX: torch.Tensor | None = None
        self._step.taps, self._step.tapped = c.addressof(self._taps), len(context.taps)

    def bind(self, binding: Binding) -> None:
        pools = binding.layers
        self._pools = pools
        self._keys = (c.c_void_p * len(pools))(*(layer.k_SHD.data_ptr() for layer in pools))
        self._values = (c.c_void_p * len(pools))(*(layer.v_SHD.data_ptr() for layer in pools))
        step, layout = self._step, binding.layout
        step.page_size = layout.page_size
        step.slot_stride, step.head_stride = layout.slot_stride, layout.head_stride
        step.keys, step.values = c.addressof(self._keys), c.addressof(self._values)
        step.workspace = self._scratch.data_ptr()

    def forward(self, step: StepInputs) -> torch.Tensor:
        logits_RV = step.logits_RV
        if logits_RV is None:
            logits_RV = torch.empty((len(step.token_ids_R), self._vocabulary), dtype=torch.float32)
        struct = self._step
        struct.rows, struct.requests = len(step.token_ids_R), len(step.lengths_Q)
        struct.table_stride = step.page_table_QP.stride(0)
        struct.tokens = step.token_ids_R.data_ptr()
        struct.positions = step.positions_R.data_ptr()
        struct.write_slots = step.write_slots_R.data_ptr()
        struct.query_start = step.query_start_Q1.data_ptr()
        struct.lengths = step.lengths_Q.data_ptr()
        struct.page_table = step.page_table_QP.data_ptr()
        struct.logits, struct.logits_stride = logits_RV.data_ptr(), logits_RV.stride(0)
        if self._features_width:
            self._features_RX = torch.empty(len(step.token_ids_R), self._features_width)
            struct.features = self._features_RX.data_ptr()
        assert self._model is not None
        self._library.step(c.byref(self._model.struct), c.byref(struct), self._longest)
        return logits_RV

    def state(self) -> Mapping[str, torch.Tensor]:
        return {} if self._features_RX is None else {"features": self._features_RX}

    def close(self) -> None:
        self._model = None

    def summary(self) -> str:
        return f"{self.spec.description}; {self._library.instruction_set} code"


def _path(context: BuildContext) -> Path:
    assert context.checkpoint is not None, "model_reasons has seen the file"
    return context.checkpoint


def _other_weights(file: gguf.GGUFFile, context: BuildContext) -> list[Reason]:
    """Compare one matrix with the loaded model's: a file that was replaced, or weights that were changed."""
    info = file.tensors["blk.0.attn_k.weight"]
    order = weights.halves_apart(info.shape[0], weights.sizes(file)["kv_heads"])
    ours = torch.from_numpy(gguf.dequantise(file.raw(info.name), info.kind, info.shape)[order])
    theirs = context.weights.get(COMPARED)
    if theirs.shape == ours.shape and torch.equal(theirs.cpu().float(), ours):
        return []
    wanted = "the weights in the GGUF file"
    return [Reason(Code.LIBRARY, COMPARED, "other numbers in the loaded model", wanted, "reload the model")]
