"""What the host knows of a device's batch slots without asking it: settings, newest tokens, lengths."""

from __future__ import annotations

from collections.abc import Callable

from lowlat.engine.batch import GREEDY, MIN_TEMPERATURE, SlotSampling
from lowlat.engine.device_sampler import SamplingMode

# Log-probabilities of a graph's most likely tokens: few sizes, so few graphs.
_TOP_SIZES = (0, 5, 20)


class HostSlots:
    """One entry for each slot in every list."""

    def __init__(self, count: int) -> None:
        self.settings: list[SlotSampling] = [GREEDY] * count
        self.tokens = [0] * count
        """Those of the last steps whose results are known."""
        self.lengths = [0] * count
        """Tokens after the steps launched; of steps that check guesses, after those whose results are known. The others
        let it grow at most by the rows in `flying`."""
        self.flying = [0] * count

    def room(self, slot: int) -> int:
        """Rows that a request may have in a step."""
        setting = self.settings[slot]
        return max(1, min(setting.width, setting.end - self.lengths[slot]))

    def grow(self, slot: int, count: int) -> None:
        """So many tokens more are computed."""
        length, end = self.lengths[slot] + count, self.settings[slot].end
        # As on the device: a request at its end may be computed again by steps launched before this was known.
        self.lengths[slot] = min(length, end - 1) if end else length

    def note(self, slot: int, tokens: list[int], observe: Callable[[int], None] | None) -> None:
        """These tokens were chosen for a slot."""
        for token in tokens:
            self.tokens[slot] = token
            if observe is not None:
                observe(token)

    def longest(self, slots: list[int]) -> int:
        """Tokens that none of these slots exceeds, whatever the steps in flight bring."""
        return max(self.lengths[slot] + self.flying[slot] for slot in slots)

    def logprobs(self, slots: list[int]) -> list[int]:
        """Log-probabilities that each wants; -1: none."""
        return [self.settings[slot].logprobs for slot in slots]

    def mode(self, slots: list[int]) -> SamplingMode:
        """What the tokens of these slots are chosen with."""
        settings = [self.settings[slot] for slot in slots]
        draws = [setting for setting in settings if setting.temperature >= MIN_TEMPERATURE]
        wanted = max(setting.logprobs for setting in settings)
        return SamplingMode(
            draws=bool(draws),
            filters=any(setting.top_k > 0 or setting.top_p < 1.0 or setting.min_p > 0.0 for setting in draws),
            rules=any(setting.has_rules for setting in settings),
            logprobs=wanted if wanted < 0 else next((size for size in _TOP_SIZES if size >= wanted), wanted),
        )
