"""Pages, the radix tree and leases: books that balance, hits in whole pages, locks that protect."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.cache.pages import OutOfPagesError, Owner, PagePool
from lowlat.cache.prefix import PrefixCache


def run_request(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """A request that computes exactly `tokens` and ends; returns its cached tokens."""
    lease = cache.begin(tokens, salt)
    cache.extend(lease, len(tokens))
    cached = lease.cached_tokens
    cache.end(lease, tokens)
    cache.check()
    return cached


def test_a_page_has_one_owner():
    pool = PagePool(4)
    first, second = pool.take(2)
    with pytest.raises(OutOfPagesError) as error:
        pool.take(3)
    assert error.value.missing == 1
    pool.adopt([first])
    assert pool.owner(first) == Owner.CACHED
    with pytest.raises(ValueError, match="CACHED"):
        pool.give_back([first])
    pool.give_back([second])
    with pytest.raises(ValueError, match="FREE"):
        pool.give_back([second])
    with pytest.raises(ValueError, match="FREE"):
        pool.adopt([second])
    pool.evict([first])
    pool.check()
    assert (pool.free, pool.held, pool.cached) == (4, 0, 0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_hits_are_whole_pages_and_leave_a_token(page_size: int, length: int):
    cache = PrefixCache(256, page_size)
    tokens = list(range(length))
    assert run_request(cache, tokens) == 0
    expected = (length - 1) // page_size * page_size
    assert run_request(cache, tokens) == expected
    # A longer prompt may use all whole pages of the shorter one.
    assert run_request(cache, [*tokens, 7, 8, 9]) == length // page_size * page_size
    cache.tree.clear()
    cache.check()
    assert cache.pool.free == 256, "everything is evictable at idle"


@pytest.mark.parametrize("shared", [63, 64, 65])
def test_prefixes_that_part_inside_a_page(shared: int):
    cache = PrefixCache(64, 64)
    first = list(range(shared)) + [1000] * 80
    run_request(cache, first)
    assert run_request(cache, list(range(shared)) + [2000] * 80) == shared // 64 * 64


def test_salts_share_nothing():
    cache = PrefixCache(64, 4)
    tokens = list(range(20))
    assert run_request(cache, tokens) == 0
    assert run_request(cache, tokens, "a") == 0
    assert run_request(cache, tokens, "a") == 16
    assert run_request(cache, tokens) == 16


def test_empty_salts_are_forgotten():
    cache = PrefixCache(64, 4)
    for number in range(100):
        run_request(cache, list(range(20)), f"salt {number}")
    cache.tree.clear()
    assert cache.tree._roots == {}


def test_a_locked_prefix_outlives_eviction():
    cache = PrefixCache(8, 2)
    shared = [1, 2, 3, 4]
    run_request(cache, shared)
    run_request(cache, [1, 2, 3, 4, 5, 6])
    holder = cache.begin([1, 2, 3, 4, 9])
    assert holder.cached_tokens == 4
    locked = list(holder.pages)
    other = cache.begin([50] * 12)
    cache.extend(other, 12)  # needs every page that is not locked
    assert cache.available == 0
    assert all(cache.pool.owner(page) == Owner.CACHED for page in locked)
    assert not set(other.pages) & set(locked)
    with pytest.raises(OutOfPagesError):
        cache.extend(holder, 6)
    cache.check()
    cache.end(other, [50] * 12)
    cache.extend(holder, 6)
    cache.end(holder, [1, 2, 3, 4, 9])
    cache.check()


def test_least_recently_used_goes_first():
    cache = PrefixCache(4, 1)
    run_request(cache, [1, 2])
    run_request(cache, [3, 4])
    run_request(cache, [1, 2])  # used again
    lease = cache.begin([9, 9])
    cache.extend(lease, 2)
    cache.end(lease, [])
    assert run_request(cache, [1, 2, 5]) == 2
    assert run_request(cache, [3, 4, 5]) == 0


def test_two_requests_that_compute_the_same_prefix_keep_their_own_pages():
    cache = PrefixCache(16, 2)
    tokens = [1, 2, 3, 4, 5]
    first, second = cache.begin(tokens), cache.begin(tokens)
    cache.extend(first, 5)
    cache.extend(second, 5)
    cache.share(first, tokens[:4])
    cache.share(second, tokens[:4])
    assert len(first.private) == 1
    assert len(second.private) == 3, "the tree keeps the first copy"
    cache.check()
    cache.end(first, tokens)
    cache.end(second, tokens)
    cache.check()
    assert cache.pool.held == 0


def test_a_disabled_cache_shares_nothing():
    cache = PrefixCache(16, 2, enabled=False)
    assert run_request(cache, [1, 2, 3, 4, 5]) == 0
    assert run_request(cache, [1, 2, 3, 4, 5]) == 0
    assert cache.pool.free == 16


@settings(max_examples=60, deadline=None)
@given(
    page_size=st.sampled_from([1, 2, 3, 8]),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=30),
)
def test_hits_are_true_prefixes(page_size: int, prompts: list[list[int]]):
    """Whatever was inserted and evicted before, a hit's pages hold exactly the prompt's own first tokens."""
    cache = PrefixCache(24, page_size)
    content: dict[int, tuple[int, ...]] = {}
    for tokens in prompts:
        lease = cache.begin(tokens)
        for index, page in enumerate(lease.pages):
            assert content[page] == tuple(tokens[: (index + 1) * page_size]), "a page of another prefix"
        try:
            cache.extend(lease, len(tokens))
        except OutOfPagesError:
            cache.end(lease, [])
            cache.check()
            continue
        for index, page in enumerate(lease.pages):
            if page in lease.private:
                content[page] = tuple(tokens[: (index + 1) * page_size])
        cache.end(lease, tokens)
        cache.check()
        assert cache.pool.held == 0
