"""Which mixtures the expert kernels take, and how they lay weights out."""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 16
TEAM = 8
"""Warps that share a tile of the first products and split its inputs."""
THREADS = 32 * WARPS
MAX_ROWS = 8
GROUP = 32
"""Inputs that share a scale."""
PAIR_BYTES = 544
"""Two groups of 16 output rows: 512 bytes of weights, 32 of scales."""
BLOCK_SHARED_BYTES = 232_448


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
            (self.hidden % 512 != 0 or self.hidden > 8192, f"hidden {self.hidden}: a multiple of 512, at most 8192"),
            (self.inner % 64 != 0 or self.inner > 1024, f"inner {self.inner}: a multiple of 64, at most 1024"),
            (self.experts % 32 != 0 or self.experts > 512, f"experts {self.experts}: a multiple of 32, at most 512"),
            (not 1 <= self.top <= 16, f"top {self.top}: 1 to 16"),
        ]
        found = [text for wrong, text in problems if wrong]
        if found:
            raise ExpertsPlanError("; ".join(found))

    @property
    def first_pairs(self) -> int:
        """Pairs of groups of one warp in the first products, whose warps split the inputs."""
        return self.hidden // (2 * GROUP * TEAM)

    @property
    def second_pairs(self) -> int:
        """Pairs of groups of the second products."""
        return self.inner // (2 * GROUP)

    @property
    def first_bytes(self) -> int:
        """Packed bytes of one expert's gate and up."""
        return self.inner // 8 * TEAM * self.first_pairs * PAIR_BYTES

    @property
    def second_bytes(self) -> int:
        """Packed bytes of one expert's down."""
        return self.hidden // 16 * self.second_pairs * PAIR_BYTES

    def _chunk(self, pairs: int, fixed: int) -> tuple[int, int]:
        """Pairs of a chunk, and how many chunks a warp's ring holds.

        A copy costs the multiprocessor about 90 cycles whatever its size: the largest chunk of which two fit is best.
        """
        room = (BLOCK_SHARED_BYTES - fixed - 256) // WARPS
        chunk = max(size for size in range(1, pairs + 1) if pairs % size == 0 and 2 * (size * PAIR_BYTES + 8) <= room)
        return chunk, min(8, room // (chunk * PAIR_BYTES + 8))

    def _ring(self, fixed: int, depth: int) -> int:
        return -(-(fixed + WARPS * depth * 8) // 128) * 128  # where the ring begins, behind all the rest

    def _choice_bytes(self) -> int:
        return 16 + 4 * self.experts + 12 * MAX_ROWS * self.top

    def _fixed_bytes(self) -> tuple[int, int]:
        """Shared memory beside rings and barriers: rows as float16, scales, partial sums, the choice."""
        row, rest = 2 * MAX_ROWS, self._choice_bytes() + WARPS * MAX_ROWS * 4 + 128
        return row * self.hidden + WARPS * 2 * 16 * MAX_ROWS * 4 + rest, 2 * row * self.inner + rest

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        fixed = self._fixed_bytes()
        first, first_depth = self._chunk(self.first_pairs, fixed[0])
        second, second_depth = self._chunk(self.second_pairs, fixed[1])
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "EXPERTS": self.experts,
            "TOP": self.top,
            "LIMIT": self.limit,
            "FIRST_CHUNK": first,
            "FIRST_DEPTH": first_depth,
            "FIRST_RING": self._ring(fixed[0], first_depth),
            "SECOND_CHUNK": second,
            "SECOND_DEPTH": second_depth,
            "SECOND_RING": self._ring(fixed[1], second_depth),
        }

    def shared_bytes(self) -> tuple[int, int]:
        """Dynamic shared memory of a block of the first and of the second products."""
        got = self.definitions()
        first, second = (
            got[f"{name}_RING"] + WARPS * got[f"{name}_DEPTH"] * got[f"{name}_CHUNK"] * PAIR_BYTES
            for name in ("FIRST", "SECOND")
        )
        return first, second
