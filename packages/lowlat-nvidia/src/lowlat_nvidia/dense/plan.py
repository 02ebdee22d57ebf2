"""What a dense model's step takes: sizes, limits, compiler definitions. Pure arithmetic, no device.

Shapes that do not fit are refused here, with the reason, and nowhere later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowlat_nvidia.dense import waits
from lowlat_nvidia.dense.waits import Waits

BLOCKS = 128  # resident blocks: eight KV heads times sixteen splits; every stage divides evenly over them
WARPS = 8
MAX_ROWS = 8
FRAGMENT_BYTES = 512  # 16 outputs x 16 inputs, or 8 x 32, in bfloat16
SHARED_LIMIT = 227 * 1024
UNIT_TOKENS = 16  # cached tokens that are copied and computed at once; splits of a context are whole units
MAX_PAGES = 16  # of a warp's ring of weights
SEVERAL_SUMS = WARPS * 8 * MAX_ROWS * 8  # partial sums of a product of several rows, in floats; there is room for two
MAX_UNITS = 24  # of the cache under way: 96 KB of heads of 64


class UnsupportedShapeError(ValueError):
    """The model's shape or options are outside what the kernel computes. The text names the value and the limit."""


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A dense decoder: grouped-query attention, rotary embedding, SwiGLU. Sizes in elements."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    qk_norm: bool
    eps: float = 1e-5
    qkv_bias: bool = False

    @property
    def qdim(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def head_rows(self) -> int:
        """Projected elements of one KV head: its queries, its key, its value."""
        return self.qdim // self.kv_heads + 2 * self.head_dim

    @property
    def lm_tiles(self) -> int:
        """Tiles of eight logits a block, an even number."""
        return 2 * -(-self.vocab // (16 * BLOCKS))

    def weight_bytes(self) -> int:
        """Bytes of bfloat16 weights that one step reads: all layers and the output projection, embedding excepted."""
        layer = self.hidden * (self.kv_heads * self.head_rows + self.qdim) + 3 * self.hidden * self.inter
        return 2 * (self.layers * layer + self.vocab * self.hidden)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of cached keys and values of one request with `tokens` tokens."""
        return 4 * self.layers * self.kv_heads * self.head_dim * tokens


LLAMA_1B = DenseShape(16, 2048, 32, 8, 64, 8192, 128256, False, 1e-5)
QWEN3_06B = DenseShape(28, 1024, 16, 8, 128, 3072, 151936, True, 1e-6)
QWEN3_8B = DenseShape(36, 4096, 32, 8, 128, 12288, 151936, True, 1e-6)
PRESETS = {"llama-1b": LLAMA_1B, "qwen3-0.6b": QWEN3_06B, "qwen3-8b": QWEN3_8B}


def shape_from_config(config: Mapping[str, Any]) -> DenseShape:
    """The shape that a Hugging Face `config.json` of Llama, Qwen2 or Qwen3 describes.

    Raises UnsupportedShapeError, naming the field, for other families and options.
    """
    family = config.get("model_type")
    if family not in ("llama", "qwen2", "qwen3"):
        raise UnsupportedShapeError(f"model_type is {family!r}; the dense step computes 'llama', 'qwen2' and 'qwen3'")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise UnsupportedShapeError(f"{name} is set; the dense step has biases of q, k and v alone, Qwen2's")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedShapeError(f"hidden_act is {config['hidden_act']!r}; the dense step computes 'silu'")
    if config.get("use_sliding_window"):
        raise UnsupportedShapeError("use_sliding_window is set; the dense step attends to the whole context")
    heads = int(config["num_attention_heads"])
    shape = DenseShape(
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        q_heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or int(config["hidden_size"]) // heads),
        inter=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        qk_norm=family == "qwen3",
        eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2",
    )
    check(shape)
    return shape


def check(shape: DenseShape) -> None:
    """Raises UnsupportedShapeError for a shape that does not divide over the blocks and warps."""
    s = shape
    if s.head_dim not in (64, 128):
        raise UnsupportedShapeError(f"head_dim is {s.head_dim}; 64 and 128 are computed")
    if s.kv_heads < 4 or BLOCKS % s.kv_heads or BLOCKS // s.kv_heads > 32 or s.q_heads % s.kv_heads:
        raise UnsupportedShapeError(
            f"{s.q_heads} query, {s.kv_heads} KV heads; KV heads must divide {BLOCKS}, at least 4"
        )
    splits, group_dim = BLOCKS // s.kv_heads, s.qdim // s.kv_heads
    if group_dim not in (256, 512):
        raise UnsupportedShapeError(f"a KV head serves {group_dim} query elements; 256 and 512 are computed")
    if s.head_rows % (8 * splits) or group_dim % (4 * splits):
        raise UnsupportedShapeError(f"{s.head_rows} projected elements a KV head do not split over {splits} blocks")
    for name, value, unit in (("hidden", s.hidden, 8 * BLOCKS), ("inter", s.inter, 8 * BLOCKS)):
        if value % unit:
            raise UnsupportedShapeError(f"{name} is {value}; it must be a multiple of {unit}")
    if s.hidden > 4096:
        raise UnsupportedShapeError(f"hidden is {s.hidden}; at most 4096 fits the registers of a warp")
    if not page_choices(s):
        raise UnsupportedShapeError(f"inputs {s.hidden}, {s.qdim}, {s.inter} are not multiples of 512")


def page_choices(shape: DenseShape) -> list[int]:
    """Fragments that a ring page may hold: 8, 4 or 2, where they divide every warp's part of every stage."""
    parts = (shape.hidden // 256, shape.qdim // 256, shape.inter // 256)
    return [count for count in (8, 4, 2) if all(part % count == 0 for part in parts)]


def chunk_fragments(inputs: int) -> int:
    """Fragments whose inputs a warp keeps in registers at once, for a stage with so many inputs."""
    part = inputs // 256
    if part <= 16:
        return part
    return 16 if part % 16 == 0 else 12 if part % 12 == 0 else 8


@dataclass(frozen=True, slots=True)
class DensePlan:
    """A shape with the choices that tune it. None: as measured, of each kernel for itself.

    Steps of one row (`one_row`) and of several have kernels of their own on the same weights, each with exchange
    buffers of its own; `kernel` is the plan of either. What is packed (`page_fragments`) is the same in both.

    There is room for `ring_limit` bytes of weights and `units` blocks of 16 cached tokens (0: what else fits). A warp
    asks for `under_way` pages of weights at once, for `busy_under_way` if that is more in busy steps (`Waits`); `ahead`
    units come into the L2 before there is room for them, where contexts are short. Layers take `slots` exchange buffers
    in turn (at least 3; at most one each), so that all stay in the L2. What all blocks read is published `copies` times
    when rows are few. `plain_copies` is for tools that watch every access, `alone` runs stages one by one
    (`dense.alone`) and has a buffer for each layer.

    Steps of one row are folded with `fold`: the output projection is computed by KV heads and every block holds the
    residual, which is one exchange a layer less, and more to read. With `hold` one of them that is not has a page of
    weights in registers from any wait to the next product, and a poll asks for all pages that may be asked for.

    Of several rows, with `watch_each` a word of every block is waited for before attention's output and activations are
    loaded. With `row_warps` each of three to eight rows of short contexts has a warp of its own in attention; with 2 it
    has a unit in registers before q, k and v are computed. Short contexts have at most `row_units` units a split: as
    many as there is room for sums (1,024 tokens with 16 splits, 512 where a KV head has 512 query elements), or, as
    measured, up to twice that, where a row's first sums wait in registers.

    `waits` says how stages wait for other blocks (`dense.waits`).
    """

    shape: DenseShape
    one_row: bool = False
    ring_limit: int | None = None
    units: int = 0
    ahead: int | None = None
    stamps: int = 0
    copies: int | None = None
    under_way: int | None = None
    busy_under_way: int | None = None
    hold: bool | None = None
    fold: bool | None = None
    slots: int | None = None
    watch_each: bool | None = None
    row_warps: int | None = None
    row_units: int | None = None
    waits: Waits | None = None
    plain_copies: bool = False
    alone: bool = False

    def kernel(self, rows: int) -> DensePlan:
        """The plan of the kernel for steps of so many rows."""
        return dataclasses.replace(self, one_row=rows == 1)

    @property
    def page_fragments(self) -> int:
        """The largest pages of which at least three fit beside what a step of several rows needs at least."""
        choices, usual = page_choices(self.shape), DensePlan(self.shape)
        return next((count for count in choices if usual._pages(count) >= 3), choices[-1])

    def _pages(self, fragments: int) -> int:
        limit = self.ring_limit or (128 if self.one_row else 112 if self._narrow else 96) * 1024
        room = min(limit, SHARED_LIMIT - self.fixed_bytes() - (self.units or WARPS) * self.unit_bytes)
        return min(MAX_PAGES, room // (WARPS * fragments * FRAGMENT_BYTES))

    @property
    def page_bytes(self) -> int:
        return self.page_fragments * FRAGMENT_BYTES

    @property
    def unit_bytes(self) -> int:
        """Keys and values of 16 tokens of a KV head."""
        return 64 * self.shape.head_dim

    def fixed_bytes(self) -> int:
        """Shared memory of a block beside the rings of weights and of the cache, barriers of both included."""
        s = self.shape
        rows, group_dim = 1 if self.one_row else MAX_ROWS, s.qdim // s.kv_heads
        partial = WARPS * 8 * 8 + self.folded * s.hidden // 2 if self.one_row else SEVERAL_SUMS
        joined = WARPS if self.one_row else partial // group_dim  # warps whose sums attention joins at once
        sums = 2 * 4 * (partial + WARPS * rows + joined * 8 * 2) + 4 * (WARPS * group_dim if self.one_row else 4)
        control = 32 + rows * (9 * 4 + 8 + 4 * s.head_dim)
        control += 16 * s.layers + 2 * (2 * s.layers + 1) * s.hidden // BLOCKS
        if s.qkv_bias:
            control += 2 * s.layers * s.kv_heads * s.head_rows // BLOCKS
        heads = 2 * rows * group_dim + 32 * s.head_dim
        barriers = WARPS * MAX_PAGES * 8 + 16 * MAX_UNITS
        return -(-(sums + control + heads + barriers + 128) // 1024) * 1024

    @property
    def ring_pages(self) -> int:
        """Pages of a warp's ring: what fits, up to the limit."""
        return self._pages(self.page_fragments)

    @property
    def ring_units(self) -> int:
        """Units of the cache under way: as many for each warp, so that a place of the ring is always one warp's."""
        room = SHARED_LIMIT - self.fixed_bytes() - WARPS * self.ring_pages * self.page_bytes
        return self.units or min(MAX_UNITS, room // self.unit_bytes // WARPS * WARPS)

    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: partial sums, rows' constants, queries, the rings."""
        return self.fixed_bytes() + self.ring_units * self.unit_bytes + WARPS * self.ring_pages * self.page_bytes

    def layer_words(self) -> int:
        """4-byte words of one layer's exchange buffers."""
        s = self.shape
        splits = BLOCKS // s.kv_heads
        row = s.kv_heads * s.head_rows + splits * (s.qdim + s.q_heads)
        return MAX_ROWS * (row + s.qdim // 2 + s.hidden + 2 * BLOCKS + s.inter // 2)

    def exchange_words(self) -> int:
        """4-byte words of this kernel's exchange buffers: two sets, in each one more than layers take."""
        return 2 * (self.buffers + 1) * self.layer_words()

    @property
    def buffers(self) -> int:
        """Exchange buffers that layers take in turn. As measured: three."""
        return self.shape.layers if self.alone else min(self.slots or 3, self.shape.layers)

    @property
    def published(self) -> int:
        """How often this kernel publishes what all blocks read, where rows are few, so that fewer poll a word. As
        measured: 8 times of one row, 4 of several; a folded step has room for 4.
        """
        return self.copies or (8 if self.one_row and not self.folded else 4)

    def stream_pages(self) -> int:
        """Pages that each warp reads in a step."""
        s = self.shape
        k_hidden, k_qdim, k_inter = s.hidden // 256, s.qdim // 256, s.inter // 256
        qkv = s.kv_heads * s.head_rows // BLOCKS // 8
        layer = (qkv + 2 * s.inter // BLOCKS // 8) * k_hidden + s.hidden // BLOCKS // 8 * (k_qdim + k_inter)
        return (s.layers * layer + s.lm_tiles * k_hidden) // self.page_fragments

    def memory_bytes(self, positions: int) -> int:
        """Device memory of a built step, with exchange buffers of both kernels, beside the embedding, which stays the
        model's; norms are left out.
        """
        s = self.shape
        stream = self.stream_pages() * BLOCKS * WARPS * self.page_bytes
        small = 4 * 16 + 8 * 2 * MAX_ROWS + 8 * BLOCKS * (s.layers + 1) * max(1, self.stamps)
        small += (2 * 8 + 2 * 128) * s.layers  # addresses and tensor maps of the pools
        exchange = 4 * sum(self.kernel(rows).exchange_words() for rows in (1, MAX_ROWS))
        return stream + exchange + 4 * MAX_ROWS * s.vocab + 4 * positions * s.head_dim + small

    @property
    def _narrow(self) -> bool:
        """A step is a chain of exchanges with little to stream between them: a stage's first pages are in registers
        before its inputs are there, and of two rows a copying warp has one unit of the cache on its way.
        """
        return self.shape.hidden <= 1024

    @property
    def folded(self) -> bool:
        """Whether steps of one row are folded."""
        s = self.shape
        fits = WARPS % s.kv_heads == 0 and s.qdim == 256 * s.kv_heads and s.hidden <= 2048 and (self.copies or 4) <= 4
        return fits and (self._narrow if self.fold is None else self.fold)

    def _under_way(self) -> int:
        """As measured: what fills 96 KB of a block, and 64 KB of one row and where heads of a wide model are of 64."""
        usual = (64 if self.one_row or self._wide_of_64 else 96) * 1024 // (WARPS * self.page_bytes)
        return min(self.under_way or usual, self.ring_pages)

    def _busy_under_way(self) -> int:
        """At least `under_way`. As measured: a page more where a step is folded, and no more elsewhere."""
        usual = self._under_way() + (self.one_row and self.folded)
        return max(self._under_way(), min(self.busy_under_way or usual, self.ring_pages))

    def _ahead(self) -> int:
        """As measured: it helps wide models, whose stages take long, and nothing else."""
        return self.ahead if self.ahead is not None else 32 if self.shape.hidden > 2048 else 0

    @property
    def _wide_of_64(self) -> bool:
        return not self._narrow and self.shape.head_dim == 64

    @property
    def holds(self) -> bool:
        """Whether this kernel keeps a page in registers between stages. As measured: one row of all wide models; a
        narrow one has pages in registers early in another way. The head takes none from registers, and where a step is
        folded it would be given one while its inputs are waited for.
        """
        return self.one_row and not self._narrow and not self.folded and self.hold is not False

    def _watch_each(self) -> bool:
        """As measured: it helps wide models with heads of 64 alone, 1 % at eight rows."""
        return not self.one_row and (self._wide_of_64 if self.watch_each is None else self.watch_each)

    def _row_warps(self) -> int:
        """As measured: 2 with heads of 128 where a model is narrow, else 1."""
        usual = 2 if self._narrow and self.shape.head_dim == 128 else 1
        return 0 if self.one_row else usual if self.row_warps is None else self.row_warps

    def _row_units(self) -> int:
        """As measured: twice as many as there is room for sums. None where no row has a warp."""
        return self.row_units if self.row_units is not None and not self.one_row else 2 * self._row_room()

    def _row_room(self) -> int:
        """Units of each row for whose sums there is room where rows have warps of their own."""
        return 2 * SEVERAL_SUMS // (self.shape.qdim // self.shape.kv_heads) // WARPS if self._row_warps() else 0

    def _waits(self) -> Waits:
        if self.waits is not None:
            return self.waits
        widest = self.shape.hidden > 2560
        return waits.measured(one_row=self.one_row, narrow=self._narrow, wide_of_64=self._wide_of_64, widest=widest)

    def definitions(self) -> dict[str, int]:
        """What the compiler is told."""
        s, how = self.shape, self._waits()
        if self.ring_pages < 2:
            raise UnsupportedShapeError(
                f"{self.fixed_bytes()} of {SHARED_LIMIT} bytes of shared memory leave no room for the ring"
            )
        if self.buffers < min(3, s.layers):
            raise UnsupportedShapeError(f"slots is {self.slots}; layers take three exchange buffers at least")
        if self.published not in (1, 2, 4, 8):
            raise UnsupportedShapeError(f"copies is {self.copies}; 1, 2, 4 or 8 are published")
        if self._row_warps() not in (0, 1, 2):
            raise UnsupportedShapeError(f"row_warps is {self.row_warps}; a warp has 0, 1 or 2")
        room = self._row_room()
        if not room <= self._row_units() <= 2 * room:
            raise UnsupportedShapeError(f"row_units is {self.row_units}; a row with a warp has {room} to {2 * room}")
        if self.one_row and self.hold and not self.holds:
            raise UnsupportedShapeError("hold is set; a narrow model and folded steps keep no page between stages")
        return {
            "ONE_ROW": int(self.one_row),
            "LAYERS": s.layers,
            "HIDDEN": s.hidden,
            "Q_HEADS": s.q_heads,
            "KV_HEADS": s.kv_heads,
            "HEAD_DIM": s.head_dim,
            "INTER": s.inter,
            "VOCAB": s.vocab,
            "QK_NORM": int(s.qk_norm),
            "QKV_BIAS": int(s.qkv_bias),
            "PAGE_FRAGMENTS": self.page_fragments,
            "RING_PAGES": self.ring_pages,
            "UNITS": self.ring_units,
            "AHEAD": self._ahead(),
            "STAMPS": self.stamps,
            "COPIES": self.published,
            "UNDER_WAY": self._under_way(),
            "BUSY_UNDER_WAY": self._busy_under_way(),
            "HOLD": int(self.holds),
            "NARROW": int(self._narrow),
            "FOLD": int(self.one_row and self.folded),
            "SLOTS": self.buffers,
            "WATCH_EACH": int(self._watch_each()),
            "ROW_WARPS": self._row_warps(),
            "ROW_UNITS": self._row_units(),
            "PLAIN_COPIES": int(self.plain_copies),
            "QUIET": waits.packed(how.quiet),
            "BUSY": waits.packed(how.busy),
            "WHOLE": sum(1 << stage for stage in how.whole),
            "BUSY_ROWS": how.busy_rows,
            "ALONE": int(self.alone),
            "BLOCKS": BLOCKS,
            "SHARED_BYTES": self.shared_bytes(),
        }
