"""How many guesses a step checks: the best by the table, whatever the table; and what is learnt of acceptance."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.engine.batch import SlotSampling, StepPlan
from lowlat.engine.speculation import Speculation
from lowlat.parallel.group import SingleRank
from lowlat.speculative.acceptance import Acceptance
from lowlat.speculative.budget import expected_tokens, plan_guesses
from lowlat.speculative.ngram import NgramProposer
from lowlat.speculative.proposer import DraftRequest, Proposal
from lowlat.speculative.step_times import StepTimes, rows_to_measure

CHANCE = st.floats(0, 1)


def rate(chances, counts, seconds, rows, extra):
    tokens = sum(expected_tokens(of[:count]) for of, count in zip(chances, counts, strict=True))
    return tokens / (seconds[rows + sum(counts)] + (extra if any(counts) else 0))


@settings(max_examples=300, deadline=None)
@given(
    chances=st.lists(st.lists(CHANCE, max_size=3), min_size=1, max_size=4),
    seconds=st.lists(st.floats(0.01, 1), min_size=25, max_size=25),
    others=st.integers(0, 5),
    extra=st.floats(0, 1),
)
def test_the_plan_is_as_good_as_the_best_of_all(chances, seconds, others, extra):
    """Step times may go up and down at will: no plan brings more tokens a second."""
    rows = len(chances) + others
    counts = plan_guesses(chances, seconds.__getitem__, rows, extra)
    assert all(0 <= count <= len(of) for count, of in zip(counts, chances, strict=True))
    every = itertools.product(*[range(len(of) + 1) for of in chances])
    best = max(rate(chances, plan, seconds, rows, extra) for plan in every)
    assert rate(chances, counts, seconds, rows, extra) >= best * (1 - 1e-9)


def test_rows_that_cost_too_much_are_not_checked():
    assert plan_guesses([[0.9, 0.9, 0.9]], lambda rows: float(rows), 1) == [0]
    assert plan_guesses([[0.9, 0.9, 0.9]], lambda rows: 1.0, 1) == [3]
    assert plan_guesses([[0.9, 0.9], [0.2, 0.9]], lambda rows: 1.0 if rows <= 4 else 9.0, 2) == [2, 0]
    assert plan_guesses([[]], lambda rows: 1.0, 1) == [0]


def test_times_lie_on_straight_lines_and_follow_what_is_measured():
    times = StepTimes({1: 1.0, 4: 4.0, 8: 2.0, 16: 4.0})
    assert [times(rows) for rows in (0, 1, 2, 4, 6, 8, 12, 20)] == [1, 1, 2, 4, 3, 2, 3, 5]
    assert StepTimes({1: 2.0, 2: 1.0})(9) == 1.0, "beyond the table times never shrink"
    for _ in range(200):
        times.observe(8, 3.0)
        times.observe(8, 60.0)  # the machine was busy with something else
        times.observe(3, 0.1)  # not in the table
    assert times(8) == pytest.approx(3.0, abs=0.01)
    assert 1.2 < times(1) < 1.5, "what makes steps of eight rows slower makes others slower too, for the most part"
    for _ in range(200):
        times.observe(1, 1.0)
        times.observe(8, 3.0)
    assert (times(1), times(8)) == (pytest.approx(1.0, abs=0.05), pytest.approx(3.0, abs=0.1))
    with pytest.raises(ValueError, match="rows of 1 and more"):
        StepTimes({})


def test_the_best_of_several_runs_counts():
    seconds = iter([5.0, 1.0, 9.0, 4.0, 2.0, 3.0])
    assert StepTimes.measure(lambda rows: next(seconds), [1, 2]).table() == [(1, 1.0), (2, 2.0)]
    assert rows_to_measure(5, 40) == [1, 2, 3, 4, 5, 8, 16, 32, 40]
    assert rows_to_measure(8, 4) == [1, 2, 3, 4]


def test_acceptance_is_learnt_by_place_and_by_request():
    acceptance = Acceptance()
    acceptance.begin(0)
    acceptance.begin(1)
    first = acceptance.chances(0, 0, 2)
    for _ in range(60):
        acceptance.judge(0, 0, [7, 8], [7, 9, 4])  # the first is right, the second is not
        acceptance.judge(1, 0, [7, 8], [6])
    good, bad = acceptance.chances(0, 0, 2), acceptance.chances(1, 0, 2)
    assert good[0] > 0.85 > first[0] > bad[0]
    assert good[1] < 0.15
    assert bad[0] < 0.2
    acceptance.begin(1)
    assert bad[0] < acceptance.chances(1, 0, 1)[0] < good[0], "a new request starts from all requests' past"
    assert acceptance.chances(0, 3, 1) == pytest.approx([0.7]), "another kind is another matter"


class Knowing:
    """Guesses 5 for ever, and counts how often it was asked."""

    costs_time, sequential, needs_ranks, follows = True, False, False, False

    def __init__(self, clock: list[float]) -> None:
        self.asked, self._clock = 0, clock

    def begin(self, slot, tokens):
        pass

    observe = begin

    def propose(self, requests: list[DraftRequest]) -> list[Proposal]:
        self.asked += 1
        self._clock[0] += 0.5
        return [Proposal([5] * 9) for _ in requests]


@pytest.mark.parametrize(("token", "least", "most"), [(5, 100, 100), (4, 6, 30)], ids=["right", "wrong"])
def test_a_draft_that_is_wrong_is_asked_now_and_then_only(token: int, least: int, most: int):
    clock = [0.0]
    speculation = Speculation(proposer := Knowing(clock), SingleRank(), width=4, adaptive=True, clock=lambda: clock[0])
    speculation.times = StepTimes({1: 1.0, 2: 1.1, 4: 1.2})
    setting = [SlotSampling(0.0, 0, 1.0, 0, -1, width=4, end=10_000)]
    speculation.begin(0, setting[0])
    widths = []
    for step in range(100):
        plan = StepPlan(step, [], [], [], [0])
        guesses = speculation.guess(plan, [5], [step], setting)
        widths.append(len(guesses[0]))
        speculation.judge([0], setting, [[token] * (1 + len(guesses[0]))])
        spent, plain = speculation.time_step(plan, guesses, 1.0)
        assert plain > 0
        assert spent >= 1.0
    assert least <= proposer.asked <= most
    assert (widths[-1] == 3) == (token == 5)


def test_what_followed_a_long_run_goes_before_a_drafts_guesses():
    clock = [0.0]
    proposer = Knowing(clock)
    speculation = Speculation(proposer, SingleRank(), width=4, adaptive=False, first=NgramProposer())
    prompts = [(1, 2, 3, 4, 9, 1, 2, 3), (1, 2, 7, 9, 1, 2)]
    setting = [SlotSampling(0.0, 0, 1.0, 0, -1, width=4, end=100, prompt=prompt) for prompt in prompts]
    for slot, of in enumerate(setting):
        speculation.begin(slot, of)
    tokens, lengths = [3, 2], [7, 5]
    assert speculation.guess(StepPlan(0, [], [], [], [0]), tokens, lengths, setting) == [[4, 9, 1]]
    assert proposer.asked == 0
    assert speculation.guess(StepPlan(1, [], [], [], [1, 0]), tokens, lengths, setting) == [[5, 5, 5], [4, 9, 1]]
    assert proposer.asked == 1, "two tokens are no long run"
    speculation.judge([1, 0], setting, [[7], [4, 6]])
    assert speculation.guess(StepPlan(2, [], [], [], [0]), [6, 7], [9, 6], setting) == [[5, 5, 5]]


def test_guesses_end_where_the_answer_ends():
    speculation = Speculation(NgramProposer(), SingleRank(), width=6, adaptive=False)
    setting = [SlotSampling(0.0, 0, 1.0, 0, -1, width=6, end=12, prompt=(1, 2) * 5)]
    speculation.begin(0, setting[0])
    found = [len(speculation.guess(StepPlan(0, [], [], [], [0]), [1], [n], setting)[0]) for n in (6, 8, 10, 11, 12)]
    assert found == [5, 3, 1, 0, 0]


def test_simulated_acceptance_has_its_mean_exactly():
    speculation = Speculation(NgramProposer(), SingleRank(), width=6, adaptive=False, simulated=3.51)
    counts = [speculation.simulate([0, 1], [[0] * 5, [0] * 5]) for _ in range(100)]
    assert [sum(of) for of in zip(*counts, strict=True)] == [351, 351]
    assert {count for of in counts for count in of} == {3, 4}
    assert speculation.simulate([0], [[]]) == [1]
