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

    def __init__(self, model: DeviceDecoder, communicator: Communicator) -> None:
        self._model = model
        self._communicator = communicator
        shard = communicator.shard
        self._first = shard.part(model.vocab_size).start

    def greedy(self, columns_MC: torch.Tensor, slots_M: torch.Tensor, state: DeviceState) -> Samples:
        """The most likely tokens, of `DeviceDecoder.columns`; they are the slots' newest at once."""
        model = self._model
        if model.sums is None:
            return Samples(model.ops.greedy(model.whole(columns_MC), slots_M, state.tokens_T))
        return Samples(model.sums.pick(model.capped(columns_MC), self._first, slots_M, state.tokens_T))

    def choose(
        self,
        columns_MC: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        state: DeviceState,
        mode: SamplingMode,
    ) -> Samples:
        """As `device_sampler.choose`, of `DeviceDecoder.columns`; rank 0 alone has log-probabilities."""
        logits_MV = self._model.whole(columns_MC)
        if self._communicator.shard.rank == 0:
            samples = choose(logits_MV, slots_M, positions_M, state, mode, self._model.ops)
        else:
            samples = Samples(torch.empty_like(slots_M))
        self._communicator.broadcast(samples.tokens_M)
        return samples
