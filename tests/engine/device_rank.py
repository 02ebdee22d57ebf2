"""A rank's process whose CPU says that it keeps the state of slots, so that it runs the runner of GPUs.

`LOWLAT_TEST_BREAK=n` lets its n-th step fail.
"""

from __future__ import annotations

import itertools
import os

from lowlat.engine import build, ranks
from lowlat.engine.device_runner import DeviceRunner
from lowlat.layers.row_sums import RankLostError
from lowlat.platform.cpu import CpuPlatform


class KeepingPlatform(CpuPlatform):
    """A CPU."""

    keeps_state = True


def select(device: str, rank: int = 0) -> KeepingPlatform:
    """In the place of `platform.select`."""
    return KeepingPlatform()


def break_step(number: int) -> None:
    """Let a step fail as one does whose sums lacked a rank's part."""
    launch, steps = DeviceRunner.launch, itertools.count(1)

    def breaking(self: DeviceRunner, plan: object) -> object:
        if next(steps) == number:
            raise RankLostError("a planted failure")
        return launch(self, plan)  # type: ignore[arg-type]

    DeviceRunner.launch = breaking  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    build.select = select
    if "LOWLAT_TEST_BREAK" in os.environ:
        break_step(int(os.environ["LOWLAT_TEST_BREAK"]))
    ranks.main()
