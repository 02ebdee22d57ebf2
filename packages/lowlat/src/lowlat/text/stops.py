"""Stop strings: found across token edges, cut exactly, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatch:
    """A stop string that matched, and the text before it that may still be sent (with it, if asked).

    `stop` None: the answer is complete for another reason.
    """

    __slots__ = ("stop", "text")

    def __init__(self, stop: str | None, text: str) -> None:
        self.stop = stop
        self.text = text


class _Matcher:
    """One stop string read character by character (Knuth, Morris and Pratt): linear for any text."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Characters at the end of the text that begin the stop string, as many as possible."""
        # fallback[n]: the longest proper beginning of the stop string that also ends its first n characters.
        self._fallback = [0, 0]
        length = 0
        for character in stop[1:]:
            while length and stop[length] != character:
                length = self._fallback[length]
            length += stop[length] == character
            self._fallback.append(length)

    def push(self, character: str) -> bool:
        """Reads one character; True when it completes the stop string."""
        if self.matched == len(self.stop):
            self.matched = self._fallback[self.matched]
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)

    def may_become(self) -> int:
        """Characters at the end of the text that may still grow into the stop string."""
        return self._fallback[self.matched] if self.matched == len(self.stop) else self.matched


class StopStrings:
    """Watches one request's text for stop strings.

    Text that may still become a stop string is held back; the rest is released at once. Of several stop strings the
    one that is complete first wins, and of those complete at the same character the longest, so the outcome does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Raises ValueError for an empty stop string, which would match everywhere."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        # Longest first, so that the longest of those complete at one character is found first.
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=lambda stop: (-len(stop), stop))]
        self._first = tuple({stop[0] for stop in stops})
        self._include = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Text that waits because it may become a stop string."""
        return self._held

    def push(self, text: str, *, may_stop: bool = True) -> str | StopMatch:
        """Adds text; returns what may be sent now, or the match that ends the answer.

        With `may_stop` false (before `min_tokens`) stop strings that this text completes are ordinary text.
        """
        if not self._held and not any(first in text for first in self._first):
            return text
        before = self._held + text
        for n, character in enumerate(text):
            # Every matcher reads every character, so no short cut out of this loop before all have.
            complete = [matcher for matcher in self._matchers if matcher.push(character)]
            if complete and may_stop:
                stop = complete[0].stop
                end = len(self._held) + n + 1
                self._held = ""
                return StopMatch(stop, before[: end if self._include else end - len(stop)])
        keep = max(matcher.may_become() for matcher in self._matchers)
        self._held = before[len(before) - keep :]
        return before[: len(before) - keep]

    def finish(self) -> str:
        """The held text: the answer ended for another reason, so it was ordinary text."""
        held, self._held = self._held, ""
        return held
