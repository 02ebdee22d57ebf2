"""A small model that a kernel library covers, made by the library itself (`KernelSpec.example`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowlat_plugin.host import Host
from lowlat_plugin.reasons import Code, Reason, Refused
from lowlat_plugin.registry import load_object
from lowlat_plugin.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Case:
    """Configuration and weights with Hugging Face names, small enough that a check takes seconds.

    `weights` are what the general path computes with; `checkpoint` is a file with the same numbers for kernels that
    read one. `group(size)` gives the hosts of `size` ranks that share one communicator, for libraries that support
    several; `deadline_s` is how long their waits may take. `host` replaces the reference engine for architectures that
    it lacks.
    """

    spec: KernelSpec
    config: dict[str, Any]
    weights: dict[str, Tensor]
    isa: str
    checkpoint: Path | None = None
    weight_formats: frozenset[str] = frozenset({"plain"})
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 4
    tokens_per_request: int = 1
    resident_blocks: int = 1 << 16
    shared_memory: int = 1 << 30
    deadline_s: float = 10.0
    settings: dict[str, Any] = field(default_factory=dict)
    host: Callable[[Case], Host] | None = None
    group: Callable[[int], list[Host]] | None = None


def load_case(spec: KernelSpec, seed: int = 0) -> Case:
    """Call a spec's example with `seed` (different seeds: different weights).

    Raises Refused when there is none, or when it throws.
    """
    if not spec.example:
        hint = "set KernelSpec.example to 'module:function' returning a lowlat_plugin.conformance.Case"
        raise Refused(spec.name, [Reason(Code.NOT_FOUND, "example", "none", "a small case to check with", hint)])
    try:
        made = load_object(spec.example)
        case = made(seed=seed) if "seed" in inspect.signature(made).parameters else made()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise Refused(spec.name, [Reason(Code.LOAD_FAILED, spec.example, found, "a Case")]) from error
    if not isinstance(case, Case):
        raise Refused(spec.name, [Reason(Code.LOAD_FAILED, spec.example, type(case).__name__, "a Case")])
    return case
