"""What records of a load amount to: latencies, speeds, interactivity, goodput; as a summary and as result rows.

Definitions, all a request's own: TTFT runs from sending to the first text; the gap is the time after the first text
over the tokens after it; per-user speed is 1 / gap; latency runs from sending to the last text. P90 interactivity is
1 / P90 of the gaps and P90 end-to-end-normalised interactivity is 1 / P90 of latency over output tokens (as AgentX has
them, whose gap is over all tokens but one: the same where the first text is one token).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from lowlat.bench.load.records import Record
from lowlat.bench.results import Row, row_from_interval
from lowlat.bench.stats import Interval, bootstrap_interval, median_interval, percentile

LATE_MS = 5.0
"""From here on a client of an open loop that sends late is mentioned (P99)."""


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of one figure."""

    mean: float
    p50: float
    p90: float
    p99: float


class Targets(msgspec.Struct, frozen=True):
    """Service targets of goodput: a request is good where it meets all that are set (milliseconds)."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    latency_ms: float | None = None

    def met(self, record: Record) -> bool:
        """Whether a finished request meets every target."""
        gap = record.gap_s
        checks = (
            (self.ttft_ms, record.ttft_s),
            (self.itl_ms, gap if gap is not None else 0.0),
            (self.latency_ms, record.latency_s),
        )
        return all(limit is None or seconds * 1e3 <= limit for limit, seconds in checks)


def parse_targets(text: str) -> Targets:
    """Targets from `ttft=200,itl=20,latency=5000` (milliseconds, any subset). Raises ValueError."""
    fields: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if f"{name}_ms" not in Targets.__struct_fields__ or f"{name}_ms" in fields:
            raise ValueError(f"--goodput, target {part!r}: write ttft=MS, itl=MS or latency=MS, each once, with commas")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"--goodput, target {part!r}: {value!r} is no number of milliseconds above 0")
        fields[f"{name}_ms"] = number
    return Targets(**fields)


class Summary(msgspec.Struct, kw_only=True):
    """One load in figures. Times are milliseconds, speeds tokens a second."""

    requests: int
    failed: int
    duration_s: float
    input_tokens: int | None
    """None where the server did not say it of every request."""
    output_tokens: int
    cached_tokens: int | None
    ttft_ms: Spread
    itl_ms: Spread | None
    latency_ms: Spread
    tokens_per_s_user: Spread | None
    tokens_per_s_total: float
    requests_per_s: float
    interactivity_p90: float | None
    e2e_interactivity_p90: float
    goodput: float | None
    """Requests a second that met the targets."""
    send_lag_ms_p99: float | None
    """How late the client itself sent in an open loop."""
    in_flight: float
    """Requests in flight at a time, mean over the load."""
    short: int
    """Answers with fewer tokens than were asked for."""
    chunks_because: dict[str, int]
    """Why tokens are chunks, and in how many answers."""
    errors: dict[str, int]
    """What went wrong, and how often."""

    @property
    def worst_error(self) -> str:
        """The most frequent error in one short line; empty where none failed."""
        return " ".join(max(self.errors, key=lambda reason: self.errors[reason], default="").split())[:160]


def _spread(values: Sequence[float], factor: float = 1.0) -> Spread:
    scaled = [v * factor for v in values]
    return Spread(statistics.fmean(scaled), *(percentile(scaled, q) for q in (0.5, 0.9, 0.99)))


def gaps(records: Sequence[Record]) -> list[float]:
    """Mean gap of each request that has one (seconds); a stream that arrived all at once has none."""
    return [gap for record in records if (gap := record.gap_s) is not None]


def interactivity(seconds: Sequence[float]) -> float:
    """1 / P90 of seconds a token."""
    return 1.0 / percentile(seconds, 0.9)


def normalised(records: Sequence[Record]) -> list[float]:
    """Latency over output tokens of each request (seconds)."""
    return [record.latency_s / (record.output_tokens or 1) for record in records]


def _sum_where_all(counts: Iterable[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _duration(records: Sequence[Record]) -> float:
    return max(r.ended for r in records) - min(r.sent for r in records)


def summarize(records: Sequence[Record], targets: Targets | None = None) -> Summary:
    """Figures of a load. Raises ValueError with the most frequent error where no request succeeded."""
    good = [record for record in records if record.ok]
    errors = Counter(record.error or "no text" for record in records if not record.ok)
    if not good:
        worst = max(errors, key=lambda e: errors[e], default="no requests were sent")
        raise ValueError(f"none of {len(records)} requests succeeded: {worst}")
    duration, between = _duration(good), gaps(good)
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    lag = [record.sent - record.due for record in good if record.due is not None]
    output_tokens = sum(record.output_tokens or 0 for record in good)
    return Summary(
        requests=len(good),
        failed=len(records) - len(good),
        duration_s=duration,
        input_tokens=_sum_where_all(record.prompt_tokens for record in good),
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        ttft_ms=_spread([record.ttft_s for record in good], 1e3),
        itl_ms=_spread(between, 1e3) if between else None,
        latency_ms=_spread([record.latency_s for record in good], 1e3),
        tokens_per_s_user=_spread([1.0 / gap for gap in between]) if between else None,
        tokens_per_s_total=output_tokens / duration,
        requests_per_s=len(good) / duration,
        interactivity_p90=interactivity(between) if between else None,
        e2e_interactivity_p90=interactivity(normalised(good)),
        goodput=sum(map(targets.met, good)) / duration if targets is not None else None,
        send_lag_ms_p99=percentile(lag, 0.99) * 1e3 if lag else None,
        in_flight=sum(record.ended - record.sent for record in good) / duration,
        short=sum(record.short for record in good),
        chunks_because=dict(Counter(record.chunks_because for record in good if record.chunks_because)),
        errors=dict(errors),
    )


def caveats(summary: Summary) -> list[str]:
    """What figures alone do not say: failed requests, counts not the server's, short answers, a late client."""
    found = []
    if summary.failed:
        total = summary.requests + summary.failed
        found.append(f"{summary.failed} of {total} requests failed and are not in the figures ({summary.worst_error})")
    found += [f"tokens of {times} answers are chunks: {reason}" for reason, times in summary.chunks_because.items()][:3]
    if summary.short:
        found.append(f"{summary.short} of {summary.requests} answers have fewer tokens than were asked for")
    lag = summary.send_lag_ms_p99
    if lag is not None and lag > LATE_MS:
        found.append(f"the client sent up to {lag:.0f} ms late (P99), so figures are not the server's alone")
    return found


