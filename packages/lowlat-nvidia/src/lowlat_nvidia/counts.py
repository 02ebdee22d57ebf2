"""Bytes that kernels of this library read by their plans. Pure arithmetic; `lowlat bench gate` holds them fixed."""

from __future__ import annotations

from lowlat_nvidia.dense.plan import BLOCKS, PRESETS, WARPS, DensePlan


def step_bytes() -> dict[str, int]:
    """By name: the packed weights that one dense step streams, padding of the last logits included."""
    plans = {name: DensePlan(shape) for name, shape in PRESETS.items()}
    return {
        f"lowlat-nvidia dense {name} weights": plan.stream_pages() * BLOCKS * WARPS * plan.page_bytes
        for name, plan in plans.items()
    }
