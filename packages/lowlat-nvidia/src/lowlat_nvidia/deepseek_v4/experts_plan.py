"""Which mixtures the expert kernels take, and how they lay weights out."""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 16
"""Warps that multiply; in the products of gate and up they share a tile and split its inputs."""
FINISHERS = 4
"""Warps that sum over the others."""
THREADS = 32 * (WARPS + FINISHERS)
SUM_THREADS = 128
"""Of a block of the weighted sum: what registers of the products leave room for on a multiprocessor."""
MAX_ROWS = 8
GROUP = 32
"""Inputs that share a scale."""
PAIR_BYTES = 544
"""Two groups of 16 output rows: 512 bytes of weights, 32 of scales."""
BLOCK_SHARED_BYTES = 232_448
MAX_PAGES = 8
BUFFERS = 4
"""Of partial sums."""


class ExpertsPlanError(ValueError):
    """A mixture that the kernels do not take; the text names every reason."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """`experts` of `hidden` x `inner` (this rank's columns), of which a row takes the `top` best."""

    hidden: int = 5120
    inner: int = 576
    experts: int = 384
    top: int = 6
    limit: int = 10
    """Bound of gate and up: `swiglu_limit`."""
    scaling: float = 1.5
    multiprocessors: int = 132

    def __post_init__(self) -> None:
        problems = [
            (self.hidden % 1024 != 0 or self.hidden > 6144, f"hidden {self.hidden}: a multiple of 1024, at most 6144"),
            (self.inner % 64 != 0 or self.inner > 1024, f"inner {self.inner}: a multiple of 64, at most 1024"),
            (self.experts % 32 != 0 or self.experts > 512, f"experts {self.experts}: a multiple of 32, at most 512"),
            (not 1 <= self.top <= 16, f"top {self.top}: 1 to 16"),
            (
                4 * min(MAX_ROWS * self.top, self.experts) > 3 * self.multiprocessors,
                f"top {self.top}: outputs of one of {self.multiprocessors} blocks would be of three experts",
            ),
        ]
        found = [text for wrong, text in problems if wrong]
        if found:
            raise ExpertsPlanError("; ".join(found))

    @property
    def first_pairs(self) -> int:
        """Pairs of groups of one warp in the products of gate and up, whose warps split the inputs."""
        return self.hidden // (2 * GROUP * WARPS)

    @property
    def second_pairs(self) -> int:
        """Pairs of groups of the products of down."""
        return self.inner // (2 * GROUP)

    @property
    def first_bytes(self) -> int:
        """Packed bytes of one expert's gate and up."""
        return self.inner // 8 * WARPS * self.first_pairs * PAIR_BYTES

    @property
    def second_bytes(self) -> int:
        """Packed bytes of one expert's down."""
        return self.hidden // 16 * self.second_pairs * PAIR_BYTES

    @property
    def page_bytes(self) -> int:
        """A page of the ring: half a tile of gate and up, or four tiles of down. Few large copies: one costs the
        multiprocessor about 90 cycles whatever its size."""
        return max(WARPS // 2 * self.first_pairs, 4 * self.second_pairs) * PAIR_BYTES

    @property
    def _ring_at(self) -> int:
        sums = max(BUFFERS * WARPS * 16 * MAX_ROWS * 4, 2 * 2 * MAX_ROWS * self.inner)
        choice = 4 * (2 + self.experts) + 12 * MAX_ROWS * self.top
        barriers = 8 * (9 * MAX_PAGES + 2 * BUFFERS)
        return -(-(sums + 2 * (WARPS + FINISHERS) * MAX_ROWS * 4 + choice + barriers + 256) // 128) * 128

    @property
    def pages(self) -> int:
        """Pages of the ring: 8, or 4 where no more fit."""
        return MAX_PAGES if self._ring_at + MAX_PAGES * self.page_bytes <= BLOCK_SHARED_BYTES else MAX_PAGES // 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the products."""
        return self._ring_at + self.pages * self.page_bytes

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "EXPERTS": self.experts,
            "TOP": self.top,
            "LIMIT": self.limit,
            "PAGES": self.pages,
            "RING": self._ring_at,
        }
