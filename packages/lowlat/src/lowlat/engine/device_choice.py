"""Choosing tokens on the ranks of a group: all go on with the same ones.

Legend of shape suffixes: M samples of a step, C columns of this rank, V vocabulary, K ranks.
"""

from __future__ import annotations

import torch

from lowlat.engine.device_sampler import Samples, SamplingMode, choose
from lowlat.engine.device_state import DeviceState
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.parallel.group import Communicator

_GREEDY = SamplingMode()


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

    def choose(
        self,
        columns_MC: torch.Tensor,
        slots_M: torch.Tensor,
        positions_M: torch.Tensor,
        state: DeviceState,
        mode: SamplingMode,
    ) -> Samples:
        """As `device_sampler.choose`, of `DeviceDecoder.columns`; rank 0 alone has log-probabilities."""
        shard = self._communicator.shard
        if shard.size > 1 and mode == _GREEDY:
            return self._best(self._model.capped(columns_MC))
        logits_MV = self._model.whole(columns_MC)
        if shard.rank == 0:
            samples = choose(logits_MV, slots_M, positions_M, state, mode, self._model.ops)
        else:
            samples = Samples(torch.empty_like(slots_M))
        self._communicator.broadcast(samples.tokens_M)
        return samples

    def _best(self, logits_MC: torch.Tensor) -> Samples:
        best_M, index_M = logits_MC.max(dim=-1)
        # One message: a float and a token, side by side as words.
        pair_2M = torch.stack([best_M.view(torch.int32), index_M.int() + self._first])
        pairs_K2M = self._communicator.gather(pair_2M)
        best_M, rank_M = pairs_K2M[:, 0].view(torch.float32).max(dim=0)
        tokens_M = pairs_K2M[:, 1].gather(0, rank_M[None])[0].long()
        return Samples(torch.where(best_M.isfinite(), tokens_M, -1))
