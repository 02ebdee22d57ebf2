"""Work by the shares of memory that multiprocessors get: which block computes which tiles. Pure arithmetic, no device.

Of gate and up and of the logits a block computes whole tiles of 16 outputs: its own, less the last of them if it is
slow; other blocks' last ones behind its own if it is fast. A tile is the same pages, words and sums whoever computes
it, so that nothing is packed again and no bit changes.

Tiles are numbered through all blocks: tile i of block b is b * (tiles of a block) + i.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lowlat_nvidia.dense.plan import BLOCKS, MAX_ROWS, MORE_LOGITS, MORE_TILES, DensePlan

NOISE = 0.015
"""Blocks whose paces are this near to each other have the same pace."""
SPREAD = 0.05
"""No group of blocks is wider than this, however near neighbours are."""
WORTH = 0.01
"""What the largest predicted time must shrink by, or no tile is moved."""
RUN_PAGES, RUN_BITS = 1 << 11, 12
"""A run in a word: pages below the first, whether it ends a layer at the first, its distance from the second bit up."""


def alike(paces: Sequence[float]) -> list[list[int]]:
    """Blocks in groups of one pace, the fastest group first; of each the blocks in order."""
    order = sorted(range(len(paces)), key=lambda block: paces[block])
    groups: list[list[int]] = []
    for block in order:
        here = groups[-1] if groups else []
        near = here and paces[block] <= paces[here[-1]] * (1 + NOISE) and paces[block] <= paces[here[0]] * (1 + SPREAD)
        if near:
            here.append(block)
        else:
            groups.append([block])
    return [sorted(group) for group in groups]


def tile_counts(paces: Sequence[float], tiles: int, most: int, least: int = 1) -> list[int]:
    """Tiles that each block computes, where each has `tiles` of its own and `paces` are its cycles for the same work.

    Blocks of one pace are taken for neighbours that share what limits them: a group is ready when its tiles are,
    however they lie in it, and the largest of the groups' times is made as small as whole tiles allow. A block gets at
    most `most` more than its own and at least `least`. Equal paces move nothing, nor does what is not worth it.
    """
    groups = alike(paces)
    even = [tiles] * len(paces)
    pace = [sum(paces[block] for block in group) / len(group) for group in groups]
    total = [least * len(group) for group in groups]

    def after_one_more(g: int) -> tuple[float, int]:
        return (total[g] + 1) * pace[g] / len(groups[g]), g

    heap = [after_one_more(g) for g in range(len(groups))]
    heapq.heapify(heap)
    largest = 0.0
    for _ in range(tiles * len(paces) - sum(total)):
        largest, g = heapq.heappop(heap)
        total[g] += 1
        if total[g] < (tiles + most) * len(groups[g]):
            heapq.heappush(heap, after_one_more(g))
    if largest > (1 - WORTH) * tiles * max(pace):
        return even
    counts = even
    for group, sum_ in zip(groups, total, strict=True):
        each, rest = divmod(sum_, len(group))
        for i, block in enumerate(group):  # those that have one more stand apart from one another
            counts[block] = each + ((i + 1) * rest // len(group) - i * rest // len(group))
    return counts


def deal(counts: Sequence[int], tiles: int) -> list[tuple[int, ...]]:
    """The numbers of each block's tiles, its own first, for counts that add up to all tiles."""
    if sum(counts) != tiles * len(counts):
        raise ValueError(f"{sum(counts)} tiles are dealt, there are {tiles * len(counts)}")
    left = iter([b * tiles + i for b, count in enumerate(counts) for i in range(count, tiles)])
    own = [tuple(range(b * tiles, b * tiles + min(count, tiles))) for b, count in enumerate(counts)]
    return [mine + tuple(next(left) for _ in range(count - tiles)) for mine, count in zip(own, counts, strict=True)]


