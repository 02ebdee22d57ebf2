"""Run something that may never come back, and give up on it by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from lowlat_plugin.reasons import DeadlineExceeded

T = TypeVar("T")


def call_within(seconds: float, what: str, work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own and return its result, or raise what it raised.

    Raises DeadlineExceeded when it has not ended after `seconds`. The thread is left behind: nothing can stop a kernel
    that spins for ever, but the caller can say so and go on without it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"lowlat: {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise DeadlineExceeded(f"{what} has not ended after {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
