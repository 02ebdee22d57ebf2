"""The dense step's schedule in plain Python: what each stage publishes, computed from what the stages before published.

A step leaves all exchanged words behind, so every stage of every layer can be looked at after it: `Schedule.stages`
takes the words themselves as inputs, and a wrong element shows in the stage that made it alone. Sums are float64 of the
same rounded operands; what is compared is therefore the kernel's own arithmetic, within a few roundings.

Suffixes: R rows, W words, N outputs, K inputs, G query heads of a KV head, D head dimension, T tokens, S splits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowlat_nvidia.dense.pack import DenseWeights, order_qkv
from lowlat_nvidia.dense.plan import BLOCKS, MAX_ROWS, UNIT_TOKENS, WARPS, DensePlan
from lowlat_nvidia.dense.rows import StepRow

EMPTY = -1
EMBEDDING, QKV, ATTENTION, COMBINE, OUTPUT, GATE_UP, DOWN, LOGITS = 1, 0, 2, 3, 4, 5, 6, 7
NAMES = {
    EMBEDDING: "embedding", QKV: "q, k and v", ATTENTION: "attention", COMBINE: "sum of splits",
    OUTPUT: "attention output", GATE_UP: "gate and up", DOWN: "down", LOGITS: "logits",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Field:
    """Words of a row that one stage publishes: `first` to `first + count`; bfloat16 pairs or float32."""

    name: str
    first: int
    count: int
    pairs: bool
    copied: bool


class Words:
    """The exchange buffers' places, as layout.cuh has them: `fields` by name, `row` words of a row of a layer."""

    def __init__(self, plan: DensePlan) -> None:
        s = plan.shape
        splits = BLOCKS // s.kv_heads
        self.fields: dict[str, Field] = {}
        at = 0
        for name, count, pairs, copied in (
            ("qkv", s.kv_heads * s.head_rows, False, False),
            ("part", splits * s.qdim, False, False),
            ("lse", splits * s.q_heads, False, False),
            ("attn", s.qdim // 2, True, True),
            ("mid", s.hidden // 2, True, True),
            ("mid_square", BLOCKS, False, True),
            ("act", s.inter // 2, True, True),
            ("out", s.hidden // 2, True, True),
            ("out_square", BLOCKS, False, True),
        ):
            self.fields[name] = Field(name, at, count, pairs, copied)
            at += count
        self.row = at
        # Of a step of one row, folded: in the room of rows that it does not have.
        self.fields["held"] = Field("held", 4 * at, s.hidden, False, True)
        self.fields["sums"] = Field("sums", 4 * at + s.hidden, WARPS * s.hidden, False, False)
        self.layer = MAX_ROWS * at
        self.step = (s.layers + 1) * self.layer
        assert self.layer == plan.layer_words(), "plan and schedule count words alike"

    def place(self, layer: int, row: int, name: str) -> int:
        """Index of a field's first word within a step's words; layer -1 precedes layer 0."""
        index = layer if layer >= 0 else self.step // self.layer - 1
        return index * self.layer + row * self.row + self.fields[name].first

    def read(self, words_W: Tensor, layer: int, row: int, name: str) -> Tensor:
        """A field's elements as float64, from the words (int32) of a step."""
        field = self.fields[name]
        first = self.place(layer, row, name)
        part = words_W[first : first + field.count]
        return part.view(torch.bfloat16).double() if field.pairs else part.view(torch.float32).double()


@dataclass(slots=True)
class Made:
    """What a stage of a layer should have made of one row, and how far each element may be from that.

    `name` is a field of `Words`, or `key`, `value` (in the cache) or `logits`.
    """

    stage: int
    layer: int
    row: int
    name: str
    expected: Tensor
    tolerance: Tensor


@dataclass(slots=True)
class Fault:
    """The element of a stage that is farthest beyond its tolerance."""

    stage: str
    layer: int
    row: int
    name: str
    element: int
    found: float
    expected: float
    wrong: int
    """Elements of this row and field that are beyond."""

    def __str__(self) -> str:
        where = f"stage '{self.stage}' of layer {self.layer}, row {self.row}: {self.name}[{self.element}]"
        return f"{where} is {self.found:.6g} instead of {self.expected:.6g}; {self.wrong} elements are wrong"


def bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


class Schedule:
    """Interprets one step. `pools` hold the keys and values after it: what the kernel wrote is taken as it is.

    Keeps the weights in float64: for small models.
    """

    def __init__(
        self,
        plan: DensePlan,
        weights: DenseWeights,
        rotary: Tensor,
        pools: list[tuple[Tensor, Tensor]],
        page_size: int,
        rows: list[StepRow],
        words_W: Tensor,
    ) -> None:
        self.plan, self.weights, self.rotary = plan, weights, rotary.double()
        self.pools, self.page_size, self.rows = pools, page_size, rows
        self.words = Words(plan)
        self._words_W = words_W
        self.folded = plan.folded and len(rows) == 1
        self._matrices: dict[tuple[int, str], Tensor] = {}

    def faults(self, logits_RV: Tensor) -> list[Fault]:
        """Every row and field that is not what its stage should have made of its own inputs."""
        found = []
        for made in itertools.chain(self.stages(), self.logits()):
            actual = logits_RV[made.row].double() if made.name == "logits" else self.actual(made)
            beyond = (actual - made.expected).abs() - made.tolerance
            beyond = torch.where(actual.isfinite(), beyond, torch.inf)
            wrong = int((beyond > 0).sum())
            if wrong:
                at = int(beyond.argmax())
                values = float(actual[at]), float(made.expected[at])
                found.append(Fault(NAMES[made.stage], made.layer, made.row, made.name, at, *values, wrong))
        return found

    def actual(self, made: Made) -> Tensor:
        """What lies where a stage should have put what it made, float64."""
        if made.name in ("key", "value"):
            row = self.rows[made.row]
            return self.pools[made.layer][made.name == "value"][row.slots(self.page_size)[-1]].double().flatten()
        return self._read(made.layer, made.row, made.name)

    def stages(self) -> Iterator[Made]:
        """All that the step made, in order; logits are `logits`' matter. What has been made is read as inputs only when
        the next is asked for."""
        s, w = self.plan.shape, self.weights
        if self.folded:
            yield from self._folded_stages()
            return
        residual = torch.stack([w.embedding[row.token].double() for row in self.rows])
        yield from self._residual(EMBEDDING, -1, residual, w.layers[0].norm1, "out")
        for index, layer in enumerate(w.layers):
            bias = None
            if layer.q_bias is not None and layer.k_bias is not None and layer.v_bias is not None:
                bias = order_qkv(s, layer.q_bias, layer.k_bias, layer.v_bias).double()
            for r in range(len(self.rows)):
                y, slack = self._normed_product(self._matrix(index, "qkv"), index - 1, r, "out")
                yield Made(QKV, index, r, "qkv", y if bias is None else y + bias, slack + 1e-6 * y.abs())
            for r in range(len(self.rows)):
                yield from self._attention(index, r)
            for r in range(len(self.rows)):
                yield self._combine(index, r)
            residual = residual + self._product(self._matrix(index, "o"), index, "attn")
            yield from self._residual(OUTPUT, index, residual, layer.norm2, "mid")
            for r in range(len(self.rows)):
                gate, slack_g = self._normed_product(self._matrix(index, "gate"), index, r, "mid")
                up, slack_u = self._normed_product(self._matrix(index, "up"), index, r, "mid")
                yield self._activation(index, r, gate, slack_g, up, slack_u)
            residual = residual + self._product(self._matrix(index, "down"), index, "act")
            following = w.layers[index + 1].norm1 if index + 1 < len(w.layers) else w.norm
            yield from self._residual(DOWN, index, residual, following, "out")

    def logits(self) -> Iterator[Made]:
        """The logits of each row."""
        for r in range(len(self.rows)):
            last = len(self.weights.layers) - 1
            if self.folded:
                y, slack = self._held_product(self._matrix(last, "lm_head"), self._held(last), self.weights.norm)
            else:
                y, slack = self._normed_product(self._matrix(last, "lm_head"), last, r, "out")
            yield Made(LOGITS, len(self.weights.layers), r, "logits", y, slack + 1e-6 * y.abs())

    def _folded_stages(self) -> Iterator[Made]:
        """The same of one row in a plan that folds: every block sums and norms the whole residual itself."""
        for index, layer in enumerate(self.weights.layers):
            y, slack = self._held_product(self._matrix(index, "qkv"), self._held(index - 1), layer.norm1)
            if layer.q_bias is not None and layer.k_bias is not None and layer.v_bias is not None:
                y = y + order_qkv(self.plan.shape, layer.q_bias, layer.k_bias, layer.v_bias).double()
            yield Made(QKV, index, 0, "qkv", y, slack + 1e-6 * y.abs())
            yield from self._attention(index, 0)
            yield self._sums(index)
            middle = self._middle(index)
            gate, slack_g = self._held_product(self._matrix(index, "gate"), middle, layer.norm2)
            up, slack_u = self._held_product(self._matrix(index, "up"), middle, layer.norm2)
            yield self._activation(index, 0, gate, slack_g, up, slack_u)
            act = self._read(index, 0, "act")
            down = self._matrix(index, "down")
            held = middle.double() + down @ act
            slack = 1e-6 * (down.norm(dim=1) * act.norm() + held.abs())
            yield Made(DOWN, index, 0, "held", held, slack)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _read(self, layer: int, row: int, name: str) -> Tensor:
        return self.words.read(self._words_W, layer, row, name)

    def _normed_product(self, matrix_NK: Tensor, layer: int, row: int, name: str) -> tuple[Tensor, Tensor]:
        """Products with published pairs, times 1 / rms of the published squares; and float32's slack of the sums."""
        x, square = self._read(layer, row, name), self._read(layer, row, name + "_square")
        inverse = torch.rsqrt(square.sum() / self.plan.shape.hidden + self.plan.shape.eps)
        return (matrix_NK @ x) * inverse, 1e-6 * matrix_NK.norm(dim=1) * x.norm() * inverse

    def _activation(self, layer: int, r: int, gate: Tensor, slack_g: Tensor, up: Tensor, slack_u: Tensor) -> Made:
        act = torch.nn.functional.silu(gate) * up
        slack = 1.1 * slack_g * up.abs() + torch.nn.functional.silu(gate).abs() * slack_u
        return Made(GATE_UP, layer, r, "act", act, slack + 2**-8 * act.abs() + 1e-12)

    def _held(self, layer: int) -> Tensor:
        """The residual after a layer, float32; -1: the embedding."""
        return (self.weights.embedding[self.rows[0].token] if layer < 0 else self._read(layer, 0, "held")).float()

    def _middle(self, layer: int) -> Tensor:
        """The residual after a layer's attention: float32 additions in the kernel's order, to the bit."""
        total = torch.zeros_like(self._held(layer - 1))
        for part in self._read(layer, 0, "sums").float().view(WARPS, -1):
            total = total + part
        return self._held(layer - 1) + total

    def _held_product(self, matrix_NK: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Products with a float32 residual times a norm, rounded to bfloat16 as the kernel does, times 1 / rms."""
        x = (residual * norm.float()).to(torch.bfloat16).double()
        inverse = torch.rsqrt(residual.double().square().mean() + self.plan.shape.eps)
        return (matrix_NK @ x) * inverse, 1e-6 * matrix_NK.norm(dim=1) * x.norm() * inverse

    def _sums(self, layer: int) -> Made:
        """Partial sums of the output projection over slices of the inputs; its inputs may round to other neighbours."""
        o, y = self._matrix(layer, "o"), self._combine(layer, 0)
        x_WK, o_NWK = bf16(y.expected).view(WARPS, -1), o.view(len(o), WARPS, -1)
        sums_WN = torch.einsum("nwk,wk->wn", o_NWK, x_WK)
        apart_WK = (y.tolerance - 2**-8 * y.expected.abs()).view(WARPS, -1)
        slack_WN = torch.einsum("nwk,wk->wn", o_NWK.abs(), apart_WK) + 2**-8 * (o_NWK.abs() * x_WK.abs()).amax(-1).T
        slack_WN += 1e-6 * o_NWK.norm(dim=-1).T * x_WK.norm(dim=-1, keepdim=True)
        return Made(OUTPUT, layer, 0, "sums", sums_WN.flatten(), slack_WN.flatten())

    def _product(self, matrix_NK: Tensor, layer: int, name: str) -> Tensor:
        x_RK = torch.stack([self._read(layer, r, name) for r in range(len(self.rows))])
        return x_RK @ matrix_NK.T

    def _matrix(self, layer: int, name: str) -> Tensor:
        """A layer's matrix in float64, its rows in the order in which they are published."""
        if (layer, name) not in self._matrices:
            weights = self.weights.layers[layer]
            if name == "lm_head":
                matrix = self.weights.lm_head
            elif name == "qkv":
                matrix = order_qkv(self.plan.shape, weights.q, weights.k, weights.v)
            else:
                matrix = getattr(weights, name)
            self._matrices[layer, name] = matrix.double()
        return self._matrices[layer, name]

    def _residual(self, stage: int, layer: int, residual: Tensor, norm: Tensor, name: str) -> Iterator[Made]:
        each = self.plan.shape.hidden // BLOCKS
        for r, x in enumerate(residual):
            y = x * norm.double()
            # The registers hold float32; their error over the layers so far is part of the slack.
            slack = 2**-8 * y.abs() + 2e-6 * (layer + 2) * residual.abs().amax() * norm.double().abs()
            yield Made(stage, layer, r, name, y, slack)
            square = x.square().view(BLOCKS, each).sum(1)
            yield Made(stage, layer, r, name + "_square", square, 1e-5 * (layer + 2) * square + 1e-6)

    def _attention(self, layer: int, r: int) -> Iterator[Made]:
        s, row = self.plan.shape, self.rows[r]
        splits, group = BLOCKS // s.kv_heads, s.q_heads // s.kv_heads
        qkv = self._read(layer, r, "qkv").view(s.kv_heads, group + 2, s.head_dim)
        q, k, v = qkv[:, :group], qkv[:, group], qkv[:, group + 1]
        weights = self.weights.layers[layer]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = (self._head_norm(x, norm) for x, norm in ((q, weights.q_norm), (k, weights.k_norm)))
        table = self.rotary[row.position]
        q, k = rotate(q, table), rotate(k, table)
        slots = row.slots(self.page_size)
        if row.real and row.source == r:
            yield Made(ATTENTION, layer, r, "key", k.flatten(), self._rounding(k.flatten()))
            yield Made(ATTENTION, layer, r, "value", v.flatten(), self._rounding(v.flatten()))
        keys, values = (pool[slots].double() for pool in self.pools[layer])
        scores_HGT = torch.einsum("hgd,thd->hgt", bf16(q), keys) * s.head_dim**-0.5
        total = row.position + 1
        each = -(-total // (splits * UNIT_TOKENS)) * UNIT_TOKENS
        part = torch.zeros(s.kv_heads, splits, group, s.head_dim, dtype=torch.float64, device=scores_HGT.device)
        lse = torch.full((s.kv_heads, splits, group), -1e30, dtype=torch.float64, device=part.device)
        spread = torch.zeros_like(part)
        for split in range(splits):
            begin, end = min(total, split * each), min(total, (split + 1) * each)
            if begin == end:
                continue
            some = scores_HGT[:, :, begin:end]
            lse[:, split] = some.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
            weight = some.softmax(-1)
            part[:, split] = torch.einsum("hgt,thd->hgd", weight, values[begin:end])
            spread[:, split] = torch.einsum("hgt,thd->hgd", weight, values[begin:end].abs())
        # Weights are rounded relative to a running maximum, and a query may round to its other neighbour.
        slack = 2**-8 + 2**-7 * float(q.abs().amax() * keys.abs().amax()) * s.head_dim**-0.5
        yield Made(ATTENTION, layer, r, "part", part.flatten(), (slack * spread + 1e-6).flatten())
        yield Made(ATTENTION, layer, r, "lse", lse.flatten(), (2 * slack + 1e-6 * lse.abs()).flatten())

    def _combine(self, layer: int, r: int) -> Made:
        s = self.plan.shape
        splits, group = BLOCKS // s.kv_heads, s.q_heads // s.kv_heads
        part = self._read(layer, r, "part").view(s.kv_heads, splits, group, s.head_dim)
        lse = self._read(layer, r, "lse").view(s.kv_heads, splits, group)
        weight = torch.exp2(lse - lse.amax(1, keepdim=True))
        weight = (weight / weight.sum(1, keepdim=True))[..., None]
        y, size = (part * weight).sum(1).flatten(), (part.abs() * weight).sum(1).flatten()
        return Made(COMBINE, layer, r, "attn", y, 2**-8 * y.abs() + 1e-5 * size + 1e-9)

    def _head_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.plan.shape.eps) * weight.double()

    @staticmethod
    def _rounding(x: Tensor) -> Tensor:
        return 2**-8 * x.abs() + 1e-6 * x.abs().amax()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * table[0] - b * table[1], b * table[0] + a * table[1]], -1)
