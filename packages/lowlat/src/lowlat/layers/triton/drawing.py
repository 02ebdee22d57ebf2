"""Likeliest and drawn tokens of a few rows over a vocabulary, by the law of `layers/drawing.py`.

The vocabulary is cut into chunks, so that all multiprocessors read: one launch finds the chunks' best tokens, one the
best of those. Where tokens follow each other (`walk`), the launch of the next one does the latter.

Legend of shape suffixes: M samples of a step, V vocabulary, C chunks, T batch slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lowlat.layers.drawing import MIN_TEMPERATURE
from lowlat.layers.triton import early

let_next_start, wait_for_previous = early.let_next_start, early.wait_for_previous

_CHUNK = 512
# Where logits have a bias, whose weights a program holds.
_BIASED_CHUNK = 128
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _mix(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _gumbel(seed, position, ids):
    """`drawing.gumbel`: 64-bit arithmetic without signs."""
    stream = _mix(seed.to(tl.uint64, bitcast=True) ^ _mix(position.to(tl.uint64, bitcast=True) + _GAMMA))
    value = _mix(stream + (ids.to(tl.uint64) + 1) * _GAMMA)
    uniform = ((value >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _winner(largest_ptr, score_ptr, where_ptr, row, chunks, BROKEN: tl.constexpr, BLOCK_C: tl.constexpr):
    """The token of a row by its chunks' best, `BROKEN` where there is none."""
    place = tl.arange(0, BLOCK_C)
    inside = place < chunks
    largest_c = tl.load(largest_ptr + row * chunks + place, mask=inside, other=float("-inf"))
    score_c = tl.load(score_ptr + row * chunks + place, mask=inside, other=float("-inf"))
    where_c = tl.load(where_ptr + row * chunks + place, mask=inside, other=2147483647)
    broken = tl.max((largest_c != largest_c).to(tl.int32), axis=0) > 0
    usable = (broken == 0) & (tl.abs(tl.max(largest_c, axis=0)) < float("inf"))
    best = tl.max(score_c, axis=0)
    token = tl.min(tl.where(score_c == best, where_c, 2147483647), axis=0)
    return tl.where(usable, token, BROKEN).to(tl.int64)


@triton.jit
def _noise(
    slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, ids_ptr, row, place, inside, IDS: tl.constexpr
):  # fmt: skip
    """A row's temperature, and the noise of its tokens at `place`: zeros where it is greedy."""
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperatures_ptr + slot)
    noise = tl.zeros(place.shape, tl.float64)
    if temperature >= _MIN_TEMPERATURE:
        ids = place
        if IDS:
            ids = tl.load(ids_ptr + place, mask=inside, other=0)
        noise = _gumbel(tl.load(seeds_ptr + slot), tl.load(positions_ptr + row), ids)
    return temperature, noise


