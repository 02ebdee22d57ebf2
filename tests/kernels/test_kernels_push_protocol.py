"""The tagged push protocol of `push_reduce`, with all orders of events: stores arrive when they like.

Ranks push a word to every inbox and wait for everybody's word of the same tag; a store may arrive any time later, but
stores to one place arrive in order. Wanted: whatever the order, every rank gets through, which it does not if a word
that somebody still waits for was overwritten by a later one.
"""

from __future__ import annotations

import pytest

Rank = tuple[int, bool, frozenset]
"""Reduction number, whether its words are pushed, and whose words have been read."""


def stuck_states(ranks: int, reductions: int, halves: int) -> tuple[int, int]:
    """Explore everything; returns (states, states in which nothing can happen though a rank has not finished)."""
    start: tuple[Rank, ...] = tuple((0, False, frozenset()) for _ in range(ranks))
    # inboxes: tag by (owner, half, source); flying: tags in order by the same key.
    empty = tuple((owner, half, source) for owner in range(ranks) for half in range(halves) for source in range(ranks))
    index = {place: number for number, place in enumerate(empty)}
    first = (start, (-1,) * len(empty), ((),) * len(empty))
    seen, todo, stuck = {first}, [first], 0
    while todo:
        state = todo.pop()
        following = list(successors(state, ranks, reductions, halves, index))
        if not following and any(rank[0] < reductions for rank in state[0]):
            stuck += 1
        for one in following:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    return len(seen), stuck


def successors(state, ranks, reductions, halves, index):
    progress, inboxes, flying = state
    for number, queue in enumerate(flying):
        if queue:
            arrived = inboxes[:number] + (queue[0],) + inboxes[number + 1 :]
            yield progress, arrived, flying[:number] + (queue[1:],) + flying[number + 1 :]
    for rank, (tag, pushed, read) in enumerate(progress):
        if tag == reductions:
            continue
        if not pushed:
            sent = list(flying)
            for owner in range(ranks):
                sent[index[owner, tag % halves, rank]] += (tag,)
            yield replaced(progress, rank, (tag, True, read)), inboxes, tuple(sent)
        elif len(read) == ranks:
            yield replaced(progress, rank, (tag + 1, False, frozenset())), inboxes, flying
        else:
            source = len(read)  # words are waited for in the order of ranks
            if inboxes[index[rank, tag % halves, source]] == tag:
                yield replaced(progress, rank, (tag, True, read | {source})), inboxes, flying


def replaced(progress, rank, value):
    return progress[:rank] + (value,) + progress[rank + 1 :]


@pytest.mark.parametrize(("ranks", "reductions"), [(2, 5), (3, 2)])
def test_two_halves_are_enough(ranks, reductions):
    states, stuck = stuck_states(ranks, reductions, halves=2)
    assert states > 300
    assert stuck == 0


def test_one_half_is_not():
    assert stuck_states(2, 3, halves=1)[1] > 0
