"""What a device can do, and the defaults that follow from it."""

from __future__ import annotations

from lowlat.platform.base import Platform
from lowlat.platform.cpu import CpuPlatform
from lowlat.platform.cuda import CudaPlatform, has_gpu

__all__ = ["Platform", "select"]


def select(device: str, rank: int = 0) -> Platform:
    """The platform named `device`: `cpu`, `cuda`, or `auto`, which is `cuda` where PyTorch sees a GPU of NVIDIA's.

    `rank` of a tensor-parallel group has a GPU of its own, of the same number.

    Raises `ValueError` for a device that lowlat does not know or cannot use here.
    """
    if device == "cuda" or (device == "auto" and has_gpu()):
        return CudaPlatform(rank)
    if device in ("auto", "cpu"):
        return CpuPlatform()
    raise ValueError(f"--device {device} is not known; known: auto, cpu, cuda")