def load_rows(
    records: Sequence[Record],
    *,
    workload: str,
    arm: str,
    concurrency: int,
    targets: Targets | None = None,
    remarks: Sequence[str] = (),
    model: str | None = None,
) -> list[Row]:
    """Rows of the result format for one load; percentiles other than the row's own go into `details`.

    What a reader must know beside the figures stands in every row's note: `remarks`, and what `caveats` finds.
    `concurrency` is 0 for an open loop, whose mean number of requests in flight goes into `details`, as `model` does.
    """
    summary = summarize(records, targets)
    good = [record for record in records if record.ok]
    said = [*remarks, *caveats(summary)]
    where = f"concurrency {concurrency}" if concurrency else "open loop"
    details: dict[str, object] = {"model": model} if model else {}
    details |= {"failed": summary.failed} if summary.failed else {}
    details |= {"in_flight": round(summary.in_flight, 2)} if not concurrency else {}
    shared: dict[str, object] = {
        "concurrency": concurrency,
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "cached_tokens": summary.cached_tokens,
        "details": details,
        "note": f"{where}: {'; '.join(said)}" if said else "",
    }
    rows: list[Row] = []

    def add(metric: str, interval: Interval, spread: Spread | None = None) -> None:
        row = row_from_interval(interval, workload=workload, arm=arm, metric=metric, **shared)
        if spread is not None:
            row.details = {**row.details, **msgspec.to_builtins(spread)}
        rows.append(row)

    between = gaps(good)
    add("ttft_ms", median_interval([r.ttft_s * 1e3 for r in good]), summary.ttft_ms)
    add("latency_ms", median_interval([r.latency_s * 1e3 for r in good]), summary.latency_ms)
    if between:
        add("tokens_per_s_user", median_interval([1.0 / gap for gap in between]), summary.tokens_per_s_user)
        add("itl_ms_p90", bootstrap_interval([gap * 1e3 for gap in between], lambda s: percentile(s, 0.9)))
        add("interactivity_p90", bootstrap_interval(between, interactivity))
    add("e2e_interactivity_p90", bootstrap_interval(normalised(good), interactivity))
    # one run has one total: an interval of it would need repeated runs
    for metric, value in (("tokens_per_s_total", summary.tokens_per_s_total), ("goodput", summary.goodput)):
        if value is not None:
            add(metric, Interval(value, value, value, 1))
    return rows
