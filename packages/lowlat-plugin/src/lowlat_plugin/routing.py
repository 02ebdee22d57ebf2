"""Who computes a step: a table made at start, the same on every rank, and counters of what happened.

A look-up is one dictionary access on values the host already has; nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from lowlat_plugin.agreement import digest
from lowlat_plugin.spec import Mode
from lowlat_plugin.steps import Shape


class Path(StrEnum):
    KERNELS = "plugin"
    GENERAL = "general"


class Route(msgspec.Struct, frozen=True):
    """The path of a step and the word that says why. For kernels the reason is `covered`."""

    path: Path
    reason: str

    @property
    def kernels(self) -> bool:
        return self.path is Path.KERNELS


COVERED = Route(Path.KERNELS, "covered")
PREFILL = Route(Path.GENERAL, "prefill")
NO_KERNELS = Route(Path.GENERAL, "no-kernels")
SWITCHED_OFF = Route(Path.GENERAL, "switched-off")
NOT_COVERED = Route(Path.GENERAL, "not-covered")
TOO_WIDE = Route(Path.GENERAL, "too-wide")
FAILED = Route(Path.GENERAL, "failed")
SUSPENDED = Route(Path.GENERAL, "suspended")
OFF = Route(Path.GENERAL, "off")


class RoutingTable:
    """Routes by (mode, requests, rows) for one KV layout.

    Shapes that turned out not to keep their promise are disabled one by one, each with its reason.
    """

    def __init__(self, shapes: Iterable[Shape], layout: str) -> None:
        self._routes: dict[Shape, Route] = dict.fromkeys(shapes, COVERED)
        self._widest = max((shape.rows for shape in self._routes), default=0)
        self.layout = layout

    def route(self, mode: Mode, requests: int, rows: int) -> Route:
        found = self._routes.get(Shape(mode, requests, rows))
        if found is not None:
            return found
        if mode is Mode.PREFILL:
            return PREFILL
        return TOO_WIDE if rows > self._widest else NOT_COVERED

    def disable(self, shape: Shape, reason: str) -> None:
        """Send one shape to the general path from now on."""
        if shape in self._routes:
            self._routes[shape] = Route(Path.GENERAL, reason)

    @property
    def covered(self) -> tuple[Shape, ...]:
        return tuple(sorted(shape for shape, route in self._routes.items() if route.kernels))

    @property
    def disabled(self) -> dict[Shape, str]:
        return {shape: route.reason for shape, route in self._routes.items() if not route.kernels}

    def digest(self) -> str:
        """Equal on two ranks exactly when they would route every step alike."""
        rows = sorted((str(shape), route.path.value, route.reason) for shape, route in self._routes.items())
        return digest([self.layout, rows])


class Counters:
    """Steps by path and reason; the host shows them as `lowlat_low_latency_steps_total{path,reason}`."""

    def __init__(self) -> None:
        self._steps: dict[Route, int] = {}

    def add(self, route: Route, steps: int = 1) -> None:
        self._steps[route] = self._steps.get(route, 0) + steps

    def snapshot(self) -> dict[tuple[str, str], int]:
        taken = dict(self._steps)  # one step, so that a thread may count meanwhile
        return {(route.path.value, route.reason): count for route, count in sorted(taken.items(), key=_order)}

    def total(self, path: Path) -> int:
        return sum(count for route, count in self._steps.items() if route.path is path)


def _order(item: tuple[Route, int]) -> tuple[str, str]:
    return item[0].path.value, item[0].reason
