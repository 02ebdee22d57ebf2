"""`/metrics` for Prometheus: counters end in `_total`, times are in seconds. The names are in docs/http-api.md."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lowlat.engine.client import EngineClient

if TYPE_CHECKING:
    from lowlat.server.answers import Timings, Usage
    from lowlat.server.live import LiveRequest

_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
_LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Histogram:
    """Counts of values at or below each bound, in seconds."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class FrontMetrics:
    """What the front counts itself. Every admitted request ends in exactly one outcome, aborted ones included."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[int] = Counter()
        """Answers with a status of 400 or more to requests that were not admitted, by status."""
        self.completion_tokens = 0
        self.queue = Histogram(_LONG)
        self.first_token = Histogram(_LONG)
        self.gap = Histogram(_SHORT)
        self.total = Histogram(_LONG)

    def request_ended(self, generation: LiveRequest, usage: Usage, timings: Timings) -> None:
        """Aborted requests count in every series for as far as they came: a request without a first token has none."""
        self.outcomes.update(generation.finish_reasons)
        self.completion_tokens += usage.completion_tokens
        self.queue.observe(timings.queue_s)
        self.total.observe(timings.total_s)
        if timings.first_token_s is not None:
            self.first_token.observe(timings.first_token_s)
        if timings.gap_mean_ms is not None:
            self.gap.observe(timings.gap_mean_ms / 1e3)


class ServerCollector(Collector):
    """Reads the engine's latest stats and the front's counts when Prometheus asks."""

    def __init__(self, engine: EngineClient, front: FrontMetrics, open_requests: dict[str, LiveRequest]) -> None:
        self._engine = engine
        self._front = front
        self._open = open_requests

    def collect(self) -> Iterator[Metric]:
        yield from self._front_families()
        yield from self._engine_families()

    def _front_families(self) -> Iterator[Metric]:
        front = self._front
        ended = CounterMetricFamily(
            "lowlat_sequences", "Sequences (choices) that ended, by finish reason.", labels=["finish_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([reason], front.outcomes[reason])
        yield ended
        refused = CounterMetricFamily("lowlat_refused_requests", "Requests that were not admitted.", labels=["status"])
        for status, count in sorted(front.refused.items()):
            refused.add_metric([str(status)], count)
        yield refused
        yield GaugeMetricFamily("lowlat_open_requests", "HTTP requests with an answer under way.", len(self._open))
        yield GaugeMetricFamily("lowlat_front_tasks", "Tasks of the front's event loop.", len(asyncio.all_tasks()))
        yield CounterMetricFamily(
            "lowlat_completion_tokens", "Tokens in answers, up to where each answer ended.", front.completion_tokens
        )
        yield front.queue.family("lowlat_queue_seconds", "Arrival to the first step that worked for a request.")
        yield front.first_token.family("lowlat_first_token_seconds", "Arrival to the first token.")
        yield front.gap.family("lowlat_token_gap_seconds", "Mean gap between the tokens of a request.")
        yield front.total.family("lowlat_request_seconds", "Arrival to the end of the answer.")

    def _engine_families(self) -> Iterator[Metric]:
        health, stats = self._engine.health(), self._engine.stats
        yield GaugeMetricFamily("lowlat_engine_alive", "1 while the engine process lives and speaks.", health.alive)
        yield GaugeMetricFamily("lowlat_engine_ready", "1 while the engine takes requests.", health.ready)
        yield CounterMetricFamily("lowlat_engine_restarts", "Restarts of the engine process.", health.restarts)
        yield GaugeMetricFamily("lowlat_running_sequences", "Sequences in the running batch.", stats.running)
        yield GaugeMetricFamily("lowlat_waiting_sequences", "Sequences that wait in the engine.", stats.waiting)
        pages = GaugeMetricFamily("lowlat_kv_pages", "Pages of the KV pool, by state.", labels=["state"])
        for state, count in (("free", stats.pages_free), ("cached", stats.pages_cached), ("held", stats.pages_held)):
            pages.add_metric([state], count)
        yield pages
        yield GaugeMetricFamily("lowlat_kv_pages_all", "Pages of the KV pool.", stats.pages_total)
        pages = GaugeMetricFamily(
            "lowlat_kv_window_pages", "Pages of layers with a sliding window, by state.", labels=["state"]
        )
        for state in ("free", "cached", "held"):
            pages.add_metric([state], getattr(stats, f"window_pages_{state}"))
        yield pages
        yield GaugeMetricFamily("lowlat_sessions", "Sessions that pin a prefix.", stats.sessions)
        yield GaugeMetricFamily("lowlat_kv_pages_pinned", "Cached pages that sessions pin.", stats.pages_pinned)
        lost = CounterMetricFamily(
            "lowlat_session_pins_lost", "Pins of sessions that were given up, by reason.", labels=["reason"]
        )
        for reason, count in stats.session_pins_lost:
            lost.add_metric([reason], count)
        yield lost
        yield CounterMetricFamily("lowlat_steps", "Steps that the engine finished.", stats.step)
        yield CounterMetricFamily("lowlat_prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens)
        yield CounterMetricFamily(
            "lowlat_cached_tokens", "Prompt tokens that came from the prefix cache.", stats.cached_tokens
        )
        yield CounterMetricFamily(
            "lowlat_generated_tokens", "Tokens that the engine generated.", stats.generated_tokens
        )
        yield CounterMetricFamily(
            "lowlat_guessed_tokens", "Guessed tokens that steps checked (--spec).", stats.guessed_tokens
        )
        yield CounterMetricFamily("lowlat_accepted_tokens", "Guessed tokens that were right.", stats.accepted_tokens)
        for name, text, value in (
            ("decode_rows", "Times that a request took part in a step of decodes alone (--spec).", stats.decode_rows),
            ("decode_tokens", "Tokens that those steps brought.", stats.decode_tokens),
            ("decode_seconds", "Time of those steps.", stats.decode_seconds),
            ("plain_decode_seconds", "What they would have taken without guesses, as measured.", stats.plain_seconds),
        ):
            yield CounterMetricFamily(f"lowlat_{name}", text, value)
        yield GaugeMetricFamily(
            "lowlat_simulated_acceptance",
            "Tokens a step that a benchmark counts as right; 0: answers are the model's.",
            self._engine.config.spec_simulate_acceptance or 0.0,
        )
        yield CounterMetricFamily("lowlat_preemptions", "Running sequences that were put back.", stats.preemptions)
        yield CounterMetricFamily(
            "lowlat_bad_logits", "Sequences that ended because their logits were not numbers.", stats.bad_logits
        )
        steps = CounterMetricFamily(
            "lowlat_low_latency_steps",
            "Steps by path (plugin or general) and the reason.",
            labels=["path", "reason"],
        )
        for path, reason, count in stats.low_latency_steps:
            steps.add_metric([path, reason], count)
        yield steps
