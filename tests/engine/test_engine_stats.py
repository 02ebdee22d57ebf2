"""Counters of an engine that was restarted: they go on where those of the engine before stood."""

import msgspec

from lowlat.engine.stats import EngineStats, add_counters

GAUGES = {
    "running",
    "waiting",
    "pages_total",
    "pages_free",
    "pages_cached",
    "pages_held",
    "sessions",
    "pages_pinned",
    "window_pages_free",
    "window_pages_cached",
    "window_pages_held",
}
BY_REASON = {"session_pins_lost", "low_latency_steps"}


def test_every_number_is_a_gauge_or_goes_on_after_a_restart():
    numbers = {field.name for field in msgspec.structs.fields(EngineStats)} - BY_REASON
    added = add_counters(EngineStats(**dict.fromkeys(numbers, 3)), EngineStats(**dict.fromkeys(numbers, 40)))
    assert numbers > GAUGES
    assert {name: getattr(added, name) for name in numbers} == {name: 3 if name in GAUGES else 43 for name in numbers}


def test_counts_by_reason_are_added_by_reason():
    before = EngineStats(session_pins_lost=[("expired", 2)], low_latency_steps=[("plugin", "covered", 5)])
    now = EngineStats(
        session_pins_lost=[("pages", 1), ("expired", 1)],
        low_latency_steps=[("plugin", "covered", 1), ("general", "prefill", 4)],
    )
    added = add_counters(now, before)
    assert dict(added.session_pins_lost) == {"expired": 3, "pages": 1}
    assert sorted(added.low_latency_steps) == [("general", "prefill", 4), ("plugin", "covered", 6)]


def test_ratios_of_guesses_are_those_of_both_engines():
    one = EngineStats(decode_rows=10, decode_tokens=30, decode_seconds=2.0, plain_seconds=1.0)
    two = EngineStats(decode_rows=30, decode_tokens=50, decode_seconds=4.0, plain_seconds=3.0)
    added = add_counters(two, one)
    assert (added.tokens_per_step, added.break_even) == (2.0, 1.5)
