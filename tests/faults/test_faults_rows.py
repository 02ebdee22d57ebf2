"""Padding rows of a step: full of NaN, they change no slot of the pool and no real row."""

from __future__ import annotations

import torch
from family_kit import GREEDY, build, make_runner, random_tokens, save_random

from lowlat.engine.batch import PrefillChunk, StepPlan


def test_a47_padding_rows_write_nothing_and_spoil_nothing(tmp_path):
    """Five rows in a step of eight: padding rows carry token 0, whose embedding is NaN here."""
    save_random(tmp_path, "Llama", tie_word_embeddings=False)
    model = build(tmp_path)
    model.embedding_VH[0] = float("nan")
    tokens = [1 + token % 130 for token in random_tokens(60, 4)]
    pages = [(slot, 0, list(range(8 * slot, 8 * slot + 8))) for slot in range(5)]
    logits = {}
    for min_rows in (1, 8):
        runner, recorder = make_runner(model, min_rows=min_rows)
        pool = runner.kv.keys + runner.kv.values
        size = runner.kv.layout.page_size
        padding = runner.kv.layout.padding_page * size
        for number, tensor in enumerate(pool):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
            tensor[padding:] = 0
        chunks = [PrefillChunk(slot, 0, tokens[10 * slot : 10 * slot + 4 + slot], True) for slot in range(5)]
        runner.run(StepPlan(0, [(slot, GREEDY) for slot in range(5)], pages, chunks, []))
        before = [tensor.clone() for tensor in pool]
        for slot in range(5):
            runner._tokens[slot] = tokens[50 + slot]
        runner.run(StepPlan(1, [], [], [], [0, 1, 2, 3, 4]))
        logits[min_rows] = recorder.logits
        written = {8 * slot * size + 4 + slot for slot in range(5)}
        for earlier, tensor in zip(before, pool, strict=True):
            changed = (tensor != earlier).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(changed) == written
            assert not tensor[padding:].any(), "the reserved page stays zero"
            assert tensor.isfinite().all()
    assert logits[8].isfinite().all()
    torch.testing.assert_close(logits[8], logits[1], atol=1e-4, rtol=0)
