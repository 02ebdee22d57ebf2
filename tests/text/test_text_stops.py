"""Stop strings: independent of how text is cut, never shown in part, linear in the text's length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowlat.text.stops import StopMatch, StopStrings

small_text = st.text("ab🔥世", max_size=24)
small_stops = st.lists(st.text("ab🔥世", min_size=1, max_size=5), min_size=1, max_size=4)


def plain(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The reference: try every end in turn, the longest stop string first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include_stop=include_stop)
    sent = []
    for piece in pieces:
        found = watcher.push(piece)
        if isinstance(found, StopMatch):
            return [*sent, found.text], found.stop
        sent.append(found)
    return [*sent, watcher.finish()], None


@given(text=small_text, stops=small_stops, data=st.data())
@settings(max_examples=500)
def test_every_cut_gives_the_same(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    expected, stop = plain(text, stops)
    sent, found = run(pieces, stops)
    assert ("".join(sent), found) == (expected, stop)
    shown, _ = run(pieces, stops, include_stop=True)
    assert "".join(shown) == expected + (stop or "")


@given(text=small_text, stops=small_stops)
@settings(max_examples=300)
def test_what_is_held_is_exactly_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops)
    sent = ""
    for n, character in enumerate(text):
        found = watcher.push(character)
        if isinstance(found, StopMatch):
            return
        sent += found
        seen = text[: n + 1]
        tails = (seen[start:] for start in range(len(seen)))
        longest = next((tail for tail in tails if any(stop.startswith(tail) for stop in stops)), "")
        assert watcher.held == longest
        assert sent + watcher.held == seen


def test_a_stop_string_over_many_tokens_is_not_shown() -> None:
    assert run(["DEF", "G", "HI", "J more"], ["DEFGHIJ"]) == (["", "", "", ""], "DEFGHIJ")
    assert run(["DEF", "G", "HI", "J more"], ["DEFGHIJ"], include_stop=True) == (["", "", "", "DEFGHIJ"], "DEFGHIJ")
    assert run(["DEF", "G", "HI", "K"], ["DEFGHIJ"]) == (["", "", "", "DEFGHIK", ""], None)


def test_first_complete_wins_then_the_longest() -> None:
    assert run(["xaby"], ["xaby", "ab"]) == (["x"], "ab")
    assert run(["xab"], ["b", "ab"]) == (["x"], "ab")


def test_stops_before_the_least_length_are_text() -> None:
    watcher = StopStrings(["aa"])
    assert watcher.push("a", may_stop=False) == ""
    assert watcher.push("a", may_stop=False) == "a"
    found = watcher.push("a")
    assert isinstance(found, StopMatch)
    assert found.text == ""


def test_a_suppressed_stop_inside_a_longer_one_does_not_come_back() -> None:
    watcher = StopStrings(["ab", "xaby"])
    assert watcher.push("xab", may_stop=False) == ""
    assert watcher.push("z") == "xabz"


def test_hostile_stop_strings_cost_linear_time() -> None:
    # Quadratic work would be 10^10 comparisons here and never come back.
    stop = "a" * 100_000 + "b"
    watcher = StopStrings([stop])
    sent = ""
    for _ in range(50):
        found = watcher.push("a" * 5_000)
        assert isinstance(found, str)
        sent += found
    assert sent == "a" * 150_000
    found = watcher.push("b")
    assert isinstance(found, StopMatch)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])


def test_no_stop_strings() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], None)
