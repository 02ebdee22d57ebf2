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


def _chunk(pairs: int) -> int:
    return max(size for size in range(1, 4) if pairs % size == 0)


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

    def _depth(self, chunk: int, fixed: int) -> int:
        return min(16, (BLOCK_SHARED_BYTES - fixed - 128) // (WARPS * (chunk * PAIR_BYTES + 8)))

    def _ring(self, fixed: int, depth: int) -> int:
        return -(-(fixed + WARPS * depth * 8) // 128) * 128  # where the ring begins, behind all the rest

    def _choice_bytes(self) -> int:
        return 16 + 4 * self.experts + 12 * MAX_ROWS * self.top

    def _fixed_bytes(self) -> tuple[int, int]:
        """Shared memory beside rings and barriers: rows as float16, scales, partial sums, the choice."""
        row = 2 * MAX_ROWS + MAX_ROWS * 4 // GROUP
        first = row * self.hidden + WARPS // TEAM * 2 * TEAM * 16 * MAX_ROWS * 4 + self._choice_bytes() + 64
        return first, 2 * row * self.inner + self._choice_bytes() + 128

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        first, second = _chunk(self.first_pairs), _chunk(self.second_pairs)
        fixed = self._fixed_bytes()
        depths = self._depth(first, fixed[0]), self._depth(second, fixed[1])
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "EXPERTS": self.experts,
            "TOP": self.top,
            "LIMIT": self.limit,
            "FIRST_CHUNK": first,
            "FIRST_DEPTH": depths[0],
            "FIRST_RING": self._ring(fixed[0], depths[0]),
            "SECOND_CHUNK": second,
            "SECOND_DEPTH": depths[1],
            "SECOND_RING": self._ring(fixed[1], depths[1]),
        }

    def shared_bytes(self) -> tuple[int, int]:
        """Dynamic shared memory of a block of the first and of the second products."""
        got = self.definitions()
        first, second = (
            got[f"{name}_RING"] + WARPS * got[f"{name}_DEPTH"] * got[f"{name}_CHUNK"] * PAIR_BYTES
            for name in ("FIRST", "SECOND")
        )
        return first, second
