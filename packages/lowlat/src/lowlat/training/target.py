"""The model that a draft is trained for: writes its own continuations and shows its states, on any device of PyTorch.

Legend of shape suffixes: S sequences, T tokens of each, R rows, H hidden, X taps * H, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from lowlat.cache.layout import KVPool
from lowlat.layers.step import DecodeGroup, Segment, StepInputs
from lowlat.models.base import BuildContext
from lowlat.models.config import UnsupportedModelError
from lowlat.models.decoder import Decoder, Taps
from lowlat.models.loading.checkpoint import Checkpoint
from lowlat.models.registry import build_model
from lowlat.parallel.group import SingleRank
from lowlat.platform.base import PackedLinear


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
    """Prompts and continuations, and what the draft may know of them."""

    tokens_ST: torch.Tensor
    features_STX: torch.Tensor
    """States of the tapped layers at every token but the last."""
    valid_ST: torch.Tensor
    """False after a sequence's end: nothing is to be learnt there."""
    prompt_tokens: int


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

    def embed(self, tokens_R: torch.Tensor) -> torch.Tensor:
        """Embeddings [R, H] in float32."""
        return self.model.embed(tokens_R).float()

    def head(self, normed_RH: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] in float32 of normed states; gradients reach the states."""
        return self.model.head(normed_RH.to(self.dtype)).float()

    @torch.no_grad()
    def write(
        self,
        prompts: list[list[int]],
        count: int,
        temperature: float,
        layers: tuple[int, ...],
        ends: frozenset[int],
        generator: torch.Generator,
    ) -> Written:
        """Continue prompts of one length by `count` tokens each; states after `layers` are kept."""
        sequences, prompt = len(prompts), len(prompts[0])
        room = prompt + count
        pool = KVPool(self.model.kv_layout(sequences * room, 1), self.device)
        seen: list[torch.Tensor] = []
        self.model.taps = Taps(layers, lambda features_RX, step: seen.append(features_RX))
        tokens_ST = torch.tensor(prompts, device=self.device)
        bases_S = torch.arange(sequences, device=self.device) * room
        for length in range(prompt, room):
            first = length == prompt
            rows_ST = tokens_ST if first else tokens_ST[:, -1:]
            positions = torch.arange(0 if first else length - 1, length, device=self.device)
            write = (bases_S[:, None] + positions).flatten()
            rows = rows_ST.shape[1]
            segments: list[Segment] = []
            decodes: list[DecodeGroup] = []
            if rows > 1:
                none = torch.empty(0, dtype=torch.int64, device=self.device)
                segments = [Segment(n * rows, rows, length, none, n * room) for n in range(sequences)]
            else:
                slots = bases_S[:, None] + torch.arange(length, device=self.device)
                decodes = [DecodeGroup(torch.arange(sequences, device=self.device), slots, None)]
            last = torch.arange(1, sequences + 1, device=self.device) * rows - 1
            step = StepInputs(
                rows_ST.flatten(), positions.repeat(sequences), write, sequences * rows, segments, decodes, last
            )
            chosen_S = _draw(self.model.forward(step, pool), temperature, generator)
            tokens_ST = torch.cat([tokens_ST, chosen_S[:, None]], 1)
        self.model.taps = None
        ended = torch.zeros_like(tokens_ST, dtype=torch.bool)
        for end in ends:
            ended |= tokens_ST == end
        ended[:, :prompt] = False
        valid_ST = ended.long().cumsum(1) - ended.long() == 0
        return Written(
            tokens_ST, torch.cat([of.view(sequences, -1, of.shape[-1]) for of in seen], 1).float(), valid_ST, prompt
        )


def _draw(logits_SV: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature <= 0:
        return logits_SV.argmax(-1)
    return torch.multinomial((logits_SV / temperature).softmax(-1), 1, generator=generator)[:, 0]