@triton.jit
def best_kernel(
    logits_ptr, slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, ids_ptr, largest_ptr, score_ptr, where_ptr,
    before_ptr, embed_ptr, head_ptr, last_largest_ptr, last_score_ptr, last_where_ptr, last_ptr, last_stride,
    vocabulary, chunks, RANK: tl.constexpr, BLOCK_E: tl.constexpr, SHARPNESS: tl.constexpr, DRAWS: tl.constexpr,
    IDS: tl.constexpr, CHUNK: tl.constexpr, FOLLOWS: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the best token of a chunk of a row, its score, and the largest logit; NaN where there is one.

    With a `RANK` above 0 logits have a bias by what comes before: the head's rows times the embedding of `before`. With
    `FOLLOWS` that is the token that the launch before this one found: every program finds it from the chunks' best, one
    writes it to `last`.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = place < vocabulary
    if EARLY and RANK == 0:
        let_next_start()
    x_ptr = logits_ptr + row * vocabulary + place
    if RANK > 0:
        # All but the token before is there when such a launch begins, since each lets the next start after its wait.
        entry = tl.arange(0, BLOCK_E)
        tile = inside[:, None] & (entry < RANK)[None, :]
        head = tl.load(head_ptr + place.to(tl.int64)[:, None] * RANK + entry[None, :], mask=tile, other=0.0)
        if DRAWS:
            temperature, noise = _noise(
                slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, ids_ptr, row, place, inside, IDS
            )
        if FOLLOWS:
            x = tl.load(x_ptr, mask=inside, other=float("-inf")).to(tl.float32)
    if EARLY:
        wait_for_previous()
    if EARLY and RANK > 0:
        let_next_start()
    if not FOLLOWS:
        x = tl.load(x_ptr, mask=inside, other=float("-inf")).to(tl.float32)
    if RANK > 0:
        if FOLLOWS:
            before = _winner(last_largest_ptr, last_score_ptr, last_where_ptr, row, chunks, 0, BLOCK_C)
            if chunk == 0:
                tl.store(last_ptr + row * last_stride, before)
        else:
            before = tl.load(before_ptr + row)
        said_e = tl.load(embed_ptr + before * RANK + entry, mask=entry < RANK, other=0.0).to(tl.float32)
        x += tl.sum(head.to(tl.float32) * said_e[None, :], axis=1)
    largest = tl.max(x, axis=0)
    broken = tl.max((x != x).to(tl.int32), axis=0) > 0
    score = x.to(tl.float64)
    if DRAWS:
        if RANK == 0:
            temperature, noise = _noise(
                slots_ptr, positions_ptr, temperatures_ptr, seeds_ptr, ids_ptr, row, place, inside, IDS
            )
        if temperature >= _MIN_TEMPERATURE:
            score = score * SHARPNESS / temperature.to(tl.float64) + noise
    best = tl.max(score, axis=0)
    first = tl.min(tl.where((score == best) & inside, place, 2147483647), axis=0)
    tl.store(largest_ptr + row * chunks + chunk, tl.where(broken, float("nan"), largest))
    tl.store(score_ptr + row * chunks + chunk, best)
    tl.store(where_ptr + row * chunks + chunk, first)


@triton.jit
def finish_kernel(
    largest_ptr, score_ptr, where_ptr, tokens_ptr, tokens_stride, chunks, BROKEN: tl.constexpr, BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the token of a row, `BROKEN` where there is none."""
    if EARLY:
        let_next_start()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    token = _winner(largest_ptr, score_ptr, where_ptr, row, chunks, BROKEN, BLOCK_C)
    tl.store(tokens_ptr + row * tokens_stride, token)


class _Scratch:
    """What two launches hand over, for rows of one size: the chunks' best."""

    def __init__(self, samples: int, vocabulary: int, chunk: int, device: torch.device) -> None:
        self.chunk = chunk
        self.chunks = triton.cdiv(vocabulary, chunk)
        self.largest_MC = torch.empty(samples, self.chunks, dtype=torch.float32, device=device)
        self.score_MC = torch.empty(samples, self.chunks, dtype=torch.float64, device=device)
        self.where_MC = torch.empty(samples, self.chunks, dtype=torch.int32, device=device)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the kernels take them."""
        return self.largest_MC, self.score_MC, self.where_MC


class _Bias:
    """What logits are added to by what comes before: given, or found by the launch before."""

    def __init__(
        self,
        embed_XE: torch.Tensor,
        head_VE: torch.Tensor,
        given_M: torch.Tensor | None,
        last: tuple[_Scratch, torch.Tensor] | None = None,
    ) -> None:
        """`last`: the launch before, and where its tokens are written."""
        self.embed_XE, self.head_VE, self.given_M, self.last = embed_XE, head_VE, given_M, last


def _best(
    scratch: _Scratch,
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None,
    sharpness: float,
    bias: _Bias | None,
    early_start: bool,
) -> None:
    """Let `scratch` hold the chunks' best."""
    samples, vocabulary = logits_MV.shape
    assert logits_MV.is_contiguous()
    assert slots_M.is_contiguous()
    assert positions_M.is_contiguous()
    temperature_T, seed_T = (scratch.largest_MC, slots_M) if settings is None else settings
    last, given_M, weights = None, slots_M, (logits_MV, logits_MV)
    if bias is not None:
        last, weights = bias.last, (bias.embed_XE, bias.head_VE)
        given_M = slots_M if bias.given_M is None else bias.given_M
        assert given_M.is_contiguous()
    last_scratch, last_M = (scratch, slots_M) if last is None else last
    rank = 0 if bias is None else bias.head_VE.shape[1]
    best_kernel[(samples, scratch.chunks)](
        logits_MV, slots_M, positions_M, temperature_T, seed_T, slots_M if ids_V is None else ids_V, *scratch.parts,
        given_M, *weights, *last_scratch.parts, last_M, last_M.stride(0), vocabulary, scratch.chunks, RANK=rank,
        BLOCK_E=max(16, triton.next_power_of_2(rank)), SHARPNESS=sharpness, DRAWS=settings is not None,
        IDS=ids_V is not None, CHUNK=scratch.chunk, FOLLOWS=last is not None,
        BLOCK_C=triton.next_power_of_2(scratch.chunks), EARLY=early_start, num_warps=4,
        **early.launch_options(early_start),
    )  # fmt: skip


def _finish(scratch: _Scratch, tokens_M: torch.Tensor, broken: int, early_start: bool) -> None:
    """Let `tokens_M` hold the best of the chunks' best."""
    finish_kernel[(len(tokens_M),)](
        *scratch.parts, tokens_M, tokens_M.stride(0), scratch.chunks, BROKEN=broken,
        BLOCK_C=triton.next_power_of_2(scratch.chunks), EARLY=early_start, num_warps=4,
        **early.launch_options(early_start),
    )  # fmt: skip


def draw(
    logits_MV: torch.Tensor,
    slots_M: torch.Tensor,
    positions_M: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None = None,
    sharpness: float = 1.0,
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """As `drawing.draw`."""
    tokens_M = torch.empty(len(logits_MV), dtype=torch.int64, device=logits_MV.device)
    scratch = _Scratch(len(logits_MV), logits_MV.shape[1], _CHUNK, logits_MV.device)
    _best(scratch, logits_MV, slots_M, positions_M, settings, ids_V, sharpness, None, early_start)
    _finish(scratch, tokens_M, -1, early_start)
    return tokens_M


def walk(
    logits_GBV: torch.Tensor,
    first_B: torch.Tensor,
    embed_XE: torch.Tensor,
    head_VE: torch.Tensor,
    slots_B: torch.Tensor,
    positions_GB: torch.Tensor,
    settings: tuple[torch.Tensor, torch.Tensor] | None,
    ids_V: torch.Tensor | None,
    sharpness: float,
    *,
    early_start: bool = False,
) -> torch.Tensor:
    """As `drawing.walk`: a launch a column, and one behind the last."""
    count, requests, vocabulary = logits_GBV.shape
    assert embed_XE.is_contiguous()
    assert head_VE.is_contiguous()
    columns_BG = torch.empty(requests, count, dtype=torch.int64, device=logits_GBV.device)
    # Two in turn: a launch reads the one before it while it writes its own.
    scratches = [_Scratch(requests, vocabulary, _BIASED_CHUNK, logits_GBV.device) for _ in range(2)]
    bias = _Bias(embed_XE, head_VE, first_B)
    for place in range(count):
        scratch = scratches[place % 2]
        _best(
            scratch, logits_GBV[place], slots_B, positions_GB[place], settings, ids_V, sharpness, bias, early_start
        )  # fmt: skip
        bias = _Bias(embed_XE, head_VE, None, (scratch, columns_BG[:, place]))
    _finish(scratch, columns_BG[:, count - 1], 0, early_start)
    return columns_BG
