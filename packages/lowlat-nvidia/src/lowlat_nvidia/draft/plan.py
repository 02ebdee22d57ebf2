"""Which shapes the kernel of sequential proposals takes, and how it lays a head out."""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 16
THREADS = 32 * WARPS
TILE_ROWS = 16
SHARED_BYTES = 232_448
"""What a block may use on Hopper."""
MAX_VOCABULARY = 1 << 17
MAX_RANKS = 8
MAX_STEPS = 15


class PlanError(ValueError):
    """A shape that the kernel does not take; the text names the field."""


@dataclass(frozen=True, slots=True)
class MarkovPlan:
    """A head of `vocabulary` x `rank` bfloat16, its rows split over `ranks` GPUs, for up to `requests` at a time.

    A block has at most `tiles_a_block` tiles of 16 rows: one in the registers of each of 16 warps, `resident` in shared
    memory; `passing` ones are read in every step, from before the step's token is agreed on.
    """

    vocabulary: int
    rank: int = 256
    ranks: int = 1
    requests: int = 1
    blocks: int = 132

    def __post_init__(self) -> None:
        problems = [
            (not 0 < self.vocabulary <= MAX_VOCABULARY, f"vocabulary {self.vocabulary}: 1 to {MAX_VOCABULARY}"),
            (self.rank not in (32, 64, 128, 256), f"rank {self.rank}: 32, 64, 128 or 256"),
            (not 1 <= self.ranks <= MAX_RANKS, f"ranks {self.ranks}: 1 to {MAX_RANKS}"),
            (self.vocabulary % self.ranks != 0, f"vocabulary {self.vocabulary}: a multiple of the {self.ranks} ranks"),
            (not 1 <= self.requests <= 8, f"requests {self.requests}: 1 to 8"),
        ]
        found = [text for wrong, text in problems if wrong]
        if found:
            raise PlanError("; ".join(found))

    @property
    def local_vocabulary(self) -> int:
        """Rows of one GPU."""
        return self.vocabulary // self.ranks

    @property
    def tiles(self) -> int:
        """Tiles of one GPU."""
        return -(-self.local_vocabulary // TILE_ROWS)

    @property
    def tiles_a_block(self) -> int:
        """Tiles of the block that has most."""
        return -(-self.tiles // self.blocks)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return TILE_ROWS * self.rank * 2

    @property
    def max_requests(self) -> int:
        """Requests that the compiled kernel has room for: 1, or 8."""
        return 1 if self.requests == 1 else 8

    @property
    def resident(self) -> int:
        """Tiles in shared memory."""
        room = SHARED_BYTES - self._fixed_bytes(0)
        return max(0, min(self.tiles_a_block - WARPS, room // (self.tile_bytes + 8)))

    @property
    def passing(self) -> int:
        """Tiles that no place on the chip is left for."""
        return max(0, self.tiles_a_block - WARPS - self.resident)

    def _fixed_bytes(self, resident: int) -> int:
        logits = self.max_requests * self.tiles_a_block * TILE_ROWS * 4
        if self.max_requests == 1:  # base logits of the next step
            logits += -(-self.tiles_a_block * TILE_ROWS // THREADS) * THREADS * 4
        return logits + self.max_requests * (WARPS * 8 + 20 + self.rank * 2 + 64) + 8 * max(resident, 1) + 64

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.resident * self.tile_bytes + self._fixed_bytes(self.resident)

    @property
    def inbox_bytes(self) -> int:
        """Bytes of a rank's inbox: a word for each step, request, rank and block."""
        return 8 * MAX_STEPS * self.max_requests * self.ranks * self.blocks

    @property
    def head_bytes(self) -> int:
        """Bytes of one GPU's part of the head: what a launch must read from memory once."""
        return self.local_vocabulary * self.rank * 2

    def definitions(self) -> dict[str, int]:
        """Macros of the kernel."""
        return {
            "RANK": self.rank,
            "MAX_TILES": self.tiles_a_block,
            "RESIDENT": self.resident,
            "MAX_REQUESTS": self.max_requests,
            "RANKS": self.ranks,
            "SHARED_BYTES": self.shared_bytes,
            "MAX_RANKS": MAX_RANKS,
            "BLOCKS": self.blocks,
        }
