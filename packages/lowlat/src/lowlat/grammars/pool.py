"""The engine's side of grammar processes: starting them, learning whether grammars compile, keeping some for later."""

from __future__ import annotations

import contextlib
import multiprocessing.connection as connections
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from lowlat.grammars.grammar import Grammar, GrammarError, GrammarsBusyError, check_installed
from lowlat.grammars.worker import ERROR, Setup
from lowlat.text.tokenizer import Tokenizer

_KEEP = 8
"""Grammars without requests whose processes stay for the next request."""
_AT_ONCE = 2
"""Grammars that compile at the same time."""
_MOST_WAITING = 64
_PATIENCE = 6.0
"""A grammar gets its limit of processor time; a clock on the wall may show so many times more on a busy machine."""


class GrammarLimits(msgspec.Struct, frozen=True):
    """What a grammar may cost."""

    seconds: float
    """Processor time to compile it."""
    memory_mib: int
    max_bytes: int
    max_depth: int
    """Brackets inside brackets."""


class GrammarProcess:
    """One grammar: whether it compiles, and the line to the process that follows it."""

    def __init__(self, grammar: Grammar, trim: Callable[[], None]) -> None:
        """`trim` is called when a request is done with it."""
        self.grammar = grammar
        self._trim = trim
        self.connection: Connection | None = None
        self.ready = False
        self.error: str | None = None
        self.users = 0
        """Requests that wait for it or follow it."""
        self.deadline = 0.0
        self.numbers: dict[int, int] = {}
        """By batch slot: the number of the matcher that has it. This and `early` belong to the executor's thread."""
        self.early: dict[int, bytes] = {}
        """Answers that came before they were waited for, by number."""

    @property
    def settled(self) -> bool:
        """Whether it is known if the grammar compiles."""
        return self.ready or self.error is not None

    @property
    def gone(self) -> bool:
        """Whether the process of a compiled grammar has ended, as one may that nobody uses: by a kill, for example."""
        if not self.ready or self.connection is None:
            return False
        with socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            try:
                return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def release(self) -> None:
        """One request less."""
        self.users -= 1
        self._trim()

    def fail(self, error: str) -> None:
        """The process is of no use any more."""
        self.ready = False
        self.error = error
        self.close()

    def close(self) -> None:
        """Let the process end: it does at its next look at the line."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class GrammarPool:
    """Grammar processes by grammar. Belongs to the engine's thread; only `GrammarProcess.connection` of a ready one is
    used elsewhere."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, limits: GrammarLimits) -> None:
        """`tokenizer` is called when the first grammar comes; `vocab_size` is the model's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._processes: dict[Grammar, GrammarProcess] = {}
        """Least recently used first."""
        self._queue: list[GrammarProcess] = []
        self._starting: list[GrammarProcess] = []
        self._parent: _Parent | None = None

    def use(self, grammar: Grammar) -> GrammarProcess:
        """The process of a grammar, which may still have to compile it; its `release` must follow.

        Raises:
            GrammarError: XGrammar is missing, the text is too long, or too many grammars wait to be compiled.
        """
        process = self._processes.pop(grammar, None)
        if process is not None and not process.users and process.gone:
            process.fail("its process ended")
        if process is None or (process.error is not None and not process.users):
            check_installed()
            size = len(grammar.text.encode())
            if size > self._limits.max_bytes:
                raise GrammarError(
                    f"{size} bytes are more than the limit of {self._limits.max_bytes} (--grammar-bytes)"
                )
            if len(self._queue) >= _MOST_WAITING:
                raise GrammarsBusyError(f"{_MOST_WAITING} grammars wait to be compiled; try again later")
            process = GrammarProcess(grammar, self._trim)
            self._queue.append(process)
        self._processes[grammar] = process
        process.users += 1
        self._start_waiting()
        return process

    def _trim(self) -> None:
        """Let all but a few of the processes without requests end."""
        idle = [one for one in self._processes.values() if not one.users and one.settled]
        for old in idle[: max(0, len(idle) - _KEEP)]:
            del self._processes[old.grammar]
            old.close()

    def poll(self, timeout: float = 0.0) -> None:
        """Learn which grammars have compiled, after at most `timeout` seconds."""
        lines = {one.connection: one for one in self._starting if one.connection is not None}
        for line in connections.wait(list(lines), timeout):
            process = lines[line]  # type: ignore[index]
            self._hear(process)
            self._starting.remove(process)
        now = time.monotonic()
        for process in [one for one in self._starting if now > one.deadline]:
            process.fail(self._too_long())
            self._starting.remove(process)
        self._trim()
        self._start_waiting()

    def _too_long(self) -> str:
        limit = f"{self._limits.seconds:g} s of processor time (--grammar-seconds)"
        return f"it takes longer to compile than the limit of {limit}, or too long to follow; make it simpler"

    def _hear(self, process: GrammarProcess) -> None:
        assert process.connection is not None
        try:
            word = process.connection.recv_bytes()
        except (EOFError, OSError):
            alive = self._parent is not None and self._parent.alive
            process.fail(self._too_long() if alive else "the process that compiles grammars ended unexpectedly")
            return
        if word[:1] == ERROR:
            process.fail(word[1:].decode("utf-8", "replace"))
        else:
            process.ready = True

    def _start_waiting(self) -> None:
        while self._queue and len(self._starting) < _AT_ONCE:
            process = self._queue.pop(0)
            if self._parent is None or not self._parent.alive:
                self._parent = _Parent(self._tokenizer, self._vocab_size, self._limits)
            process.connection = self._parent.connect()
            process.connection.send_bytes(msgspec.msgpack.encode(process.grammar))
            process.deadline = time.monotonic() + _PATIENCE * self._limits.seconds + _START_S
            self._starting.append(process)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.close()
        if self._parent is not None:
            self._parent.close()


_START_S = 60.0
"""The first process loads XGrammar, a second or two on an idle machine."""


class _Parent:
    """The first process, that grammar processes are copies of."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int, limits: GrammarLimits) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "lowlat.grammars.worker", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

        def introduce() -> None:
            assert self._process.stdin is not None
            # If it ended, `alive` tells.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
                tokens = vocabulary(tokenizer(), vocab_size)
                setup = Setup(tokens, vocab_size, limits.seconds, limits.memory_mib, limits.max_depth)
                pipe.write(msgspec.msgpack.encode(setup))

        # Reading a vocabulary takes longer than a step.
        self._thread = threading.Thread(target=introduce, name="grammar vocabulary", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> Connection:
        """A line to a new copy."""
        mine, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"g"], [theirs.fileno()])
        return Connection(mine.detach())

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._thread.join()


def vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The text of each token; empty for control tokens.

    Raises:
        GrammarError: the tokenizer does not tell the bytes of its tokens.
    """
    if not tokenizer.can_stream():
        raise GrammarError("the bytes of this model's tokens are not known, so it cannot follow grammars")
    controls = tokenizer.special_ids
    return [b"" if token in controls else tokenizer.token_bytes(token) for token in range(vocab_size)]
