"""Progress of a measurement on standard error: one line that is drawn over on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable


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


def end_progress() -> None:
    """Clear the progress line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
