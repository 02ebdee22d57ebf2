"""What a host tells about itself and its model, before any library is asked."""

from __future__ import annotations

from typing import Any

import msgspec

from lowlat_plugin.version import BASIC_FEATURES, CONTRACT_VERSION

MAX_DEADLINE_S = 30.0


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot of model, device and engine. All that the guard decides on is here, so that it can be tested alone.

    `config` is the model's configuration with Hugging Face field names; `settings` the host's own arguments by their
    own names; `capabilities` what the engine is doing, name to version (see `capabilities.py`). `features` are the
    contract features that the host offers.
    """

    architecture: str
    config: dict[str, Any]
    vendor: str
    isa: str
    dtype: str
    weight_formats: frozenset[str]
    kv_dtype: str
    page_size: int
    tensor_parallel: int = 1
    resident_blocks: int = 0
    shared_memory: int = 0
    capabilities: dict[str, int] = {}
    settings: dict[str, Any] = {}
    features: frozenset[str] = BASIC_FEATURES
    contract: int = CONTRACT_VERSION
    watchdog_s: float | None = 60.0


def deadline_for(watchdog_s: float | None) -> float:
    """The longest wait for another rank, in seconds: half the watchdog's patience, at most 30."""
    if watchdog_s is None or watchdog_s <= 0:
        return MAX_DEADLINE_S
    return min(MAX_DEADLINE_S, watchdog_s / 2)
