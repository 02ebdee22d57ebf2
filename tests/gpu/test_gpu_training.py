"""Training a draft on a GPU: its kernels against plain PyTorch, and its graphs against plain steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowlat.cli.train_draft import _Printer
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.training import overlap as plain
from lowlat.training import writing
from lowlat.training.draft_loss import attend_plainly
from lowlat.training.recipe import Progress, Recipe
from lowlat.training.target import Target
from lowlat.training.train_draft import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("vocabulary", [24576, 49152, 5001])
def test_likeness_and_its_slope(vocabulary):
    from lowlat.layers.triton import overlap

    scores, target = 4 * torch.randn(2, 300, vocabulary, device="cuda")
    scores, target = scores.bfloat16(), (target + scores).bfloat16()
    heats = 0.5 + 2 * torch.rand(300, 3, device="cuda")
    weights = torch.rand(300, 3, device="cuda")
    wanted = torch.randint(0, vocabulary + 1, (300,), device="cuda")
    for asked in ({}, {"cross": False}, {"match": False}):
        found, expected = (of.likeness(scores, target, wanted, heats, **asked) for of in (overlap, plain))
        torch.testing.assert_close(found[:, :2], expected[:, :2], atol=1e-3, rtol=1e-3)
        for mine, its in zip(overlap.parts(found, target, heats), plain.parts(expected, target, heats), strict=True):
            if "match" not in asked:
                torch.testing.assert_close(mine, its, atol=1e-3, rtol=2e-3)
        expected = plain.slope_(scores.clone(), target, heats, expected, weights, wanted, **asked).float()
        slope = overlap.slope_(scores.clone(), target, heats, found, weights, wanted, **asked).float()
        torch.testing.assert_close(slope, expected, atol=1e-4, rtol=2e-2)


@pytest.mark.parametrize("window", [0, 256])
def test_attention_of_blocks_and_its_slopes(window):
    from lowlat.layers.triton.block_attention import block_attention

    sequences, tokens, anchors = 5, 575, 32

    def some(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    q, own = some(160, 6, 9, 64), (some(160, 6, 3, 64), some(160, 6, 3, 64))
    context = some(sequences, tokens, 3, 64), some(sequences, tokens, 3, 64)
    places = torch.randint(1, tokens, (sequences, anchors), device="cuda")
    begins = torch.tensor([0, 3, 64, 191, 300], device="cuda").minimum(places.amin(1))
    got = block_attention(q, context, own, places, begins, window)
    wide = [part.detach().float().requires_grad_() for part in (q, *context, *own)]
    attended = attend_plainly([(wide[1], wide[2])], places, begins, window)(0, wide[0], wide[3], wide[4])
    slope = torch.randn_like(got)
    found = got, *torch.autograd.grad(got, (q, *context, *own), slope)
    expected = attended, *torch.autograd.grad(attended, wide, slope.float())
    for mine, its in zip(found, expected, strict=True):
        assert ((mine.float() - its).norm() / its.norm()).item() < 0.02


def test_writing_in_a_graph(monkeypatch):
    target = Target(open_checkpoint("smollm2"), torch.device("cuda"), torch.float32, 200)
    prompts = [[(7 * n + 3 * k) % 4000 + 100 for k in range(90)] for n in range(5)]

    def write():
        generator = torch.Generator("cuda").manual_seed(1)
        return target.write(prompts, 20, 0.0, (1, 10), frozenset(), generator, 40)

    first, again = write(), write()

    def plainly(self, tokens_SY, first, temperature):
        places_Y = torch.arange(first, first + tokens_SY.shape[1], device="cuda")
        group = writing.EvenGroup(self._sequences, first + tokens_SY.shape[1], self._room)
        return self._step(tokens_SY, places_Y, group, temperature)

    monkeypatch.setattr(writing.Steps, "run", plainly)
    expected = write()
    for got in (first, again):
        assert torch.equal(got.tokens_ST, expected.tokens_ST)
        torch.testing.assert_close(got.features_STX, expected.features_STX, atol=0.05, rtol=1e-2)
        torch.testing.assert_close(got.last_STH, expected.last_STH, atol=0.05, rtol=1e-2)


def test_a_draft_learns_in_graphs(tmp_path: Path):
    data = tmp_path / "text.txt"
    data.write_text("".join(f"Line {n} says that {n} and {n * n % 97} are numbers. " for n in range(3000)))
    recipe = Recipe(
        model="smollm2", data=(str(data),), steps=80, sequences=16, rounds=8, anchors=8, prompt_tokens=200,
        answer_tokens=32, intermediate_size=128, rank=8, derived=16, vocabulary=8192, window=64,
        cooling=0.3, accepting=0.5, device="cuda", learning_rate=0.003,
    )  # fmt: skip
    losses: list[float] = []

    def tell(progress: Progress) -> None:
        losses.append(progress.loss)
        _Printer()(progress)

    train(recipe, tmp_path / "draft", tell)
    assert losses[-1] < losses[0] - 1, losses
