"""The process that all grammar processes are copies of.

It loads XGrammar and the vocabulary once, takes sockets from the engine (one for each grammar), and forks for each. A
copy compiles its grammar, then keeps the state of every request that follows it. Nothing can interrupt XGrammar's code
but the end of its process, so a copy that works too long is ended by a timer on its processor time, and one that takes
too much memory meets its limit.

The talk on a grammar's socket, in messages of `multiprocessing.connection`: the engine sends the grammar, and is told
whether it compiles; then it sends `Open` and `Next`, and gets one answer for each.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import socket
import struct
import sys
import tempfile
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from lowlat.grammars.compile import compile_grammar, first_warning
from lowlat.grammars.grammar import Grammar, GrammarError
from lowlat.grammars.library import load_xgrammar

STEP_S = 0.5
"""Processor seconds for the tokens that may come next. Milliseconds are usual."""
_PROBE_TOKENS = 64


class Setup(msgspec.Struct):
    """What the first process is told at its start."""

    tokens: list[bytes]
    """The text of each token; empty for control tokens, which no grammar lets pass."""
    vocab_size: int
    """Of the model; tokens beyond `tokens` never come."""
    seconds: float
    """Processor time to compile a grammar."""
    memory_mib: int
    max_depth: int


class Open(msgspec.Struct, tag="open"):
    """A request begins in a batch slot, or goes on after `answer`; whoever had the slot before is gone."""

    slot: int
    number: int
    """Of the request; answers bear it."""
    ends: list[int]
    """End-of-sequence tokens."""
    stops: list[int]
    """Tokens that the request named itself; those that are control tokens end an answer like `ends`."""
    answer: list[int]


class Next(msgspec.Struct, tag="next"):
    """The next token of the request in a slot."""

    slot: int
    token: int


Message = Open | Next

READY, ERROR = b"\0", b"\1"
"""First byte of the word on a grammar; after `ERROR`, the reason."""

ANSWER = struct.Struct("<QB")
"""Number of the request and its state; in state `GOES_ON`, a bit for each token that may come follows."""
GOES_ON, ENDED, COMPLETE, STUCK = range(4)
"""`ENDED`: by an end token. `COMPLETE`, `STUCK`: no token may come, after a whole answer or in the middle of one."""


class GrammarServer:
    """One grammar's process: its compiled form and the matchers of its requests."""

    def __init__(self, xgrammar: ModuleType, info: Any, setup: Setup) -> None:
        self._xgrammar = xgrammar
        self._info = info
        self._setup = setup
        self._compiled: Any = None
        self._matchers: dict[int, tuple[int, Any]] = {}
        """By slot: the request's number and where it stands."""
        self._last: dict[int, int] = {}
        """By slot: the last byte of its text."""
        self._mask = np.zeros((1, -(-setup.vocab_size // 32)), dtype=np.int32)
        self._well_formed = _well_formed_masks(setup.tokens, setup.vocab_size)

    def compile(self, grammar: Grammar) -> None:
        """Compile, and follow the grammar for some tokens to see that this takes no time. Raises `GrammarError`."""
        compiler = self._xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        with tempfile.TemporaryFile() as output:
            os.dup2(output.fileno(), 2)
            self._compiled = compile_grammar(self._xgrammar, compiler, grammar, self._setup.max_depth)
            output.seek(0)
            warning = first_warning(output.read().decode("utf-8", "replace"))
        if warning is not None:
            raise GrammarError(warning)
        self._probe()

    def _probe(self) -> None:
        """Follow a few random answers. Raises `GrammarError` where there is none."""
        choose = random.Random(0)
        for _ in range(2):
            matcher = self._matcher([], [])
            for place in range(_PROBE_TOKENS):
                signal.setitimer(signal.ITIMER_PROF, STEP_S)
                allowed = np.flatnonzero(np.unpackbits(self._fill(matcher, 0), bitorder="little"))
                if not len(allowed) and place == 0 and not matcher.is_completed():
                    raise GrammarError("no text fits it that this model's tokens can write")
                if not len(allowed) or not matcher.accept_token(int(choose.choice(allowed))):
                    break

    def _matcher(self, ends: list[int], stops: list[int]) -> Any:
        tokens = self._setup.tokens
        control = [token for token in stops if token >= len(tokens) or not tokens[token]]
        # An empty list is not allowed; without one, no token ends an answer.
        return self._xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=sorted({*ends, *control}) or None)

    def _fill(self, matcher: Any, last: int) -> np.ndarray:
        """A bit for each token that may follow a text which ends with the byte `last`."""
        matcher.fill_next_token_bitmask(self._mask)
        bits: np.ndarray = self._mask.view(np.uint8)[0]
        bits &= self._well_formed.get(last, self._well_formed[0])
        return bits

    def handle(self, message: Message) -> bytes:
        """The answer to a message."""
        if isinstance(message, Open):
            self._matchers[message.slot] = message.number, self._matcher(message.ends, message.stops)
            tokens = message.answer
            self._last[message.slot] = 0
        else:
            tokens = [message.token]
        number, matcher = self._matchers[message.slot]
        for token in tokens:
            if matcher.is_terminated() or not matcher.accept_token(token):
                break
            text = self._setup.tokens[token] if token < len(self._setup.tokens) else b""
            self._last[message.slot] = text[-1] if text else 0
        if matcher.is_terminated():
            return ANSWER.pack(number, ENDED)
        bits = self._fill(matcher, self._last[message.slot])
        if not bits.any():
            return ANSWER.pack(number, COMPLETE if matcher.is_completed() else STUCK)
        return ANSWER.pack(number, GOES_ON) + bits.tobytes()


_NEVER = re.compile(rb"[\xc0\xc1\xf5-\xff]")
_MALFORMED = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""First bytes of a character, and the second bytes that must not follow them in UTF-8 (RFC 3629)."""


def _well_formed_masks(tokens: list[bytes], vocab_size: int) -> dict[int, np.ndarray]:
    """By last byte of the text (0: any other): a bit for each token that keeps it well-formed. XGrammar's classes of
    characters let any second byte follow."""
    good = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    good[:vocab_size] = True
    good[[n for n, token in enumerate(tokens) if _NEVER.search(token)]] = False
    first = np.array([token[0] if token else 0 for token in tokens], dtype=np.int32)
    masks = {0: np.packbits(good, bitorder="little")}
    for lead, (low, high) in _MALFORMED.items():
        fewer = good.copy()
        fewer[: len(first)][(first >= low) & (first <= high)] = False
        masks[lead] = np.packbits(fewer, bitorder="little")
    return masks


def serve_grammar(connection: Connection, server: GrammarServer, setup: Setup) -> None:
    """Body of a grammar's process."""
    _limit_memory(setup.memory_mib)
    signal.setitimer(signal.ITIMER_PROF, setup.seconds)
    try:
        server.compile(msgspec.msgpack.decode(connection.recv_bytes(), type=Grammar))
    except GrammarError as error:
        connection.send_bytes(ERROR + str(error).encode())
        return
    except MemoryError:
        connection.send_bytes(ERROR + _memory_text(setup).encode())
        return
    connection.send_bytes(READY)
    decoder = msgspec.msgpack.Decoder(Message)
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = connection.recv_bytes()
        signal.setitimer(signal.ITIMER_PROF, STEP_S)
        connection.send_bytes(server.handle(decoder.decode(data)))


def _memory_text(setup: Setup) -> str:
    return f"it needs more memory than the limit of {setup.memory_mib} MiB (--grammar-memory-mib)"


def _limit_memory(mib: int) -> None:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20, used + mib * 2**20))


def main() -> None:
    """Entry of the first process: `python -m lowlat.grammars.worker FD`, with a `Setup` on the standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Setup)
    xgrammar = load_xgrammar()
    info = xgrammar.TokenizerInfo(setup.tokens, xgrammar.VocabType.RAW, vocab_size=setup.vocab_size, stop_token_ids=[])
    server = GrammarServer(xgrammar, info, setup)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            with contextlib.suppress(EOFError, OSError):
                serve_grammar(Connection(descriptors[0]), server, setup)
            os._exit(0)
        os.close(descriptors[0])


if __name__ == "__main__":
    main()
