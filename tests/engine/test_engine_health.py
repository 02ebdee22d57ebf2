"""What a probe sees of an engine, by its signs of life."""

import pytest

from lowlat.engine.health import EngineState, Pulse


def probe(state, *, heard=0.0, progress=0.0, failure=None):
    """Health of an engine that last spoke, and last finished a step, so many seconds ago; limits are 5 s and 60 s."""
    pulse = Pulse(heard_at=100.0 - heard, progress_at=100.0 - progress)
    return pulse.health(100.0, state, 5.0, 60.0, restarts=2, failure=failure)


def test_a_ready_engine_that_speaks_and_moves_is_well():
    health = probe(EngineState.READY, heard=5.0, progress=60.0)
    assert (health.alive, health.ready, health.error, health.restarts) == (True, True, None, 2)
    assert (health.heartbeat_age_s, health.progress_age_s) == (5.0, 60.0)


@pytest.mark.parametrize(
    ("ages", "error"),
    [
        ({"heard": 5.5}, "no word from the engine for 5.5 s"),
        ({"progress": 61.0}, "no step finished for 61.0 s with requests running"),
        ({"heard": 70.0, "progress": 70.0}, "no word from the engine for 70.0 s"),
    ],
)
def test_silence_and_stuck_steps_make_it_unhealthy_and_are_named(ages, error):
    health = probe(EngineState.READY, **ages, failure="older")
    assert (health.alive, health.ready, health.error) == (False, False, error)


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RESTARTING])
def test_an_engine_that_starts_may_be_silent(state):
    health = probe(state, heard=500.0, progress=500.0, failure="killed")
    assert (health.alive, health.ready, health.error) == (True, False, "killed")
    assert health.heartbeat_age_s is None
    assert health.progress_age_s is None


@pytest.mark.parametrize("state", [EngineState.FAILED, EngineState.CLOSED])
def test_an_engine_that_ended_is_not_alive(state):
    assert not probe(state).alive


def test_a_hang_is_named_once_the_limit_has_passed():
    pulse = Pulse(heard_at=40.0, progress_at=10.0)
    assert pulse.hang(70.0, 60.0) is None
    assert pulse.hang(71.0, 60.0) == "the engine finished no step for 60 s with requests running and was ended"
    assert pulse.hang(101.0, 60.0) == "the engine was silent for 60 s and was ended"
