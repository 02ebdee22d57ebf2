"""Tiny random models in transformers and here, and a runner on poisoned, scattered pages to compare them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from lowlat.cache.groups import window_of
from lowlat.cache.layout import KVPool
from lowlat.cache.prefix import PrefixCache
from lowlat.cache.windows import WindowPages, WindowSpan, most_pages
from lowlat.engine.batch import PlanLimits, PrefillChunk, SlotSampling, StepPlan
from lowlat.engine.core import EngineCore
from lowlat.engine.executor import StepResult, ThreadExecutor
from lowlat.engine.runner import ModelRunner
from lowlat.engine.scheduler import Scheduler
from lowlat.layers.step import StepInputs
from lowlat.models.base import BuildContext, make_cache
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import Communicator, SingleRank
from lowlat.parallel.shard import Shard
from lowlat.platform import select

GREEDY = SlotSampling(0.0, 0, 1.0, 0, -1)
VOCABULARY = 131
_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


class Recorder:
    """A model that keeps the logits of its last step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.logits = torch.empty(0)

    def forward(self, step: StepInputs, kv: KVPool) -> torch.Tensor:
        self.logits = self.model.forward(step, kv)
        return self.logits


def save_random(path: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers, saved to `path`: `Llama` means LlamaForCausalLM with a LlamaConfig.

    Norms, biases and sinks are random too: where they are ones or zeros, leaving them out would change nothing.
    """
    torch.manual_seed(seed)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**_COMMON, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                weight.add_(torch.randn_like(weight), alpha=0.5)
    model.save_pretrained(path)
    return model


def build(
    path: Path,
    communicator: Communicator | None = None,
    max_context: int = 256,
    dtype: torch.dtype = torch.float32,
) -> Any:
    context = BuildContext(select("cpu"), communicator or SingleRank(), dtype, max_context)
    return build_model(open_checkpoint(path), context, lambda done, total: None)


class WindowRunner(ModelRunner):
    """Gives every plan the window pages that a scheduler would, and poisons those that no window reaches any more."""

    windows: WindowPages | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if self.windows is not None:
            self._slide(plan, self.windows)
        return super().run(plan)

    def _slide(self, plan: StepPlan, windows: WindowPages) -> None:
        self.spans: dict[int, tuple[WindowSpan, list[int]]] = getattr(self, "spans", {})
        for slot, first, pages in plan.pages:
            assert first == 0
            if slot in self.spans:
                span, old = self.spans.pop(slot)
                windows.end(span, old)
                for page in old:
                    windows.forget(page)
            self.spans[slot] = (windows.begin([], 0), pages)
        rows = [(chunk.slot, chunk.start, chunk.start + len(chunk.tokens)) for chunk in plan.chunks]
        rows += [(slot, self._lengths[slot], self._lengths[slot] + 1) for slot in plan.decodes]
        for slot, start, end in rows:
            span, pages = self.spans[slot]
            windows.reserve(span, end)
            entries = windows.slide(span, pages, start, end)
            if entries is not None:
                plan.windows.append((slot, *entries))
        windows.check()
        in_use = [page for span, pages in self.spans.values() for page in pages[span.first : span.end]]
        reached = {windows._attached[page] for page in in_use}
        layout = self.kv.layout
        for page in set(range(windows.total)) - reached:
            for layer in layout.window_layers:
                for tensor in (self.kv.keys[layer], self.kv.values[layer]):
                    tensor[page * layout.page_size : (page + 1) * layout.page_size] = float("nan")


def make_runner(
    model: Any,
    *,
    page_size: int = 3,
    pages: int = 120,
    max_pages: int = 40,
    min_rows: int = 4,
    communicator: Communicator | None = None,
    own_pages: bool = True,
    span: int = 64,
) -> tuple[ModelRunner, Recorder]:
    """`own_pages` false: layers with a window keep the keys of all tokens, in the pages of the others."""
    window, _ = window_of(model.cache_groups())
    each = most_pages(page_size, window, span) if window and own_pages else 0
    limits = PlanLimits(max_batch=6, max_rows=256, max_pages=max_pages, max_window_pages=each)
    kv = make_cache(model, pages, page_size, 0, torch.device("cpu"), window_pages=6 * each)
    assert isinstance(kv, KVPool)
    for tensor in kv.keys + kv.values:
        tensor.fill_(float("nan"))  # whatever was never written must not matter
    recorder = Recorder(model)
    runner = WindowRunner(
        recorder, kv, limits, communicator or SingleRank(), min_rows=min_rows, window=window if each else 0
    )
    runner.windows = WindowPages(6 * each, page_size, window, span) if each else None
    return runner, recorder


def make_engine(
    model: Any,
    *,
    pages: int,
    page_size: int,
    chunk_tokens: int,
    max_batch: int,
    run_ahead: int = 1,
    window_requests: float | None = None,
) -> EngineCore:
    """The whole engine but the processes, over a poisoned pool.

    `window_requests`: how many requests' windows the window pages are enough for; None: all, and prefixes' as well.
    """
    window, _ = window_of(model.cache_groups())
    each = most_pages(page_size, window, chunk_tokens) if window else 0
    window_pages = int(each * (window_requests or 3 * max_batch))
    limits = PlanLimits(max_batch=max_batch, max_rows=chunk_tokens + max_batch, max_pages=pages, max_window_pages=each)
    kv = make_cache(model, pages, page_size, 0, torch.device("cpu"), window_pages=window_pages)
    assert isinstance(kv, KVPool)
    for tensor in kv.keys + kv.values:
        tensor.fill_(float("nan"))  # whatever was never written must not matter
    windows = WindowPages(window_pages, page_size, window, chunk_tokens) if window else None
    cache = PrefixCache(pages, page_size, windows=windows)
    scheduler = Scheduler(cache, limits, eos_ids=frozenset(), chunk_tokens=chunk_tokens, seed=0)
    runner = ModelRunner(model, kv, limits, SingleRank(), min_rows=4, window=window)
    return EngineCore(scheduler, ThreadExecutor(runner.run, lambda: torch.set_num_threads(1)), run_ahead=run_ahead)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def check_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def check_greedy(reference: Any, prompt: list[int], answer: list[int]) -> None:
    """Every token is the best that transformers sees there, or within rounding of it."""
    logits = expected_logits(reference, prompt + answer)[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.amax(-1) - chosen).max() < 1e-3


def check_one_request(reference: Any, model: Any, length: int = 70, own_pages: bool = True) -> None:
    """A prefill, a second chunk behind it and single tokens, on neighbouring and on scattered pages."""
    tokens = random_tokens(length, 1)
    expected = expected_logits(reference, tokens)
    runner, recorder = make_runner(model, own_pages=own_pages)
    scattered = torch.randperm(120, generator=torch.Generator().manual_seed(2))[:30].tolist()
    for pages in (list(range(10, 40)), scattered):
        runner.run(StepPlan(0, [(0, GREEDY)], [(0, 0, pages)], [PrefillChunk(0, 0, tokens[:37], True)], []))
        check_equal(recorder.logits[0], expected[36])
        runner.run(StepPlan(1, [], [], [PrefillChunk(0, 37, tokens[37:50], True)], []))
        check_equal(recorder.logits[0], expected[49])
        for position in range(50, length):
            runner._tokens[0] = tokens[position]
            runner.run(StepPlan(2, [], [], [], [0]))
            check_equal(recorder.logits[0], expected[position])


def check_ragged_batch(reference: Any, model: Any, min_rows: int = 4) -> None:
    """Five requests of very different lengths; two join while three decode; then all decode together."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 17, 18, 61]  # more than a factor of two apart: several decode groups
    texts = [random_tokens(length + 9, 30 + length) for length in lengths]
    expected = [expected_logits(reference, text) for text in texts]
    runner, recorder = make_runner(model, min_rows=min_rows)
    order = torch.randperm(120, generator=generator).tolist()
    pages = [(slot, 0, order[24 * slot : 24 * slot + 24]) for slot in range(5)]
    chunks = [PrefillChunk(slot, 0, text[:length], True) for slot, (text, length) in enumerate(zip(texts, lengths))]
    runner.run(StepPlan(0, [(slot, GREEDY) for slot in range(5)], pages, chunks[:3], []))
    for slot in range(3):
        check_equal(recorder.logits[slot], expected[slot][lengths[slot] - 1])
        runner._tokens[slot] = texts[slot][lengths[slot]]
    runner.run(StepPlan(1, [], [], chunks[3:], [2, 0, 1]))
    for row, (slot, position) in enumerate([(3, 17), (4, 60), (2, 17), (0, 1), (1, 2)]):
        check_equal(recorder.logits[row], expected[slot][position])
    positions = [2, 3, 18, 18, 61]
    for _ in range(5):
        for slot in range(5):
            runner._tokens[slot] = texts[slot][positions[slot]]
        runner.run(StepPlan(2, [], [], [], [4, 1, 3, 0, 2]))
        for row, slot in enumerate([4, 1, 3, 0, 2]):
            check_equal(recorder.logits[row], expected[slot][positions[slot]])
        positions = [position + 1 for position in positions]


class ThreadRanks:
    """A tensor-parallel group whose ranks are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=300)
        self._parts: list[Any] = [None] * size
        self.sums = 0
        self.ranks: list[Communicator] = [_ThreadRank(self, Shard(rank, size)) for rank in range(size)]

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._parts[rank] = x.clone()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def run(self, work: Callable[[Communicator], Any]) -> list[Any]:
        """What `work` returns on each rank; raises what a rank raises."""
        results: list[Any] = [None] * len(self.ranks)

        def one(rank: int) -> None:
            try:
                torch.set_num_threads(1)
                results[rank] = work(self.ranks[rank])
            except BaseException as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results


class _ThreadRank:
    def __init__(self, group: ThreadRanks, shard: Shard) -> None:
        self._group = group
        self.shard = shard

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._group.sums += self.shard.rank == 0
        return sum(self._group.exchange(self.shard.rank, x))  # type: ignore[return-value]

    def gather_columns(self, x_RC: torch.Tensor, total: int) -> torch.Tensor:
        joined = torch.cat(self._group.exchange(self.shard.rank, x_RC), dim=-1)
        assert joined.shape[-1] == total
        return joined

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.exchange(self.shard.rank, x)[0]
