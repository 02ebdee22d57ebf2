"""Kernels compiled side by side before the first of them runs.

Triton compiles a kernel when it is first launched, so a start without compiled kernels would compile one after another.
Here the work that is to come is rehearsed: no kernel that is not compiled yet is launched, what it was to be compiled
for is noted, and then threads compile all of it into Triton's cache on disk, where the first launches find it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.compiler import ASTSource

log = logging.getLogger("lowlat.engine")

_MOST_THREADS = 16
_EMPTY = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


class _ZeroedMemory(TorchFunctionMode):
    """What no kernel writes in a rehearsal holds zeros: it may be looked up by."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _EMPTY.get(function, function)(*args, **(kwargs or {}))


@contextmanager
def rehearsal() -> Iterator[list[Callable[[], object]]]:
    """Inside, kernels that are not compiled are left out; the list fills with what compiles them."""
    compilations: dict[Any, Callable[[], object]] = {}

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        where = fn.jit_function, str(key)
        if where not in compilations:
            compilations[where] = lambda: _compile(fn.jit_function, compile)
        return True  # leave it out

    found: list[Callable[[], object]] = []
    knobs = triton.knobs.runtime
    before = knobs.jit_cache_hook
    knobs.jit_cache_hook = note
    try:
        with _ZeroedMemory():
            yield found
    finally:
        knobs.jit_cache_hook = before
        found += compilations.values()


def compile_all(compilations: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compile side by side, and load on the device: what launches them is compiled with that, too."""

    # Threads have a current device of their own.
    index = None if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index

    def start() -> None:
        if index is not None:
            torch.cuda.set_device(index)

    def run(compilation: Callable[[], Any]) -> None:
        kernel = compilation()
        if index is not None:
            _ = kernel.run

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "compile", start) as pool:
        list(pool.map(run, compilations))


def _compile(function: Any, found: dict[str, Any]) -> Any:
    options = json.loads(found["specialization_data"])["options"]
    source = ASTSource(function, found["signature"], found["constants"], found["configs"][0])
    return triton.compile(
        source,
        target=triton.runtime.driver.active.get_current_target(),
        options={name: _tuples(value) for name, value in options.items()},
    )


def _tuples(value: Any) -> Any:
    """JSON knows no tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
