"""All-reduce of a few rows among the GPUs of one host, with the addition and the RMSNorm after it, in one kernel.

Every rank pushes its rows into every rank's inbox by unicast stores over NVLink, and sums what lies in its own inbox in
the order of ranks, so all ranks get the same bits. Each 8-byte word carries two bfloat16 values and the tag of this
reduction beside them: a word is there when its tag is, so there are no flags, and nothing is reset. Two halves of an
inbox take turns. That is enough: a rank can be one reduction ahead of another at most, because it needs the other's
words to finish one (tests/kernels/test_kernels_push_protocol.py tries all orders of events).

A wait ends after a number of looks: then the tag is written to `error`, and the host stops the group.

Status: compiled for sm_90 and interpreted on a CPU rank by rank; not run on GPUs, and no model uses it yet.

Legend of shape suffixes: R rows, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Looks at a word before its rank counts as gone: a second and more.
SPINS = 1 << 20


@triton.jit
def push_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, inboxes_ptr, tag_ptr, error_ptr, width, eps, offset,
    RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPINS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """One program: one row. `x_ptr`, `residual_ptr` and `out_ptr` are int32 words, each of two neighbouring values;
    `weight_ptr` too. `BLOCK` words hold a row, `width` values are real. The tag is `*tag_ptr + offset`, above 0."""
    row = tl.program_id(0)
    tag = tl.load(tag_ptr) + offset
    word = tl.arange(0, BLOCK)
    inside = word < width // 2
    mine = tl.load(x_ptr + row * (width // 2) + word, mask=inside, other=0)
    message = (tag.to(tl.int64) << 32) | (mine.to(tl.int64) & 0xFFFFFFFF)
    half = (tag % 2) * RANKS
    place = ((half + RANK) * ROWS + row) * BLOCK + word
    for turn in tl.static_range(RANKS):
        # Every rank starts with another peer, so that no link takes all at once.
        peer = tl.load(inboxes_ptr + (RANK + turn) % RANKS).to(tl.pointer_type(tl.int64))
        _push(peer + place, message, PLAIN)
    inbox = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        where = inbox + ((half + source) * ROWS + row) * BLOCK + word
        got = _look(where, PLAIN)
        missing = tl.sum(((got >> 32) != tag).to(tl.int32), axis=0)
        looks = 0
        while (missing > 0) & (looks < SPINS):
            got = _look(where, PLAIN)
            missing = tl.sum(((got >> 32) != tag).to(tl.int32), axis=0)
            looks += 1
        if missing > 0:
            tl.store(error_ptr, tag)
        low += _lower(got.to(tl.int32))
        high += _upper(got.to(tl.int32))
    residual = tl.load(residual_ptr + row * (width // 2) + word, mask=inside, other=0)
    # Rounded as an all-reduce and an addition of their own would round.
    low = _rounded(_rounded(low) + _lower(residual))
    high = _rounded(_rounded(high) + _upper(residual))
    tl.store(residual_ptr + row * (width // 2) + word, _packed(low, high), mask=inside)
    inverse = tl.rsqrt(tl.sum(tl.where(inside, low * low + high * high, 0.0), axis=0) / width + eps)
    weight = tl.load(weight_ptr + word, mask=inside, other=0)
    low = _rounded(low * inverse * _lower(weight))
    high = _rounded(high * inverse * _upper(weight))
    tl.store(out_ptr + row * (width // 2) + word, _packed(low, high), mask=inside)


@triton.jit
def _push(where, message, PLAIN: tl.constexpr):
    if PLAIN:
        tl.store(where, message)
    else:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;", "=r,l,l", [where, message], tl.int32, False, 1
        )


@triton.jit
def _look(where, PLAIN: tl.constexpr):
    if PLAIN:
        got = tl.load(where)
    else:
        got = tl.inline_asm_elementwise("ld.relaxed.sys.global.b64 $0, [$1];", "=l,l", [where], tl.int64, False, 1)
    return got


@triton.jit
def _lower(words):
    """The first value of each word: bfloat16 is the upper half of a float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """To the nearest bfloat16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _packed(low, high):
    """Words of values that bfloat16 holds."""
    first = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return first | (high.to(tl.int32, bitcast=True) & -65536)


def inbox_words(ranks: int, rows: int, width: int) -> int:
    """int64 words of one rank's inbox for up to `rows` rows; they must be 0 before the first reduction."""
    return 2 * ranks * rows * int(triton.next_power_of_2(width // 2))


def push_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` words: four words a thread. Above, registers spill (4,096 values
    fit; 7,168 spill eight bytes a thread)."""
    return min(32, max(1, block // 128))


def push_reduce_norm(
    x_RH: torch.Tensor,
    residual_RH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    inboxes: torch.Tensor,
    tag: torch.Tensor,
    offset: int,
    error: torch.Tensor,
    rank: int,
    rows: int,
    spins: int = SPINS,
    plain: bool = False,
) -> torch.Tensor:
    """`residual_RH` += the sum of the ranks' `x_RH`; returns RMSNorm of it. bfloat16, contiguous, H even.

    `inboxes`: int64 addresses of every rank's inbox (`inbox_words`), as this GPU sees them. `tag + offset` must be
    above 0, the same on all ranks, and one more at every call: a graph adds its number of calls to `tag` once a replay.
    `error`: int32, 0 until a wait ends in vain. `plain`: ordinary loads and stores, for the interpreter.
    """
    count, width = x_RH.shape
    assert x_RH.dtype == torch.bfloat16
    assert count <= rows
    assert width % 2 == 0
    out_RH = torch.empty_like(x_RH)
    block = triton.next_power_of_2(width // 2)
    words = (tensor.view(torch.int32) for tensor in (x_RH, residual_RH, weight_H, out_RH))
    push_reduce_norm_kernel[(count,)](
        *words, inboxes, tag, error, width, eps, offset, RANK=rank, RANKS=len(inboxes), ROWS=rows, BLOCK=block,
        SPINS=spins, PLAIN=plain, num_warps=push_warps(block),
    )  # fmt: skip
    return out_RH
