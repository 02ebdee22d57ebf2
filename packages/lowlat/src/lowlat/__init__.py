"""lowlat: the fastest way for one user to get tokens from a large language model.

`from lowlat import Engine` gives a model in this process; `lowlat serve` gives one over HTTP.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowlat.engine.config import EngineConfig
    from lowlat.engine.request import SamplingParams
    from lowlat.grammars.grammar import Grammar
    from lowlat.offline import Engine, Session

try:
    __version__ = version("lowlat")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["Engine", "EngineConfig", "Grammar", "SamplingParams", "Session", "__version__"]

_HOMES = {
    "Engine": "lowlat.offline",
    "EngineConfig": "lowlat.engine.config",
    "Grammar": "lowlat.grammars.grammar",
    "SamplingParams": "lowlat.engine.request",
    "Session": "lowlat.offline",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds: only what is used is loaded, so that `lowlat --help` answers at once.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
