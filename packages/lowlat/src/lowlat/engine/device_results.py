"""Results of steps on their way to the host: copied behind the step, read when they are there.

Legend of shape suffixes: M samples of a step, C log-probabilities beside the chosen one's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from lowlat.engine.device_sampler import Samples
from lowlat.engine.executor import StepResult
from lowlat.engine.request import TokenLogprobs

# A result is polled this often at first, and seldom later: a decode step takes a millisecond or few.
_SPIN_S = 2e-3
_LOOK_S = 5e-5


class LabelReads(msgspec.Struct):
    """Log-probabilities of labels that a step reads."""

    values: torch.Tensor
    """As `device_chunks.label_logprobs` gives them."""
    chunks: list[tuple[int, list[list[int]]]]
    """For each chunk with rows to read, its slot and the labels of each row."""


class PendingStep:
    """One launched step. Waiting for it is the only time that the host waits for the device."""

    _event: Any = None
    _result: StepResult | None = None

    def __init__(
        self,
        step: int,
        samples: Samples | None,
        slots: list[int],
        wanted: list[int],
        device: torch.device,
        done: Callable[[list[int]], None],
        reads: LabelReads | None = None,
        again: Callable[[PendingStep], bool] | None = None,
        *,
        rows: int = 1,
    ) -> None:
        """`samples` and `reads` are on their way to the host (`DeviceOps.fetch`), and are there once what is queued now
        is done. The samples are of `slots`, `rows` for each; `wanted` are the log-probabilities that each slot wants
        (-1 none). `done` hears of the tokens once, before others; `again` is asked first where a row has none, and is
        true where another step now stands for this one (`replace`)."""
        self._step = step
        self._slots = slots
        self._wanted = [count for count in wanted for _ in range(rows)]
        self._done = done
        self._again = again
        self._instead: PendingStep | None = None
        self._samples = samples
        self._reads = reads
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __del__(self) -> None:
        """Wait for a step whose result nobody has read, as of an engine that is dropped: kernels write its memory until
        it has ended, which PyTorch does not know (decision 0715)."""
        if self._event is not None and self._result is None:
            with contextlib.suppress(RuntimeError):  # a device that has failed writes nothing more
                self._event.synchronize()

    @classmethod
    def finished(cls, result: StepResult) -> PendingStep:
        """A step whose result is known."""
        pending = cls(result.step, None, [], [], torch.device("cpu"), lambda tokens: None)
        pending._result = result
        return pending

    @property
    def known(self) -> bool:
        """Whether the result was read."""
        return self._result is not None

    def replace(self, other: PendingStep) -> None:
        """Let the result of another launch of the same plan be this one's."""
        self._instead = other

    def wait(self, timeout: float | None = None) -> StepResult | None:
        """The result; None after `timeout` seconds. Raises CUDA's errors."""
        if self._result is None and self._instead is None and self._arrived(timeout):
            self._result = self._read()
        if self._result is None and self._instead is not None:
            self._result = self._instead.wait(timeout)
        return self._result

    def _arrived(self, timeout: float | None) -> bool:
        if self._event is None:
            return True
        if timeout is None:
            self._event.synchronize()
            return True
        started = time.monotonic()
        while not self._event.query():
            waited = time.monotonic() - started
            if waited >= timeout:
                return False
            time.sleep(0 if waited < _SPIN_S else _LOOK_S)
        return True

    def _read(self) -> StepResult | None:
        """None where another step stands for this one."""
        labels, bad = self._labels()
        samples = self._samples
        if samples is None:
            self._done([])
            return StepResult(self._step, [], label_logprobs=labels, bad_slots=bad)
        tokens: list[int] = samples.tokens_M.tolist()
        if self._again is not None and min(tokens) < 0 and self._again(self):
            return None
        self._done(tokens)
        logprobs = self._logprobs(samples)
        broken = [slot for slot, token in zip(self._slots, tokens, strict=True) if token < 0]
        if not broken:
            return StepResult(self._step, tokens, logprobs, label_logprobs=labels, bad_slots=bad)
        counts = [int(token >= 0) for token in tokens]
        kept = [token for token in tokens if token >= 0]
        if logprobs is not None:
            logprobs = [entry for entry, count in zip(logprobs, counts, strict=True) if count]
        return StepResult(
            self._step, kept, logprobs, counts=counts, label_logprobs=labels, bad_slots=sorted({*bad, *broken})
        )

    def _labels(self) -> tuple[list[list[list[float]]] | None, list[int]]:
        """By chunk, by row, by label; and the slots of chunks of which a row is not numbers."""
        if self._reads is None:
            return None, []
        values: list[float] = self._reads.values.tolist()
        rows = [(slot, ids) for slot, labels in self._reads.chunks for ids in labels]
        usable = values[len(values) - len(rows) :]
        bad = sorted({slot for (slot, _), good in zip(rows, usable, strict=True) if not good})
        picked = iter(values)
        return [[[next(picked) for _ in ids] for ids in labels] for _, labels in self._reads.chunks], bad

    def _logprobs(self, samples: Samples) -> list[TokenLogprobs | None] | None:
        """One entry a row, None where the row wants none."""
        if samples.chosen_M is None or samples.ranks_M is None:
            return None
        chosen, ranks = samples.chosen_M.tolist(), samples.ranks_M.tolist()
        top = [[] for _ in chosen] if samples.top_MC is None else samples.top_MC.tolist()
        ids = [[] for _ in chosen] if samples.top_ids_MC is None else samples.top_ids_MC.tolist()
        rows = zip(self._wanted, chosen, ranks, ids, top, strict=True)
        return [TokenLogprobs(lp, rank, i[:n], t[:n]) if n >= 0 else None for n, lp, rank, i, t in rows]
