"""Runs tiny DeepSeek models standalone: shuffled pages, state rows, poisoned caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from dsv4_model import Reference
from dsv4_weights import read_weights

from lowlat.models.deepseek_v4.caches import DeepseekCaches
from lowlat.models.deepseek_v4.model import DeepseekV4, Options
from lowlat.models.deepseek_v4.step import RequestRows, make_step
from lowlat.models.loading.checkpoint import Checkpoint, Source
from lowlat.parallel.group import Communicator, SingleRank

PAGE = 16
STATES = 4


def open_folder(path: Path) -> Checkpoint:
    return Checkpoint(path.name, path, Source(path, "safetensors"))


def load(path: Path, communicator: Communicator | None = None, **options: object) -> DeepseekV4:
    return DeepseekV4(open_folder(path), communicator or SingleRank(), Options(**options))  # type: ignore[arg-type]


def reference(path: Path, *, quantised: bool) -> Reference:
    config = open_folder(path).config
    text = {**config, **config.get("text_config", {})}
    v41 = "V41" in config["architectures"][0]
    weights = read_weights(path, 32 if v41 else 128)
    token_map = torch.arange(text["vocab_size"]).numpy()
    return Reference(text, weights, v41=v41, quantised=quantised, token_map=token_map)


def some_tokens(count: int, seed: int = 0, vocabulary: int = 197) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Runner:
    """Caches of a few requests, poisoned before use, and steps over them."""

    def __init__(self, model: DeepseekV4, *, pages: int = 24, seed: int = 0) -> None:
        self.model = model
        self.caches = DeepseekCaches(model.config, model.numerics, pages=pages * STATES, page_size=PAGE, states=STATES)
        # 0x7F bytes are NaN as e4m3 and as scales, and huge or NaN as plain numbers.
        for tensor in [*self.caches.main.values(), *self.caches.keys.values()]:
            tensor.bytes_PB.fill_(0x7F)
        for window in self.caches.windows:
            window.entries.bytes_PB.fill_(0x7F)
        for ring in self.caches.rings.values():
            ring.values_SWD.fill_(float("nan"))
        self.caches.history.values_SWD.fill_(5)
        order = torch.randperm(pages * STATES, generator=torch.Generator().manual_seed(seed))
        slots = (order.view(STATES, pages, 1) * PAGE + torch.arange(PAGE)).view(STATES, -1)
        self.slots = list(slots)

    def rows(self, state: int, tokens: Sequence[int], start: int, **more: int) -> RequestRows:
        return RequestRows(tokens, start, state, self.slots[state], **more)

    def run(self, *requests: RequestRows, all_logits: bool = True) -> torch.Tensor:
        return self.model.compute(make_step(requests, all_logits=all_logits), self.caches)

    def prefill(self, state: int, tokens: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
        """Logits of all rows; `chunks` are sizes, what remains is one chunk more."""
        out, start = [], 0
        for size in [*chunks, len(tokens) - sum(chunks)]:
            if size > 0:
                out.append(self.run(self.rows(state, tokens[start : start + size], start)))
                start += size
        return torch.cat(out)
