"""A value that stays in the layout of its loads.

Triton may move what is computed element by element behind the conversion that a product wants, and then converts every
tensor that it is computed from: a round through shared memory, with barriers, for each. A pinned value is converted
once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pinned(x):
    """`x`, bfloat16 or float32, of which Triton cannot tell that nothing happened to it. On NVIDIA GPUs alone."""
    pack: tl.constexpr = 2 if x.dtype == tl.bfloat16 else 1
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, is_pure=False, pack=pack)
