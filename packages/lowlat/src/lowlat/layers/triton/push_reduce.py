"""All-reduce of a few rows among the GPUs of one host, with the addition and the RMSNorm after it, in one kernel.

Every rank pushes its rows into every other rank's inbox by unicast stores over NVLink, and sums what lies in its own
inbox with its own rows in the order of ranks, so all ranks get the same bits. Each 8-byte word carries two bfloat16
values and the tag of this reduction beside them: a word is there when its tag is, so there are no flags, and nothing is
reset. Two halves of an inbox take turns. That is enough: a rank can be one reduction ahead of another at most, because
it needs the other's words to finish one (tests/kernels/test_kernels_push_protocol.py tries all orders of events). Every
row counts its own reductions, on the device, so graphs can replay them.

A wait ends at a deadline. Then the rank writes the tag to the `broken` word of every rank, where all kernels look, so
that nobody waits any longer, and to `alarm` in the host's memory; results are NaN from there on.

Legend of shape suffixes: R rows, H hidden.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from lowlat.layers.triton.early import launch_options, let_next_start, wait_for_previous

HEAD_BYTES = 256
"""What lies before a rank's inbox: its `broken` word, and nothing else."""
_WORDS = 4
"""Words that a thread waits for together; more would not leave registers for them."""
_CALM_LOOKS = 256
"""Looks between two at the clock and the `broken` word."""


@triton.jit
def push_reduce_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, memories_ptr, tags_ptr, alarm_ptr, eps, deadline_ns,
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WAIT: tl.constexpr, WAIT_CONSTRAINTS: tl.constexpr, WAIT_TYPES: tl.constexpr, PACK: tl.constexpr,
    PLAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: one row. `x_ptr`, `residual_ptr`, `weight_ptr` and `out_ptr` are int32 words, each of two
    neighbouring values. `BLOCK` words hold a row, `WIDTH` values are real.
    That they are constants tells the compiler how rows are aligned: all tensors then lie in one layout."""
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + word, mask=word < WIDTH // 2, other=0)
    if EARLY:
        let_next_start()
        wait_for_previous()
    inside = word < WIDTH // 2
    tag = tl.load(tags_ptr + row) + 1
    own = tl.load(memories_ptr + RANK)
    broken = tl.load(own.to(tl.pointer_type(tl.int32)))
    mine = tl.load(x_ptr + row * (WIDTH // 2) + word, mask=inside, other=0)
    residual = tl.load(residual_ptr + row * (WIDTH // 2) + word, mask=inside, other=0)
    half = (tag & 1) * RANKS
    after = tl.zeros([BLOCK], tl.int32)
    for turn in tl.static_range(1, RANKS):
        # Every rank starts with another peer, so that no link takes all at once.
        peer = (tl.load(memories_ptr + (RANK + turn) % RANKS) + 256).to(tl.pointer_type(tl.int64))
        after += push_word(peer + ((half + RANK) * ROWS + row) * BLOCK + word, mine, tag, PLAIN)
    # What comes from the pushes, zeros, holds the wait behind them.
    where = (own + 256).to(tl.pointer_type(tl.int64)) + (half * ROWS + row) * BLOCK + word + after
    got = wait_for_words(
        where, tag, own, tl.where(broken != 0, 0, deadline_ns), WAIT, WAIT_CONSTRAINTS, WAIT_TYPES, PACK,
        RANK, RANKS, ROWS * BLOCK, PLAIN,
    )  # fmt: skip
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            words = mine
        elif source < RANK:
            words = got[source + 1]
        else:
            words = got[source]
        low += _lower(words)
        high += _upper(words)
    # Rounded as an all-reduce and an addition of their own would round.
    low = _rounded(_rounded(low) + _lower(residual))
    high = _rounded(_rounded(high) + _upper(residual))
    tl.store(residual_ptr + row * (WIDTH // 2) + word, _packed(low, high), mask=inside)
    squares = tl.where(inside, low * low + high * high, 0.0)
    total, missed = tl.reduce((squares, got[0]), 0, _sum_and_any)
    failed = (missed | broken) != 0
    inverse = tl.where(failed, float("nan"), tl.rsqrt(total / WIDTH + eps))
    low = _rounded(low * inverse * _lower(weight))
    high = _rounded(high * inverse * _upper(weight))
    tl.store(out_ptr + row * (WIDTH // 2) + word, _packed(low, high), mask=inside)
    tl.store(tags_ptr + row, tag)
    if failed:
        tell_failure(memories_ptr, alarm_ptr, tag, RANKS)


@triton.jit
def push_word(where, words, tag, PLAIN: tl.constexpr):
    """Store words (int32) with the tag beside each to `where`, 8 bytes at once. Returns zeros."""
    message = (tag.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    if PLAIN:
        tl.store(where, message)
        zeros = words * 0
    else:
        zeros = tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;", "=r,l,l", [where, message], tl.int32, False, 1
        )
    return zeros


@triton.jit
def wait_for_words(
    where, tag, own, limit_ns, WAIT: tl.constexpr, WAIT_CONSTRAINTS: tl.constexpr, WAIT_TYPES: tl.constexpr,
    PACK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, STRIDE: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Wait for the words of all other ranks; `where` are those of source 0, the next source's `STRIDE` words further.

    Returns a tuple: not 0 where a word did not come, then the words by source. `own`: address of the `broken` word.
    """
    if PLAIN:
        missing = tag * 0
        for source in tl.static_range(RANKS):
            if source != RANK:
                missing |= ((tl.load(where + source * STRIDE) >> 32) != tag).to(tl.int32)
        got = (missing,)
        for source in tl.static_range(RANKS):
            if source != RANK:
                got = got + (tl.load(where + source * STRIDE).to(tl.int32),)  # type: ignore[assignment]
    else:
        # It is called pure, since Triton would else run copies of it for tensors of other layouts.
        zeros = (where.to(tl.int64) * 0).to(tl.int32)
        got = tl.inline_asm_elementwise(
            WAIT, WAIT_CONSTRAINTS, [where, zeros + tag, zeros.to(tl.int64) + own, zeros.to(tl.int64) + limit_ns],
            WAIT_TYPES, True, PACK,
        )  # fmt: skip
    return got


