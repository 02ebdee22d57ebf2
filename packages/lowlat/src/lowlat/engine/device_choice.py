"""Choosing tokens on the ranks of a group: all go on with the same ones.

Legend of shape suffixes: M samples of a step, C columns of this rank, V vocabulary, K ranks.
"""

from __future__ import annotations

import torch

from lowlat.engine.device_sampler import Samples, SamplingMode, choose
from lowlat.engine.device_state import DeviceState
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.parallel.group import Communicator


class GroupChoice:
    """What ranks do after the model's last product.

    Greedy tokens need no logits of others: each rank tells its best one, and the first best of all is the token. For
    anything else ranks gather the logits, rank 0 chooses, and the others take its word: sums in another order could
    round a drawn token apart, and rules are known to rank 0 alone.
    """

    def __init__(self, model: DeviceDecoder, communicator: Communicator, state: DeviceState) -> None:
        self._model = model
        self._communicator = communicator
        self._state = state
        shard = communicator.shard
        self._first = shard.part(model.vocab_size).start

    def take(
        self, columns_MC: torch.Tensor, slots_M: torch.Tensor, positions_M: torch.Tensor, mode: SamplingMode
    ) -> Samples:
        """Choose a token for each row of `DeviceDecoder.columns`; they are the slots' newest at once."""
        if mode == SamplingMode():
            return self.greedy(columns_MC, slots_M)
        samples = self.choose(columns_MC, slots_M, positions_M, mode)
        # A broken row's token is -1; the step after it must not look that up.
        tokens_M = samples.tokens_M.clamp(min=0)
        self._state.tokens_T.index_copy_(0, slots_M, tokens_M)
        if mode.rules:
            self._state.count(slots_M, tokens_M)
        return samples

    def greedy(self, columns_MC: torch.Tensor, slots_M: torch.Tensor) -> Samples:
        """The most likely tokens, written to the slots' states."""
        model, tokens_T = self._model, self._state.tokens_T
        if model.sums is None:
            return Samples(model.ops.greedy(model.whole(columns_MC), slots_M, tokens_T))
        return Samples(model.sums.pick(model.capped(columns_MC), self._first, slots_M, tokens_T))

    def choose(
        self, columns_MC: torch.Tensor, slots_M: torch.Tensor, positions_M: torch.Tensor, mode: SamplingMode
    ) -> Samples:
        """As `device_sampler.choose`, which writes to no slot; rank 0 alone has log-probabilities."""
        logits_MV = self._model.whole(columns_MC)
        if self._communicator.shard.rank == 0:
            samples = choose(logits_MV, slots_M, positions_M, self._state, mode, self._model.ops)
        else:
            samples = Samples(torch.empty_like(slots_M))
        self._communicator.broadcast(samples.tokens_M)
        return samples
