"""Launches that overlap: a kernel's programs start while the one before it runs (programmatic dependent launch).

A kernel that is launched so calls `let_next_start` and, before it touches anything that an earlier kernel wrote,
`wait_for_previous`; what it reads before, such as weights, nobody writes. Whoever waits for a kernel waits for all
before it too, since each of them waited. Small kernels let the next one start first. Of those of several rows, which
take more of a processor, not all may, or programs of many kernels wait there and new ones crowd on the others: the
joining of attention and products behind a norm do, the rest once they have waited (decision 0714). Hopper and later;
elsewhere both are left out.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

try:
    _cuda: Any = importlib.import_module("triton.language.extra.cuda")
except ImportError:  # a build of triton for other devices
    _cuda = None
wait_for_previous: Any = getattr(_cuda, "gdc_wait", None)
let_next_start: Any = getattr(_cuda, "gdc_launch_dependents", None)


def starts_early(device: torch.device) -> bool:
    """Whether kernels may be launched so on this device."""
    if device.type != "cuda" or torch.version.hip is not None or wait_for_previous is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(early: bool) -> dict[str, bool]:
    """What Triton must be told at a launch."""
    return {"launch_pdl": True} if early else {}
