"""What a device can do, and the defaults that follow from it."""

from __future__ import annotations

from lowlat.platform.base import Platform
from lowlat.platform.cpu import CpuPlatform

__all__ = ["Platform", "select"]


def select(device: str) -> Platform:
    """The platform named `device`: `auto` or `cpu`. Raises `ValueError` for a device that lowlat cannot use."""
    if device in ("auto", "cpu"):
        return CpuPlatform()
    raise ValueError(f"--device {device}: this version of the runtime runs on CPUs only; use --device cpu")
