"""Which shapes are checked before kernels serve, and what follows where they miss their promise."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lowlat_plugin.agreement import agree
from lowlat_plugin.kernel import Kernel
from lowlat_plugin.reasons import Code
from lowlat_plugin.routing import RoutingTable
from lowlat_plugin.shadow import Shadow, ShapeResult
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Shape

log = logging.getLogger("lowlat.plugins")


def worth_proving(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """All of decode; of verify the widest for each number of requests, which uses every row."""
    widest: dict[tuple[Mode, int], Shape] = {}
    for shape in shapes:
        key = (shape.mode, shape.requests)
        widest[key] = max(shape, widest.get(key, shape))
    return tuple(sorted(widest.values()))


def disable(table: RoutingTable, shape: Shape, proven: Sequence[Shape]) -> None:
    """Disable a shape, and with it the narrower ones that it stood for."""
    for other in table.covered:
        if other == shape or (other not in proven and (other.mode, other.requests) == (shape.mode, shape.requests)):
            table.disable(other, "shadow-miss")


def prove_shapes(
    shadow: Shadow, kernel: Kernel, table: RoutingTable, shapes: Sequence[Shape], deadline_s: float
) -> tuple[ShapeResult, ...]:
    """Check shapes one after another, agreed over the ranks, and disable those in `table` that miss their promise.

    After something worse than a distance beyond its bound the rest is skipped, on all ranks. Every step of the kernels
    must end within twice `deadline_s` seconds.
    """
    results: list[ShapeResult] = []
    for shape in shapes:
        result = shadow.check(kernel, kernel.numerics(), shape, deadline_s)
        everyones = agree(shadow.host.agreement, f"shadow {shape}", result.reasons)
        results.append(ShapeResult(result.shape, result.measurements, everyones))
        if everyones:
            log.warning("%s misses its promise for %s: %s", kernel.spec.name, shape, everyones[0])
            disable(table, shape, shapes)
        if any(reason.code != Code.NUMERICS for reason in everyones):
            break
    return tuple(results)