@triton.jit
def tell_failure(memories_ptr, alarm_ptr, tag, RANKS: tl.constexpr):
    """Tell the host and all ranks that a word did not come."""
    tl.store(alarm_ptr, tag)
    for rank in tl.static_range(RANKS):
        tl.store(tl.load(memories_ptr + rank).to(tl.pointer_type(tl.int32)), tag)


@triton.jit
def _sum_and_any(total, missed, other_total, other_missed):
    return total + other_total, missed | other_missed


@triton.jit
def _lower(words):
    """The first value of each word: bfloat16 is the upper half of a float32."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _upper(words):
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """To the nearest bfloat16, ties to even, as float32; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def _packed(low, high):
    """Words of values that bfloat16 holds."""
    first = (low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return first | (high.to(tl.int32, bitcast=True) & -65536)


@functools.cache
def wait_asm(ranks: int, rank: int, stride: int, pack: int) -> tuple[str, str]:
    """PTX that waits for `pack` words of every other rank, all at once, and its constraints.

    Outputs: whether a word did not come, and the words' values by source. Inputs: the address of source 0's word (the
    next source's is `stride` bytes further), the tag, the address of the `broken` word, nanoseconds to wait.
    """
    sources = [source for source in range(ranks) if source != rank]
    outputs = pack * (1 + len(sources))
    where, tag, broken, limit = (outputs + part * pack for part in range(4))
    words = [(number, place, source) for number, source in enumerate(sources, start=1) for place in range(pack)]
    # All loads of a look are issued before the first is needed.
    looks = [
        f"ld.relaxed.sys.global.b64 w{number}_{place}, [${where + place} + {source * stride}];"
        for number, place, source in words
    ]
    for number, place, _ in words:
        looks.append(f"mov.b64 {{${number * pack + place}, t}}, w{number}_{place};")
        looks.append(f"xor.b32 t, t, ${tag + place};")
        looks.append("or.b32 bad, bad, t;")
    registers = ", ".join(["begun", "now", *(f"w{number}_{place}" for number, place, _ in words)])
    lines = [
        "{", ".reg .pred p;", ".reg .b32 t, bad, looks;", f".reg .b64 {registers};",
        "mov.b32 looks, 0;", "mov.b64 begun, 0;",
        "LOOK:", "mov.b32 bad, 0;", *looks,
        "setp.eq.b32 p, bad, 0;", "@p bra DONE;",
        "add.u32 looks, looks, 1;", f"setp.eq.u64 p, ${limit}, 0;", "@p bra DONE;",
        f"and.b32 t, looks, {_CALM_LOOKS - 1};", "setp.ne.b32 p, t, 0;", "@p bra LOOK;",
        f"ld.relaxed.sys.global.b32 t, [${broken}];", "setp.ne.b32 p, t, 0;", "@p bra DONE;",
        "mov.u64 now, %globaltimer;", f"setp.eq.b32 p, looks, {_CALM_LOOKS};", "@p mov.b64 begun, now;",
        "sub.u64 now, now, begun;", f"setp.lt.u64 p, now, ${limit};", "@p bra LOOK;",
        "DONE:", *(f"mov.b32 ${place}, bad;" for place in range(pack)), "}",
    ]  # fmt: skip
    constraints = ["=&r"] * outputs + ["l"] * pack + ["r"] * pack + ["l"] * (2 * pack)
    return "\n".join(lines), ",".join(constraints)


def block_words(width: int) -> int:
    """Words that a row of `width` values takes in an inbox."""
    return int(triton.next_power_of_2(width // 2))


def memory_bytes(ranks: int, rows: int, width: int) -> int:
    """Bytes of one rank's memory for up to `rows` rows; they must be 0 before the first reduction."""
    return HEAD_BYTES + 8 * 2 * ranks * rows * block_words(width)


def push_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` words: four words a thread. Above, registers spill."""
    return min(32, max(1, block // (32 * _WORDS)))


def constants(width: int, ranks: int, rank: int, rows: int, *, plain: bool, early: bool = False) -> dict[str, Any]:
    """The kernel's constant arguments."""
    block = block_words(width)
    pack = max(1, min(_WORDS, block // (32 * push_warps(block))))
    wait, constraints = wait_asm(ranks, rank, 8 * rows * block, pack)
    return {
        "WIDTH": width, "RANK": rank, "RANKS": ranks, "ROWS": rows, "BLOCK": block, "WAIT": wait,
        "WAIT_CONSTRAINTS": constraints, "WAIT_TYPES": (tl.int32,) * ranks, "PACK": pack, "PLAIN": plain,
        "EARLY": early,
    }  # fmt: skip


def push_reduce_norm(
    x_RH: torch.Tensor,
    residual_RH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    *,
    memories: torch.Tensor,
    tags: torch.Tensor,
    alarm: torch.Tensor,
    rank: int,
    deadline_s: float,
    early_start: bool = False,
    plain: bool = False,
) -> torch.Tensor:
    """`residual_RH` += the sum of the ranks' `x_RH`; returns RMSNorm of it. bfloat16, contiguous, H even.

    `memories`: int64 addresses of every rank's memory (`memory_bytes`), as this GPU sees them. `tags`: int32, how many
    reductions each row has had; as many rows as the memory is for. `alarm`: int32 in pinned memory, 0 until a wait
    ends in vain. `plain`: ordinary loads and stores and no wait, for the interpreter.
    """
    count, width = x_RH.shape
    ranks, rows = len(memories), len(tags)
    assert x_RH.dtype == residual_RH.dtype == weight_H.dtype == torch.bfloat16
    assert count <= rows
    assert width % 2 == 0
    assert x_RH.is_contiguous()
    assert residual_RH.is_contiguous()
    out_RH = torch.empty_like(x_RH)
    words = (tensor.view(torch.int32) for tensor in (x_RH, residual_RH, weight_H, out_RH))
    push_reduce_norm_kernel[(count,)](
        *words, memories, tags, alarm, eps, int(deadline_s * 1e9),
        **constants(width, ranks, rank, rows, plain=plain, early=early_start),
        num_warps=push_warps(block_words(width)), **launch_options(early_start),
    )  # fmt: skip
    return out_RH
