"""XGrammar, loaded without what it imports and grammars do not need: PyTorch and transformers, seconds and hundreds of
megabytes. Only in a process that does nothing else: the stand-ins stay in `sys.modules`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Missing:
    """Stands for any class or function of a module that is not there."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Missing,), {})


def load_xgrammar() -> ModuleType:
    """The library, with NumPy arrays as its tensors. Call it in a grammar process only."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # its binding layer does without, if it knows so
    import tvm_ffi  # noqa: F401

    for name in ("torch", "transformers"):
        sys.modules[name] = _StandIn(name)
    import xgrammar

    return xgrammar
