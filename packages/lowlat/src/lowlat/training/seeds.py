"""Random numbers of a training by what they are for and its number: whatever was drawn before, after a break too, the
same is drawn."""

from __future__ import annotations

from hashlib import blake2b

import torch


def seed_of(seed: int, purpose: str, number: int) -> int:
    """A seed, below 2^63."""
    digest = blake2b(f"{seed} {purpose} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def begin(seed: int, purpose: str, number: int, device: torch.device) -> torch.Generator:
    """Seed PyTorch's own generators, which graphs and layers draw with; a generator on the device for the rest."""
    seed = seed_of(seed, purpose, number)
    torch.manual_seed(seed)
    return torch.Generator(device).manual_seed(seed)
