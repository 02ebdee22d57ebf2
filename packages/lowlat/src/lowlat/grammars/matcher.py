"""One request's way through its grammar, as the sampler sees it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from lowlat.grammars.worker import ANSWER, COMPLETE, ENDED, GOES_ON, Next, Open

if TYPE_CHECKING:
    from lowlat.grammars.pool import GrammarProcess

_WAIT_S = 30.0
"""For an answer that is due in milliseconds; the process ends itself long before, unless the machine stands still."""
TOO_SLOW = "grammar: it takes too long, or too much memory, to follow; make it simpler"


class AnswerOverError(Exception):
    """No token may come next. `error`: why, unless the answer is complete."""

    def __init__(self, error: str | None) -> None:
        super().__init__(error or "the answer is complete")
        self.error = error


class GrammarLine:
    """What a batch slot is told to follow: the grammar's process, and the tokens that end an answer."""

    __slots__ = ("ends", "process", "stops")

    def __init__(self, process: GrammarProcess, ends: tuple[int, ...], stops: tuple[int, ...]) -> None:
        self.process = process
        self.ends = ends
        """End-of-sequence tokens."""
        self.stops = stops
        """Stop tokens that the request named."""


class Matcher:
    """Tells which tokens may come next. The process works on them while the model computes; `allowed` waits for the
    rest. Belongs to the executor's thread.

    Legend: V vocabulary.
    """

    _numbers = itertools.count()

    def __init__(self, line: GrammarLine, slot: int, answer: tuple[int, ...]) -> None:
        """A request in a batch slot, after the tokens of `answer`."""
        self._process = line.process
        self._slot = slot
        self._number = next(self._numbers)
        self._known = False
        self._allowed_V: torch.Tensor | None = None
        self._process.early.pop(self._process.numbers.get(slot, -1), None)
        self._process.numbers[slot] = self._number
        self._send(Open(slot, self._number, list(line.ends), list(line.stops), list(answer)))

    def advance(self, token: int) -> None:
        """Take note of a token of the answer."""
        if self._known and self._allowed_V is None:
            return  # the answer has ended: this is a step that was launched ahead
        self._known = False
        self._send(Next(self._slot, token))

    def allowed(self, size: int) -> torch.Tensor | None:
        """Which of `size` tokens may come next, as booleans [V]; None: any, after the end.

        Raises `AnswerOverError` when none may.
        """
        if self._known:
            return self._allowed_V
        data = self._receive()
        _, state = ANSWER.unpack_from(data)
        self._allowed_V = None
        if state == GOES_ON:
            bits = np.unpackbits(np.frombuffer(data, np.uint8, offset=ANSWER.size), count=size, bitorder="little")
            self._allowed_V = torch.from_numpy(bits.view(np.bool_))
        elif state != ENDED:
            stuck = "no token of this model's vocabulary can continue the grammar's text"
            raise AnswerOverError(None if state == COMPLETE else stuck)
        self._known = True
        return self._allowed_V

    def _send(self, message: Open | Next) -> None:
        connection = self._process.connection
        try:
            if connection is not None and self._process.error is None:
                connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            self._process.error = TOO_SLOW

    def _receive(self) -> bytes:
        """This request's answer; those of others that come before it are kept for them."""
        process = self._process
        while self._number not in process.early:
            try:
                if process.error is not None or process.connection is None or not process.connection.poll(_WAIT_S):
                    raise EOFError
                data = process.connection.recv_bytes()
            except (EOFError, OSError):
                process.error = TOO_SLOW
                raise AnswerOverError(TOO_SLOW) from None
            number = ANSWER.unpack_from(data)[0]
            if number in process.numbers.values():
                process.early[number] = data
        return process.early.pop(self._number)
