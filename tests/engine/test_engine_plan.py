"""Plans survive the record that carries them to other ranks."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.engine.batch import PlanLimits, PrefillChunk, SlotSampling, StepPlan, decode_plan, encode_plan, stand_in
from lowlat.parallel.ring import RECORDS, PlanRing, RingError

LIMITS = PlanLimits(max_batch=5, max_rows=37, max_pages=11, max_window_pages=4)
SLOTS = st.integers(0, 4)
SAMPLING = st.builds(
    SlotSampling,
    temperature=st.floats(0, 2, width=32),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, width=32),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.integers(-1, 20),
)
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans as large as the limits allow."""
    chunk_slots = draw(st.lists(SLOTS, unique=True))
    tokens_left = LIMITS.max_rows
    chunks = []
    for slot in chunk_slots:
        if tokens_left == 0:
            break
        tokens = draw(st.lists(TOKENS, min_size=1, max_size=tokens_left))
        tokens_left -= len(tokens)
        targets = tokens if draw(st.booleans()) else []
        chunks.append(PrefillChunk(slot, draw(st.integers(0, 10_000)), tokens, draw(st.booleans()), targets, 3))
    begins = [(slot, draw(SAMPLING)) for slot in draw(st.lists(SLOTS, unique=True))]
    pages = [
        (slot, draw(st.integers(0, 10)), draw(st.lists(st.integers(0, 99), min_size=1, max_size=5)))
        for slot in draw(st.lists(SLOTS, unique=True))
    ]
    windows = [
        (slot, draw(st.integers(0, 10)), draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)))
        for slot in draw(st.lists(SLOTS, unique=True))
    ]
    decodes = draw(st.lists(SLOTS, unique=True))
    return StepPlan(draw(st.integers(0, 2**31 - 1)), begins, pages, chunks, decodes, windows=windows)


def for_other_ranks(plan: StepPlan) -> StepPlan:
    """What a rank that neither samples nor scores learns of a plan."""
    chunks = [msgspec.structs.replace(chunk, targets=[-1] * len(chunk.targets), logprobs=0) for chunk in plan.chunks]
    begins = [(slot, stand_in(sampling.kind)) for slot, sampling in plan.begins]
    assert [setting.kind for _, setting in begins] == [setting.kind for _, setting in plan.begins]
    return msgspec.structs.replace(plan, begins=begins, chunks=chunks)


@settings(deadline=None)
@given(sequence=st.lists(plans(), min_size=1, max_size=4))
def test_records_give_back_the_plan(sequence: list[StepPlan]):
    written: list[int] | None = None
    read: list[int] | None = None
    for plan in sequence:
        record = np.full(LIMITS.words, -7, dtype=np.int32)
        encode_plan(plan, record, written)
        decoded = decode_plan(record, read)
        assert decoded == for_other_ranks(plan)
        written, read = plan.decodes, decoded.decodes


def test_the_largest_plan_fits():
    full = StepPlan(
        1,
        [(slot, SlotSampling(1.0, 0, 1.0, 2**64 - 1, -1)) for slot in range(5)],
        [(0, 0, list(range(11)))] + [(slot, 3, [slot]) for slot in range(1, 5)] * 2,
        [PrefillChunk(slot, 0, [1] * (37 // 5), True) for slot in range(5)],
        list(range(5)),
        windows=[(slot, 7, list(range(4))) for slot in range(5)],
    )
    record = np.zeros(LIMITS.words, dtype=np.int32)
    encode_plan(full, record, None)
    assert decode_plan(record, None) == for_other_ranks(full)


def test_steady_decode_writes_the_header_alone():
    record = np.zeros(LIMITS.words, dtype=np.int32)
    encode_plan(StepPlan(7, [], [], [], [0, 3]), record, [0, 3])
    assert np.count_nonzero(record[9:]) == 0
    without = msgspec.structs.replace(LIMITS, max_window_pages=0)
    assert without.words == LIMITS.words - 5 * (3 + 4), "models without windows carry no words for them"
    assert decode_plan(record, [0, 3]).decodes == [0, 3]


def test_the_ring_keeps_order_and_never_overwrites():
    ring = PlanRing(4, readers=2)
    others = [PlanRing(4, readers=2, name=ring.name) for _ in range(2)]
    seen: list[list[int]] = [[], []]

    def read(reader: int) -> None:
        while (record := others[reader].read(reader, lambda: True)) is not None:
            seen[reader].append(int(record[0]))
            time.sleep(0.0005 * reader)

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()

    def fill(number: int) -> None:
        ring.write(lambda record: record.fill(number), deadline_s=120)

    for number in range(5 * RECORDS):
        fill(number)
    while any(len(numbers) < 5 * RECORDS for numbers in seen):
        time.sleep(0.01)
    for other in others:
        assert other.name == ring.name
    ring._written[:] = -2  # what `close` tells the readers
    for thread in threads:
        thread.join()
    for other in others:
        other.close()
    ring.close()
    assert seen == [list(range(5 * RECORDS))] * 2


def test_a_rank_that_does_not_read_is_named():
    ring = PlanRing(4, readers=1)
    for _ in range(RECORDS):
        ring.write(lambda record: record.fill(1), deadline_s=120)
    with pytest.raises(RingError, match=r"ranks \[1\] did not read step 0 within 0.05 s"):
        ring.write(lambda record: record.fill(1), deadline_s=0.05)
    ring.close()


def test_a_reader_notices_that_rank_0_is_gone():
    ring = PlanRing(4, readers=1)
    other = PlanRing(4, readers=1, name=ring.name)
    with pytest.raises(RingError, match="rank 0 is gone"):
        other.read(0, lambda: False)
    other.close()
    ring.close()
