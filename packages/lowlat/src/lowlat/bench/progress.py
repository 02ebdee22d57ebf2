"""Progress of a measurement on standard error: one line that is drawn over on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable


def say(text: str) -> None:
    """What is being done now."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:110]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def counter(what: str) -> Callable[[int, int], None]:
    """Progress of (done, total): at most about twenty lines where standard error is no terminal."""

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() or done == total or done % max(1, total // 20) == 0:
            say(f"{what}: {done} of {total}")

    return show


@contextlib.asynccontextmanager
async def telling(describe: Callable[[], str], every_s: float | None = None) -> AsyncIterator[None]:
    """Say `describe()` while the block runs, and at its end, so that nobody takes a long wait for a hang.

    A terminal's line is drawn each half second; elsewhere a line comes every ten seconds, changed or not.
    """
    pause = every_s if every_s is not None else 0.5 if sys.stderr.isatty() else 10.0
    began = time.monotonic()

    async def tell() -> None:
        while True:
            await asyncio.sleep(pause)
            say(f"{describe()} ({time.monotonic() - began:.0f} s)")

    teller = asyncio.create_task(tell())
    try:
        yield
    finally:
        teller.cancel()
        say(f"{describe()} ({time.monotonic() - began:.0f} s)")


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
