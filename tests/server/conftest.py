from collections.abc import Iterator
from pathlib import Path

import pytest
from server_kit import Clock, Live, live_server
from tools_kit import tool_server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server whose engine repeats the prompt, one token a millisecond; its context is 128 tokens."""
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """A server whose engine answers questions with calls of tools and with reasoning (`tools_kit.ANSWERS`)."""
    with tool_server() as live:
        yield live


@pytest.fixture(scope="session")
def documented() -> str:
    """What docs/http-api.md says."""
    return (Path(__file__).parents[2] / "docs" / "http-api.md").read_text(encoding="utf-8")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time by which the engine's client judges whether the engine is silent or stuck."""
    clock = Clock()
    monkeypatch.setattr("lowlat.engine.client.time", clock)
    return clock
