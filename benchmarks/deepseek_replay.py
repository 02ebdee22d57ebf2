"""How far bounded replay is from the exact mode, on a tiny random DeepSeek-V4.1 (docs/models/deepseek_v41.md).

    python benchmarks/deepseek_replay.py

Random weights say how errors spread through the layers, not how a trained model takes them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.make_checkpoint import make_checkpoint
from lowlat.models.deepseek_v4.model import DeepseekV4, Options
from lowlat.models.deepseek_v4.step import RequestRows, make_step
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.parallel.group import SingleRank

PAGE, LENGTH, NEW = 16, 120, 10


def last_logits(model: DeepseekV4, tokens: list[int], replayed: int | None = None) -> torch.Tensor:
    """Logits of the last row. With `replayed`, all but ten tokens are cached, and so many of those run again."""
    caches = DeepseekCaches(model.config, model.numerics, pages=16, page_size=PAGE, states=2)
    slots = torch.arange(16 * PAGE)
    if replayed is None:
        return model.compute(make_step([RequestRows(tokens, 0, 0, slots)]), caches)[0].float()
    cached = LENGTH - NEW
    model.compute(make_step([RequestRows(tokens[:cached], 0, 0, slots)]), caches)
    start = max(0, cached - replayed)
    caches.begin_replay(1, start, tokens[:start])
    rows = RequestRows(tokens[start:], start, 1, slots, floor=start, write_from=cached)
    return model.compute(make_step([rows]), caches)[0].float()


def compare(name: str, rows: int, exact: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Print one line of the table."""
    largest, divergence, equal = [], [], 0
    for right, other in zip(exact, found, strict=True):
        largest.append(float((right - other).abs().max()))
        p, q = right.double().log_softmax(-1), other.double().log_softmax(-1)
        divergence.append(float((p.exp() * (p - q)).sum()))
        equal += int(right.argmax()) == int(other.argmax())
    line = (name, rows, f"{statistics.median(largest):.2g}", f"{statistics.median(divergence):.2g}")
    print(f"| {' | '.join(map(str, line))} | {equal}/{len(exact)} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="the difference that bounded replay makes, on a tiny random model")
    parser.add_argument("--prompts", type=int, default=24)
    count = parser.parse_args().prompts
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny-v41"
        make_checkpoint("tiny-v41", path, seed=0)
        checkpoint = open_checkpoint(path)

        def load(tail: int = 0) -> DeepseekV4:
            return DeepseekV4(checkpoint, SingleRank(), Options(draft=False, replay_tail=tail))

        random = torch.Generator().manual_seed(5)
        prompts = [torch.randint(3, 197, (LENGTH,), generator=random).tolist() for _ in range(count)]
        model = load()
        exact = [last_logits(model, prompt) for prompt in prompts]
        deviation = float(torch.stack(exact).std())
        print(f"{count} prompts of {LENGTH} tokens, last row; logits have a standard deviation of {deviation:.2g}")
        print("| replay | rows | largest logit difference | KL | argmax equal |\n| --- | --- | --- | --- | --- |")
        for tail in (16, 31, 48):
            short = load(tail)
            compare("decoder", tail, exact, [last_logits(short, prompt) for prompt in prompts])
        for replayed in (16, 32, 90):
            compare("encoder", replayed, exact, [last_logits(model, prompt, replayed) for prompt in prompts])


if __name__ == "__main__":
    main()
