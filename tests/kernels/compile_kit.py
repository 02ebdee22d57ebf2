"""Kernels compiled for GPUs that are not here, and what they take there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Bytes of shared memory that a program may have: Hopper and Blackwell 227 KiB, CDNA4 160 KiB.
SHARED = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx950": 160 * 1024}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any], **options: int) -> Any:
    """Compile as a launch would: pointers are multiples of 16 bytes; arguments without a type are constants."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    assert {name for name in names if signature[name] == "constexpr"} == set(constants), "arguments without a value"
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(kernel: Any, target: str, tmp_path: Path) -> tuple[int, int, int]:
    """Registers of a thread, bytes that it spills, bytes of shared memory of a program."""
    if target == "gfx950":
        text = kernel.asm["amdgcn"]
        find = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        private = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])
        return find["vgpr_count"], find["vgpr_spill_count"] + private, kernel.metadata.shared
    path = tmp_path / "kernel.cubin"
    path.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    # Spilled registers show as stack, never as local memory.
    registers, stack = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK"))
    return registers, stack, kernel.metadata.shared
