"""Which part of a weight each rank holds."""

from __future__ import annotations

import msgspec


class Shard(msgspec.Struct, frozen=True):
    """One rank of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, total: int, unit: int = 1) -> slice:
        """This rank's part of `total` entries, cut at multiples of `unit`; earlier ranks get the larger parts.

        Attention is cut at whole key-value heads with all their query heads, so nine query heads on three key-value
        heads become six and three on two ranks. Raises `ValueError` when a rank would get nothing.
        """
        if total % unit:
            raise ValueError(f"{total} is not a multiple of {unit}")
        units = total // unit
        if units < self.size:
            raise ValueError(f"{units} units cannot be spread over {self.size} ranks; use --tp {units} or less")
        base, extra = divmod(units, self.size)
        start = self.rank * base + min(self.rank, extra)
        return slice(start * unit, (start + base + (self.rank < extra)) * unit)

    def length(self, total: int, unit: int = 1) -> int:
        """Entries in `part`."""
        part = self.part(total, unit)
        return int(part.stop - part.start)