@dataclass(frozen=True, slots=True)
class Stages:
    """Pages of a warp in the order in which they are packed, and tiles of 16 of a block."""

    before: int  # pages of a layer before gate and up
    tile: int  # of a tile of gate and up, or of logits
    after: int  # of down
    gate_up: int  # tiles
    logits: int

    @classmethod
    def of(cls, plan: DensePlan) -> Stages:
        s, fragments = plan.shape, plan.page_fragments
        hidden, qdim, inter = s.hidden // 256, s.qdim // 256, s.inter // 256
        qkv, out = s.kv_heads * s.head_rows // BLOCKS // 8, s.hidden // BLOCKS // 8
        return cls(
            before=(qkv * hidden + out * qdim) // fragments,
            tile=2 * hidden // fragments,
            after=out * inter // fragments,
            gate_up=s.inter // BLOCKS // 8,
            logits=s.lm_tiles // 2,
        )

    def least(self, plan: DensePlan) -> int:
        """Tiles of gate and up that a block keeps: the ring's first pages are asked for before it knows its share."""
        ring = max(plan.kernel(rows).ring_pages for rows in (1, MAX_ROWS))
        return max(1, -(-(ring - self.before) // self.tile))


@dataclass(frozen=True, slots=True)
class Shares:
    """Tiles of each block."""

    gate_up: list[tuple[int, ...]]
    logits: list[tuple[int, ...]]

    @classmethod
    def even(cls, plan: DensePlan) -> Shares:
        return cls.by_pace(plan, [1.0] * BLOCKS)

    @classmethod
    def by_pace(cls, plan: DensePlan, paces: Sequence[float], gate_up: bool = True, logits: bool = True) -> Shares:
        """Of blocks of these paces; both stages, or one of them."""
        stages = Stages.of(plan)
        counts = [
            tile_counts(paces, stages.gate_up, MORE_TILES if gate_up else 0, stages.least(plan)),
            tile_counts(paces, stages.logits, MORE_LOGITS if logits else 0),
        ]
        return cls(deal(counts[0], stages.gate_up), deal(counts[1], stages.logits))

    def moved(self) -> tuple[int, int]:
        """Tiles of gate and up and of logits that are not computed by the blocks that own them."""
        each = (sum(map(len, lists)) // len(lists) for lists in (self.gate_up, self.logits))
        pairs = zip(each, (self.gate_up, self.logits), strict=True)
        first, second = (sum(n // own != b for b, tiles in enumerate(lists) for n in tiles) for own, lists in pairs)
        return first, second

    def words(self, plan: DensePlan) -> list[list[int]]:
        """A row for each block, as the kernel reads it (`SHARE_WORDS` in csrc/layout.cuh)."""
        stages = Stages.of(plan)
        return [
            _words(stages, block, gate_up, logits)
            for block, (gate_up, logits) in enumerate(zip(self.gate_up, self.logits, strict=True))
        ]


def _words(stages: Stages, block: int, gate_up: Sequence[int], logits: Sequence[int]) -> list[int]:
    own = [
        sum(number // each == block for number in tiles)
        for tiles, each in ((gate_up, stages.gate_up), (logits, stages.logits))
    ]
    behind = stages.before + stages.gate_up * stages.tile
    layer = [
        Piece(block, 0, stages.before),
        *(_tile(number, stages.gate_up, stages.tile, stages.before) for number in gate_up),
        Piece(block, behind, stages.after),
    ]
    runs = _runs(layer)
    runs[-1] |= RUN_PAGES
    return [
        *(own[0], len(gate_up), own[1], len(logits)),
        *_padded(runs, MORE_TILES + 2),
        *_padded(_runs([_tile(number, stages.logits, stages.tile, 0) for number in logits]), MORE_LOGITS + 2),
        *_padded(gate_up[own[0] :], MORE_TILES),
        *_padded(logits[own[1] :], MORE_LOGITS),
    ]


class Piece(NamedTuple):
    """Neighbouring pages of a block."""

    block: int
    first: int
    pages: int


def _tile(number: int, each: int, pages: int, first: int) -> Piece:
    block, tile = divmod(number, each)
    return Piece(block, first + tile * pages, pages)


def _runs(pieces: Sequence[Piece]) -> list[int]:
    """Pieces that follow one another are one run. The first begins where the last of before ended."""
    runs: list[int] = []
    end, count, distance = pieces[0].first * BLOCKS + pieces[0].block, 0, 0
    for piece in pieces:
        begin = piece.first * BLOCKS + piece.block
        if begin != end:
            runs.append(distance << RUN_BITS | count)
            count, distance = 0, begin - end
        count += piece.pages
        if count >= RUN_PAGES:
            raise ValueError(f"a run of {count} pages")
        end = begin + piece.pages * BLOCKS
    return [*runs, distance << RUN_BITS | count]


def _padded(words: Sequence[int], count: int) -> list[int]:
    if len(words) > count:
        raise ValueError(f"{len(words)} words, there is room for {count}")
    return [*words, *[0] * (count - len(words))]
