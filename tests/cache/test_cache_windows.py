"""Window pages beside a prefix tree: where a prefix can be resumed, what stays when pages are short, whose they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.cache.pages import OutOfPagesError
from lowlat.cache.prefix import PrefixCache
from lowlat.cache.windows import WindowPages, most_pages

SIZE, WINDOW, SPAN = 4, 7, 8


def make_cache(window_pages: int, pages: int = 64) -> tuple[PrefixCache, WindowPages]:
    windows = WindowPages(window_pages, SIZE, WINDOW, SPAN)
    return PrefixCache(pages, SIZE, windows=windows), windows


def run_request(cache: PrefixCache, prompt: list[int], answer: list[int] | None = None) -> int:
    """A request in chunks of `SPAN` tokens, then token by token; returns its cached tokens."""
    tokens = prompt + (answer or [])
    lease = cache.begin(prompt)
    cached = lease.cached_tokens
    cache.extend(lease, len(prompt))
    for start in range(cached, len(prompt), SPAN):
        cache.slide(lease, start, min(start + SPAN, len(prompt)))
        cache.check()
    cache.share(lease, prompt)
    for place in range(len(prompt), len(tokens)):
        cache.extend(lease, place + 1)
        cache.slide(lease, place, place + 1)
        cache.check()
    cache.end(lease, tokens)
    cache.check()
    assert cache.windows is not None
    assert cache.windows.in_use == cache.windows.reserved == 0
    return cached


def words(count: int, seed: int) -> list[int]:
    return [seed * 1000 + n for n in range(count)]


MOST = most_pages(SIZE, WINDOW, SPAN)


def test_the_next_turn_of_a_chat_goes_on_where_the_answer_ended():
    cache, _ = make_cache(MOST)  # no page more than one request needs
    prompt, answer = words(30, 1), words(21, 2)
    assert run_request(cache, prompt, answer) == 0
    assert run_request(cache, prompt + answer + words(5, 3)) == 48


@pytest.mark.parametrize("length", range(25, 34))
def test_the_same_prompt_again_has_its_last_whole_page_but_one_token(length: int):
    """Its own last page may be whole: then the page before it must be one to go on from too."""
    cache, _ = make_cache(2 * MOST)
    assert run_request(cache, words(length, 1), words(30, 2)) == 0
    assert run_request(cache, words(length, 1)) == (length - 1) // SIZE * SIZE


def test_a_prefix_without_its_window_is_resumed_at_the_deepest_place_that_has_one():
    cache, windows = make_cache(2 * MOST)
    run_request(cache, words(12, 1))
    run_request(cache, words(12, 1) + words(60, 2))
    # The long one's middle was overwritten: pages are few.
    tokens = words(12, 1) + words(30, 2) + words(20, 3)
    pages, _, known = cache.longest(tokens, "")
    assert known == 42 // SIZE
    assert 0 < len(pages) * SIZE == 12
    assert run_request(cache, tokens) == 12
    # That request was told that others come this way, so it has kept the window where the two part.
    assert run_request(cache, words(12, 1) + words(30, 2) + words(20, 4)) == 40
    assert windows.total == 2 * MOST


def test_a_window_of_one_token_needs_no_page_before():
    windows = WindowPages(8, SIZE, 1, SPAN)
    cache = PrefixCache(64, SIZE, windows=windows)
    tokens = words(40, 1)
    run_request(cache, tokens)
    assert run_request(cache, tokens[:22]) == 20


def test_requests_reserve_what_they_may_need_and_no_more():
    cache, windows = make_cache(2 * MOST)
    first, second, third = (cache.begin(words(40, n)) for n in range(3))
    cache.extend(first, 40)
    cache.extend(second, 40)
    assert windows.available == 0
    assert not cache.fits(third, 1)
    with pytest.raises(OutOfPagesError):
        cache.extend(third, 1)
    assert not third.pages
    cache.end(first, [])
    assert cache.fits(third, 40)
    cache.extend(third, 5)
    assert windows.reserved == MOST + 2, "short requests reserve few"
    cache.extend(third, 40)
    assert windows.reserved == 2 * MOST
    cache.end(second, [])
    cache.end(third, [])
    cache.check()


def test_a_lone_request_goes_through_neighbouring_pages():
    """Keys that lie in order are read where they are, without a copy."""
    cache, windows = make_cache(6 * MOST)
    lease = cache.begin(words(8, 1))
    given: list[int] = []
    for place in range(60):
        cache.extend(lease, place + 1)
        entries = cache.slide(lease, place, place + 1)
        given += entries[1] if entries is not None else []
    assert given == list(range(15))
    assert windows.in_use <= MOST < 15


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_requests_leave_books_that_balance_and_prefixes_that_are_whole(data: st.DataObject):
    """Branching texts with ever too few pages. What `longest` offers has the window before its end."""
    cache, windows = make_cache(data.draw(st.integers(MOST, 3 * MOST), "window pages"), pages=40)
    for _ in range(data.draw(st.integers(1, 12), "requests")):
        branch = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6), "branch")
        prompt = [token for choice in branch for token in words(7, choice)]
        before = cache.longest(prompt[: (len(prompt) - 1) // SIZE * SIZE], "")[0]
        tail = before[max(0, len(before) - -(-(WINDOW - 1) // SIZE)) :]
        assert all(page in windows._attached for page in tail)
        cached = run_request(cache, prompt, words(data.draw(st.integers(0, 12), "answer"), 9))
        assert cached == len(before) * SIZE
    cache.tree.clear()
    cache.check()
    assert len(windows._free) == windows.total, "a page that is freed takes its window page along"
