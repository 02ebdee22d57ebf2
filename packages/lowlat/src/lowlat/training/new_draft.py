"""The draft that a training begins with: its shape, its weights, and the tokens that it can guess.

Legend of shape suffixes: V tokens, H hidden, E rank of the Markov head, X taps * H.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lowlat.speculative.derived_tokens import DerivedTokens
from lowlat.speculative.draft_files import DraftConfig, DraftFileError, default_taps, load_draft, load_factors
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.recipe import Recipe, RecipeError
from lowlat.training.target import Target

_FIRST_NORM = 0.2
_FIRST_PLACES = 0.2
"""Standard deviation of the Markov head's embedding, at first."""
_COMMON = 2e-5
"""Share of all tokens that the first token has beside what is counted, falling with its number: tokenizers number
tokens by how common they are."""


def shape_of(recipe: Recipe, target: Target) -> DraftConfig:
    """The draft's shape: heads and sizes as the target's. The mask is the vocabulary's last token, which has hardly a
    use in text. Raises `RecipeError`, `DraftFileError`."""
    of = target.config
    extra: dict[str, dict[str, int]] = {
        "dflash": {},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": recipe.rank, "selector_top_k": 16},
        "dspark": {"markov_rank": recipe.rank},
    }
    if recipe.kind not in extra:
        raise RecipeError(f"a draft of kind {recipe.kind!r} is not known; known: {', '.join(extra)}")
    config = DraftConfig(
        kind=recipe.kind,  # type: ignore[arg-type]
        hidden_size=of.hidden_size,
        vocab_size=of.vocab_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=of.head_dim,
        target_layer_ids=default_taps(of.num_hidden_layers, recipe.taps),
        num_target_layers=of.num_hidden_layers,
        mask_token_id=of.vocab_size - 1,
        block_size=recipe.block_size,
        rope_theta=of.rope_theta,
        sliding_window=recipe.window,
        draft_vocab_size=recipe.vocabulary if recipe.vocabulary < of.vocab_size else 0,
        **extra[recipe.kind],
    )
    config.check()
    return config


def new_network(recipe: Recipe, config: DraftConfig, room: int) -> DraftNetwork:
    """Of random weights, for sequences of `room` tokens."""
    network = DraftNetwork(config, room)
    if recipe.derived and config.kind == "dspark":
        network.markov_embed = DerivedTokens(config, recipe.derived)
    # States of a new draft point anywhere: at full size the target's head would be very sure of very wrong tokens.
    torch.nn.init.constant_(network.norm.weight, _FIRST_NORM)
    return network


def take_weights(network: DraftNetwork, folder: Path) -> torch.Tensor:
    """Take the weights of an earlier draft; its factors of features. Raises `DraftFileError`."""
    config, weights = load_draft(folder)
    if config != network.config:
        raise DraftFileError(f"{folder}: its shape is not the one asked for: {config}, wanted {network.config}")
    missing = set(network.state_dict()) ^ set(weights)
    if missing:
        raise DraftFileError(
            f"{folder}: its weights are not the ones asked for: {', '.join(sorted(missing))} are in one alone; "
            "is --derived as it was?"
        )
    device = network.fc.weight.device
    factors_X = load_factors(folder).to(device)
    weights["fc.weight"] = weights["fc.weight"].to(device) / factors_X
    network.load_state_dict(weights)
    return factors_X


def choose_tokens(network: DraftNetwork, counts_V: torch.Tensor) -> None:
    """Let the draft guess the most frequent tokens, by their counts."""
    if network.vocabulary is not None:
        network.draft_tokens.copy_(_most_common(counts_V, network.config.draft_vocab_size))


def embed_tokens(network: DraftNetwork, target: Target) -> None:
    """A network that makes the Markov head's tokens of the target's embeddings is shown them."""
    places = getattr(network, "markov_embed", None)
    if isinstance(places, DerivedTokens):
        places.embed(network.config, network.vocabulary, target.embed)


@torch.no_grad()
def place_tokens(network: DraftNetwork, target: Target) -> None:
    """Begin with tokens of the Markov head where the target's embedding has them, in its widest directions: like tokens
    begin alike, and rare ones know something from the start."""
    places = getattr(network, "markov_embed", None)
    if not isinstance(places, torch.nn.Embedding):
        return
    known, embed = network.vocabulary, places.weight
    tokens = torch.arange(len(embed), device=embed.device) if known is None else known
    rows_VH = target.embed(tokens).float()
    rows_VH = rows_VH - rows_VH.mean(0)
    directions_HH = torch.linalg.eigh(rows_VH.T @ rows_VH).eigenvectors
    rows_VE = rows_VH @ directions_HH[:, -embed.shape[1] :]
    embed[: len(tokens), : rows_VE.shape[1]] = rows_VE * (_FIRST_PLACES / rows_VE.std().clamp(min=1e-6))


def _most_common(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent tokens, in rising order."""
    rank_V = torch.arange(len(counts_V))
    expected_V = counts_V + counts_V.sum() * _COMMON * 1000 / (rank_V + 1000)
    return expected_V.topk(size).indices.sort().values
