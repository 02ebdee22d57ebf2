"""Counters of an engine that was restarted: they go on where those of the engine before stood."""

import msgspec
import zmq

from lowlat.engine.messages import Outputs, Stats, decode_event
from lowlat.engine.process import EngineLoop
from lowlat.engine.request import FinishReason, RequestOutput
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


class OneStep:
    """Sockets and an engine with one request, which one step ends."""

    has_work = has_requests = True
    loop: EngineLoop

    def __init__(self) -> None:
        self.sent: list[object] = []

    def turn(self, timeout: float | None = None) -> list[RequestOutput]:
        """A step that was queued ahead ends after the request's last."""
        ends, self.has_work, self.has_requests = self.has_requests, self.has_requests, False
        return [RequestOutput("one", [7], finish_reason=FinishReason.LENGTH)] if ends else []

    def stats(self) -> EngineStats:
        return EngineStats(step=0 if self.has_requests else 1)

    def recv(self, flags: int) -> bytes:
        raise zmq.Again

    def poll(self, milliseconds: int) -> None:
        self.loop._stop = True

    def send(self, event: bytes) -> None:
        self.sent.append(decode_event(event))


def test_a_last_answer_comes_behind_its_counts():
    """Whoever has it and asks for the counters finds it there."""
    script = OneStep()
    script.loop = EngineLoop(script, script, script)
    script.loop.run()
    (answer,) = [place for place, event in enumerate(script.sent) if isinstance(event, Outputs)]
    counted = [event.stats.step for event in script.sent[:answer] if isinstance(event, Stats)]
    assert counted == [1]
