"""Attributes of this module are SGLang spec objects, one for each registered candidate; see `sglang.attribute_of`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from lowlat_plugin.hosts.sglang import spec_for

    return spec_for(name)
