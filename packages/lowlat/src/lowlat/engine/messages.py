"""What front and engine processes say to each other, as msgpack over two local sockets.

The front sends `Command`s and receives `Event`s. Every struct is tagged, so one decoder serves each direction.
"""

from __future__ import annotations

import msgspec

from lowlat.engine.request import GenerateRequest, RequestOutput
from lowlat.engine.stats import EngineStats


class Submit(msgspec.Struct, tag="submit"):
    """Queue a request. Its id must not be in use."""

    request: GenerateRequest


class Abort(msgspec.Struct, tag="abort"):
    """End a request early; the engine answers with a last output unless it had ended already."""

    id: str
    reason: str = "abort"
    """`abort`: cancelled by the client; `stop`: a stop string matched in the text."""


class Call(msgspec.Struct, tag="call"):
    """Ask the engine to do something between two steps; answered by `Reply` with the same number."""

    number: int
    name: str
    arguments: dict[str, str | int | float | bool | None] = {}


class Shutdown(msgspec.Struct, tag="shutdown"):
    """End the engine process now; open requests are aborted."""


Command = Submit | Abort | Call | Shutdown


class Starting(msgspec.Struct, tag="starting"):
    """Progress while weights load, convert or compile: `done` of `total` bytes (0: unknown) of the phase `what`."""

    what: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, tag="ready"):
    """Weights are loaded and a step has run."""

    pid: int
    model: str
    vocab_size: int
    max_context: int
    dtype: str
    device: str
    kv_tokens: int
    page_size: int
    kernels: str | None
    """Name of the active kernel library, or None for the general path."""
    ready_s: float
    """Seconds from process start to this message."""
    item_tokens: int = 0
    """Most tokens of an item beside others in one sequence (`ScoreTask.items`); 0: the model has no such sequences."""


class Outputs(msgspec.Struct, tag="outputs"):
    """What one step brought, for all requests it touched."""

    items: list[RequestOutput]


class Stats(msgspec.Struct, tag="stats"):
    """Gauges and counters. Sent at least every second by a living engine, so silence means a hang or death.

    `stats.step` grows with every finished step: with requests running and no growth, a step is stuck. `at` is
    `time.monotonic()` in seconds.
    """

    stats: EngineStats
    at: float


class Reply(msgspec.Struct, tag="reply"):
    """Answer to a `Call`."""

    number: int
    result: dict[str, str | int | float | bool | None] = {}
    error: str | None = None


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot go on (or could not start). Nothing follows."""

    error: str


Event = Starting | Ready | Outputs | Stats | Reply | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
