"""Stages of the dense step one by one, and steps with a planted error: for tests. Needs a plan with `alone`.

Suffixes: R rows, W words, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowlat_nvidia.dense import schedule
from lowlat_nvidia.dense.plan import BLOCKS, MAX_ROWS
from lowlat_nvidia.dense.schedule import Words
from lowlat_nvidia.dense.step import THREADS, DenseStep, StepTensors, _Params

ALL = -1
NOWHERE = 0xFFFFFFFF
INPUTS = {
    schedule.EMBEDDING: (),
    schedule.QKV: ("out", "out_square"),
    schedule.ATTENTION: ("qkv",),
    schedule.COMBINE: ("part", "lse"),
    schedule.OUTPUT: ("attn",),
    schedule.GATE_UP: ("mid", "mid_square"),
    schedule.DOWN: ("act",),
    schedule.LOGITS: ("out", "out_square"),
}
OUTPUTS = {
    schedule.EMBEDDING: ("out", "out_square"),
    schedule.QKV: ("qkv",),
    schedule.ATTENTION: ("part", "lse"),
    schedule.COMBINE: ("attn",),
    schedule.OUTPUT: ("mid", "mid_square"),
    schedule.GATE_UP: ("act",),
    schedule.DOWN: ("out", "out_square"),
    schedule.LOGITS: (),
}
# Of a folded step of one row. Its residual is part of the words; "held" is read of the layer before.
FOLDED_INPUTS = {
    schedule.QKV: ("held",),
    schedule.ATTENTION: ("qkv",),
    schedule.OUTPUT: ("part", "lse"),
    schedule.GATE_UP: ("held", "sums"),
    schedule.DOWN: ("held", "sums", "act"),
    schedule.LOGITS: ("held",),
}
FOLDED_OUTPUTS = {
    schedule.QKV: ("qkv",),
    schedule.ATTENTION: ("part", "lse"),
    schedule.OUTPUT: ("sums",),
    schedule.GATE_UP: ("act",),
    schedule.DOWN: ("held",),
    schedule.LOGITS: (),
}


class _AloneParams(_Params):
    _fields_ = (
        ("only_stage", ctypes.c_int),
        ("only_layer", ctypes.c_int),
        ("first_page", ctypes.c_int),
        ("end_page", ctypes.c_int),
        ("plant", ctypes.c_uint),
        ("residuals", ctypes.c_void_p),
    )


class AloneSteps:
    """Runs a bound step whole, or one stage of it on given words."""

    def __init__(self, step: DenseStep) -> None:
        if not step.plan.alone:
            raise ValueError("stages run alone in a step whose plan has alone=True")
        self.step = step
        self.words = Words(step.plan)
        shape = step.plan.shape
        self.residuals = torch.zeros(shape.layers, 2, MAX_ROWS, shape.hidden, device=step.state.device)
        """What the last whole step held in registers before the attention output and before down, float32."""

    def whole(self, inputs: StepTensors, plant: int = NOWHERE) -> tuple[Tensor, Tensor]:
        """All stages, with the sign of one word turned where `plant` says. Returns the words and logits [R, V]."""
        self.step.reset()
        self._launch(inputs, ALL, 0, 0, self.step.plan.stream_pages(), plant)
        rows = len(inputs.tokens_R)
        return self._words(rows).clone(), self.step.logits_RV[:rows].clone()

    def one(self, inputs: StepTensors, stage: int, layer: int, given_W: Tensor) -> tuple[Tensor, Tensor]:
        """One stage of a layer on its inputs among `given_W` and on `residuals`; all other words are empty before.

        Returns the words that it published, all others empty, and logits.
        """
        self.step.reset()
        rows = len(inputs.tokens_R)
        words_W = self._words(rows)
        for name in self.inputs(rows)[stage]:
            field = self.words.fields[name]
            source = layer - 1 if stage in (schedule.QKV, schedule.LOGITS) or name == "held" else layer
            for row in range(rows):
                from_ = self.words.place(source, row, name)
                for copy in range(self.copies(rows) if field.copied else 1):
                    to = self.words.place(source, row + copy * rows, name)
                    words_W[to : to + field.count] = given_W[from_ : from_ + field.count]
        before = words_W.clone()
        first, end = self.pages(stage, layer)
        only = 0 if stage == schedule.EMBEDDING else layer
        self.step.logits_RV.fill_(float("nan"))
        self._launch(inputs, stage, only, first, end, NOWHERE)
        fresh_W = torch.where(before == schedule.EMPTY, words_W, schedule.EMPTY)
        return fresh_W, self.step.logits_RV[:rows].clone()

    def inputs(self, rows: int) -> dict[int, tuple[str, ...]]:
        """Names of what each stage of a step of so many rows reads."""
        return FOLDED_INPUTS if rows == 1 and self.step.plan.folded else INPUTS

    def outputs(self, rows: int) -> dict[int, tuple[str, ...]]:
        """Names of what each stage of a step of so many rows publishes."""
        return FOLDED_OUTPUTS if rows == 1 and self.step.plan.folded else OUTPUTS

    def copies(self, rows: int) -> int:
        """How often what all blocks read is published."""
        copies = self.step.plan.kernel(rows).published
        return copies if rows <= MAX_ROWS // copies else 1

    def places(self, stage: int, layer: int, rows: int) -> Tensor:
        """Indices of all words that a stage publishes, copies included."""
        found = []
        target = -1 if stage == schedule.EMBEDDING else layer
        for name in self.outputs(rows)[stage]:
            field = self.words.fields[name]
            for row in range(rows * (self.copies(rows) if field.copied else 1)):
                found.append(torch.arange(field.count) + self.words.place(target, row, name))
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)

    def pages(self, stage: int, layer: int) -> tuple[int, int]:
        """The pages of each warp's weights that a stage reads."""
        s, fragments = self.step.plan.shape, self.step.plan.page_fragments
        hidden, qdim, inter = s.hidden // 256, s.qdim // 256, s.inter // 256
        sizes = {
            schedule.QKV: s.kv_heads * s.head_rows // BLOCKS // 8 * hidden,
            schedule.OUTPUT: s.hidden // BLOCKS // 8 * qdim,
            schedule.GATE_UP: 2 * s.inter // BLOCKS // 8 * hidden,
            schedule.DOWN: s.hidden // BLOCKS // 8 * inter,
        }
        first = layer * sum(sizes.values()) // fragments
        if stage == schedule.LOGITS:
            return first, self.step.plan.stream_pages()
        for name, size in sizes.items():
            if name == stage:
                return first, first + size // fragments
            first += size // fragments
        return 0, 0

    def _words(self, rows: int) -> Tensor:
        return self.step.exchange(rows)[: self.words.step]

    def _launch(self, inputs: StepTensors, stage: int, layer: int, first: int, end: int, plant: int) -> None:
        base = self.step.parameters(inputs)
        parameters = _AloneParams()
        ctypes.memmove(ctypes.addressof(parameters), ctypes.addressof(base), ctypes.sizeof(base))
        parameters.only_stage, parameters.only_layer = stage, layer
        parameters.first_page, parameters.end_page, parameters.plant = first, end, plant
        parameters.residuals = self.residuals.data_ptr()
        self.step.function(base.rows).launch(BLOCKS, THREADS, parameters, torch.cuda.current_stream().cuda_stream)
        self.step.check()
