"""Sequential proposals in plain PyTorch: what the kernel must choose, and the plain twin that it is timed against.

Suffixes: R requests, S steps, V vocabulary, K rank of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 1 << 64


def mix64(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % _WORD
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    x %= _WORD
    return x - _WORD if x >= _WORD // 2 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # int64 shifts carry the sign


def uniforms(seed: int, position: int, vocabulary: int, device: str | torch.device = "cpu") -> Tensor:
    """Numbers in (0, 1) for each token [V], float64: a hash of seed, position and token."""
    stream = mix64((seed % _WORD) ^ mix64((position + _GOLDEN) % _WORD))
    x = torch.arange(1, vocabulary + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN) + _signed(stream)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    x = x ^ _shift(x, 31)
    return (_shift(x, 41).double() + 0.5) / (1 << 23)


def gumbel(seed: int, position: int, vocabulary: int, device: str | torch.device = "cpu") -> Tensor:
    """Standard Gumbel noise [V] float64: the arg max of logits plus it is a draw from their softmax."""
    return -(-uniforms(seed, position, vocabulary, device).log()).log()


def propose(
    head_VK: Tensor,
    embedding_VK: Tensor,
    base_RSV: Tensor,
    anchors: list[int],
    temperatures: list[float],
    seeds: list[int],
    positions: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [R, S], logits [R, S, V] and margins [R, S] in float64.

    A margin is the distance between the two best perturbed values: below the rounding of float32 sums, either may win.
    """
    requests, steps, vocabulary = base_RSV.shape
    head, device = head_VK.double(), base_RSV.device
    tokens = torch.empty(requests, steps, dtype=torch.long, device=device)
    logits, margins = torch.empty_like(base_RSV, dtype=torch.double), tokens.double()
    for r in range(requests):
        token = anchors[r]
        for s in range(steps):
            logits[r, s] = base_RSV[r, s].double() + head @ embedding_VK[token].double()
            value = logits[r, s]
            if temperatures[r] > 0:
                value = value / temperatures[r] + gumbel(seeds[r], positions[r] + s, vocabulary, device)
            best = value.topk(min(2, vocabulary)).values
            token = int(value.argmax())
            tokens[r, s], margins[r, s] = token, best[0] - best[-1]
    return tokens, logits, margins


def plain_step(head_VK: Tensor, embedding_VK: Tensor, base_RSV: Tensor, anchors_R: Tensor) -> Tensor:
    """Greedy proposals [R, S] as an ordinary user of PyTorch writes them; capturable in a graph."""
    tokens, found = anchors_R, []
    for step in range(base_RSV.shape[1]):
        tokens = (base_RSV[:, step] + (embedding_VK[tokens] @ head_VK.T).float()).argmax(-1)
        found.append(tokens)
    return torch.stack(found, 1)
