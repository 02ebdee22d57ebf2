"""Which mixtures the expert kernels take, and how they lay weights out."""

from __future__ import annotations

from dataclasses import dataclass

WARPS = 8
THREADS = 32 * WARPS
MAX_ROWS = 8
GROUP = 32
"""Inputs that share a scale."""
PAIR_BYTES = 544
"""Two groups of 16 output rows: 512 bytes of weights, 32 of scales."""
BLOCK_SHARED_BYTES = 115_000
"""Two blocks share a multiprocessor of 227 KB."""


class ExpertsPlanError(ValueError):
    """A mixture that the kernels do not take; the text names every reason."""


def _chunk(pairs: int) -> int:
    return max(size for size in range(1, 6) if pairs % size == 0)


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
        return self.hidden // (2 * GROUP * WARPS)

    @property
    def second_pairs(self) -> int:
        """Pairs of groups of the second products."""
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
    def blocks(self) -> int:
        """Blocks of the products."""
        return 2 * self.multiprocessors

    def _depth(self, chunk: int, fixed: int) -> int:
        return min(16, (BLOCK_SHARED_BYTES - fixed) // (WARPS * (chunk * PAIR_BYTES + 8)))

    def _choice_bytes(self) -> int:
        return 16 + 4 * self.experts + 12 * MAX_ROWS * self.top

    def _fixed_bytes(self) -> tuple[int, int]:
        scales = 2 * GROUP // 32 * WARPS * MAX_ROWS * 4
        first = self._choice_bytes() + 2 * WARPS * 16 * MAX_ROWS * 4 + scales * self.first_pairs
        return first, self._choice_bytes() + scales * self.second_pairs

    def definitions(self) -> dict[str, int]:
        """Macros of the kernels."""
        first, second = _chunk(self.first_pairs), _chunk(self.second_pairs)
        fixed = self._fixed_bytes()
        return {
            "HIDDEN": self.hidden,
            "INNER": self.inner,
            "EXPERTS": self.experts,
            "TOP": self.top,
            "LIMIT": self.limit,
            "FIRST_CHUNK": first,
            "FIRST_DEPTH": self._depth(first, fixed[0]),
            "SECOND_CHUNK": second,
            "SECOND_DEPTH": self._depth(second, fixed[1]),
        }

    def shared_bytes(self) -> tuple[int, int]:
        """Dynamic shared memory of a block of the first and of the second products."""
        got, fixed = self.definitions(), self._fixed_bytes()
        sizes = []
        for name, rest in zip(("FIRST", "SECOND"), fixed, strict=True):
            sizes.append(WARPS * got[f"{name}_DEPTH"] * (got[f"{name}_CHUNK"] * PAIR_BYTES + 8) + rest + 64)
        return sizes[0], sizes[1]
