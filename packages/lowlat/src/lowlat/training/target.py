"""The model that a draft is trained for: writes its own continuations and shows its states, on any device of PyTorch.

Legend of shape suffixes: S sequences, T tokens of each, A tokens of each answer, R rows, H hidden, X taps * H, V
vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lowlat.cache.layout import KVPool
from lowlat.models.base import BuildContext
from lowlat.models.config import UnsupportedModelError
from lowlat.models.decoder import Decoder
from lowlat.models.loading.checkpoint import Checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import SingleRank
from lowlat.platform.base import PackedLinear
from lowlat.training.writing import Steps


class TorchPlatform:
    """Any device of PyTorch, by plain operators."""

    name = "torch"
    default_dtype = "float32"
    page_size = 1
    min_rows = 1
    keeps_state = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pack(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> PackedLinear:
        return lambda x_RI: F.linear(x_RI, weight_OI, bias_O)

    def memory_available(self) -> int:
        return 0

    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)


class Written(NamedTuple):
    """Ends of prompts and their continuations, and what the draft may know of them."""

    tokens_ST: torch.Tensor
    features_STX: torch.Tensor
    """States of the tapped layers at every token but the last."""
    valid_ST: torch.Tensor
    """False after a sequence's end: nothing is to be learnt there."""
    last_STH: torch.Tensor
    """Normed last states at every token but the last: the target's head makes the next token's logits of them."""
    temperature_S: torch.Tensor
    prompt_S: torch.Tensor
    """Place of the first token that the target chose."""
    begin_S: torch.Tensor
    """Place of the first token: nothing stands before it."""

    def rows(self, rows_S: torch.Tensor) -> Written:
        """Some of the sequences."""
        return Written(*(part.index_select(0, rows_S) for part in self))


class Target:
    """A dense decoder, its embedding and its head."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, max_context: int) -> None:
        """Raises `UnsupportedModelError` for models that cannot be tapped."""
        build = BuildContext(TorchPlatform(device), SingleRank(), dtype, max_context)
        model = build_model(checkpoint, build, lambda done, total: None)
        if not isinstance(model, Decoder) or any(model.config.windows):
            raise UnsupportedModelError(f"{checkpoint.name}: drafts are trained for dense decoders without windows")
        self.model, self.device, self.dtype = model, device, dtype
        self.config = model.config
        self._head_of: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pool: tuple[int, KVPool] | None = None
        self._steps: dict[tuple[int, int, tuple[int, ...]], Steps] = {}
        tied = model.config.tie_word_embeddings
        self._head_VH = model.embedding_VH if tied else checkpoint.tensor("lm_head.weight", dtype).to(device)

    def embed(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Embeddings [R, H] in the target's type."""
        return self.model.embed(tokens_R)

    def head(self, normed_RH: torch.Tensor, tokens_V: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V] of normed states, of `tokens_V` alone if given; gradients reach the states."""
        return F.linear(normed_RH.to(self.dtype), self.head_of(tokens_V))

    def head_of(self, tokens_V: torch.Tensor | None) -> torch.Tensor:
        """The head's rows [V, H] of some tokens; None: all."""
        if tokens_V is None:
            return self._head_VH
        if self._head_of is None or self._head_of[0] is not tokens_V:
            self._head_of = (tokens_V, self._head_VH.index_select(0, tokens_V).contiguous())
        return self._head_of[1]

    @torch.no_grad()
    def write(
        self,
        prompts: list[list[int]],
        count: int,
        temperature: float,
        layers: tuple[int, ...],
        ends: frozenset[int],
        generator: torch.Generator,
        kept: int | None = None,
    ) -> Written:
        """Continue prompts of one length by `count` tokens each; states after `layers` are kept.

        `kept`: tokens of each prompt's end that are of use. None: all.
        """
        sequences, prompt = len(prompts), len(prompts[0])
        room = prompt + count
        skipped = 0 if kept is None else max(0, prompt - kept)
        pool = self._pool_of(sequences * room)
        tokens_ST = torch.empty(sequences, room, dtype=torch.int64, device=self.device)
        tokens_ST[:, :prompt] = torch.tensor(prompts).to(self.device)
        known = (sequences, room - skipped - 1)
        features_STX = torch.empty(*known, len(layers) * self.config.hidden_size, dtype=self.dtype, device=self.device)
        last_STH = torch.empty(*known, self.config.hidden_size, dtype=self.dtype, device=self.device)
        steps = self._steps_of((sequences, room, layers), pool, generator)
        for length in range(prompt, room):
            rows = slice(0 if length == prompt else length - 1, length)
            features_SYX, x_SYH, chosen_S = steps.run(tokens_ST[:, rows], rows.start, temperature)
            first = skipped if length == prompt else 0
            here = slice(rows.start + first - skipped, rows.stop - skipped)
            features_STX[:, here], last_STH[:, here] = features_SYX[:, first:], x_SYH[:, first:]
            tokens_ST[:, length] = chosen_S
        ended_ST = torch.zeros_like(tokens_ST, dtype=torch.bool)
        for end in ends:
            ended_ST |= tokens_ST == end
        ended_ST[:, :prompt] = False
        valid_ST = ended_ST.long().cumsum(1) - ended_ST.long() == 0
        return Written(
            tokens_ST[:, skipped:].contiguous(),
            features_STX,
            valid_ST[:, skipped:].contiguous(),
            F.rms_norm(last_STH, last_STH.shape[-1:], self.model.norm_H, self.config.rms_norm_eps),
            torch.full((sequences,), temperature, device=self.device),
            torch.full((sequences,), prompt - skipped, device=self.device),
            torch.zeros(sequences, dtype=torch.int64, device=self.device),
        )

    def _pool_of(self, slots: int) -> KVPool:
        """Keys and values of at least so many tokens."""
        if self._pool is None or self._pool[0] < slots:
            self._pool = None  # before there is another
            self._steps.clear()
            self._pool = (slots, KVPool(self.model.kv_layout(slots, 1), self.device))
        return self._pool[1]

    def _steps_of(self, shape: tuple[int, int, tuple[int, ...]], pool: KVPool, generator: torch.Generator) -> Steps:
        sequences, room, layers = shape
        if shape not in self._steps:
            self._steps[shape] = Steps(self.model, pool, layers, sequences, room)
        self._steps[shape].generator = generator
        return self._steps[shape]
