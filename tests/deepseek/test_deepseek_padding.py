"""Padding rows beside pages with scales: full of NaN, they change no byte of a cache and no real row."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from deepseek_kit import STATES, Runner, load, some_tokens

from lowlat.models.deepseek_v4.step import make_step

PADDED = 8


def cached(runner: Runner) -> list[torch.Tensor]:
    """Bytes of all caches, payload and scales."""
    caches = runner.caches
    pages = [tensor.bytes_PB for tensor in (*caches.main.values(), *caches.keys.values())]
    pages += [window.entries.bytes_PB for window in caches.windows]
    states = [ring.values_SWD for ring in caches.rings.values()] + [caches.history.values_SWD]
    return pages + [state.view(torch.uint8) for state in states]


def test_padding_rows_change_no_byte_and_no_row(tiny_v41: Path) -> None:
    model = load(tiny_v41)
    model.embedding_VH = model.embedding_VH.clone()
    model.embedding_VH[0] = float("nan")
    prompts = [some_tokens(9 + 13 * state, seed=state) for state in range(STATES)]
    plain, padded = Runner(model), Runner(model)
    for runner in (plain, padded):
        for state, prompt in enumerate(prompts):
            runner.prefill(state, prompt)
    for place in range(20):
        token = 5 + place
        requests = [plain.rows(state, [token + state], len(prompt) + place) for state, prompt in enumerate(prompts)]
        step = make_step(requests, all_logits=True)
        more = PADDED - step.real_rows
        assert more > 0
        wide = msgspec.structs.replace(
            step,
            tokens_R=torch.cat([step.tokens_R, torch.zeros(more, dtype=step.tokens_R.dtype)]),
            positions_R=torch.cat([step.positions_R, torch.zeros(more, dtype=step.positions_R.dtype)]),
        )
        logits = model.compute(wide, padded.caches)
        assert logits.isfinite().all()
        assert torch.equal(logits, model.compute(step, plain.caches))
        for one, other in zip(cached(padded), cached(plain), strict=True):
            assert torch.equal(one, other)
