"""What a planted fault is."""

from __future__ import annotations

import dataclasses

_LOWLAT = "packages/lowlat/src/lowlat/"


@dataclasses.dataclass(frozen=True)
class Plant:
    """`old` occurs once in `file`; `new` takes its place; then each of `tests` fails."""

    fault: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def plant(fault: str, what: str, file: str, old: str, new: str, *tests: str) -> Plant:
    """A fault in a file of the runtime, and tests below `tests/`."""
    return Plant(fault, what, _LOWLAT + file, old, new, tuple(f"tests/{test}" for test in tests))
