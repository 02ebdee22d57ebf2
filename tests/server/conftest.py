from collections.abc import Iterator

import pytest
from server_kit import Live, live_server


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A server whose engine repeats the prompt, one token a millisecond; its context is 128 tokens."""
    with live_server() as server:
        yield server
