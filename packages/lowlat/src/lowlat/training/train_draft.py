"""Training a draft: the target writes, the draft learns to foresee it; then acceptance is measured on held-out text."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import torch

from lowlat.engine.build import eos_ids
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.speculative.draft_files import DraftConfig, default_taps, save_draft
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.draft_loss import blocks, loss_of
from lowlat.training.target import Target, Written
from lowlat.training.texts import Prompts, TextError, Texts

_FIRST_NORM = 0.2


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of a training; written beside the draft."""

    model: str
    kind: str = "dspark"
    data: tuple[str, ...]
    hold_out: int = 3
    steps: int = 2000
    sequences: int = 32
    """Sequences that the target writes for a round of training."""
    rounds: int = 4
    """Steps on each round's sequences, with new anchors every time."""
    anchors: int = 16
    """Blocks of a sequence in a step."""
    prompt_tokens: int = 384
    answer_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """The target writes with these in turn."""
    block_size: int = 6
    layers: int = 2
    taps: int = 3
    intermediate_size: int = 1024
    rank: int = 48
    """Of the Markov head or the candidate selector."""
    learning_rate: float = 1e-3
    device: str = "auto"
    seed: int = 0
    int8: bool = False
    measured: int = 48
    """Held-out sequences for each temperature."""


class Progress(msgspec.Struct, frozen=True):
    """After a step: its loss, and how often guesses were right, with those before them, by place."""

    step: int
    steps: int
    loss: float
    right: list[float]
    seconds: float
    writing_seconds: float


class Measured(msgspec.Struct, frozen=True):
    """Acceptance on held-out text: the share of blocks whose first guess, first two guesses, ... are right, and their
    sum, the tokens accepted a step beyond the one that comes anyway."""

    temperature: float
    by_position: list[float]
    accepted: float
    blocks: int


def train(recipe: Recipe, output: Path, tell: Callable[[Progress], None]) -> list[Measured]:
    """Train, measure, and write the draft with training.json into `output`.

    Raises `TextError`, `CheckpointError`, `UnsupportedModelError`, `DraftFileError`.
    """
    device = _device(recipe.device)
    checkpoint = open_checkpoint(recipe.model)
    tokenizer = checkpoint.tokenizer()
    chat = checkpoint.chat(tokenizer)
    room = recipe.prompt_tokens + recipe.answer_tokens + recipe.block_size
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = Target(checkpoint, device, dtype, room)
    config = shape_of(recipe, target)
    config.check()
    files = Texts([Path(path) for path in recipe.data], recipe.hold_out)
    prompts = Prompts(files.training, tokenizer, chat, recipe.prompt_tokens, recipe.seed)
    torch.manual_seed(recipe.seed)
    network = DraftNetwork(config, room)
    # States of a new draft point anywhere: at full size the target's head would be very sure of very wrong tokens.
    torch.nn.init.constant_(network.norm.weight, _FIRST_NORM)
    network.to(device)
    ends = frozenset(eos_ids(checkpoint))
    _learn(recipe, target, network, ends, iter(prompts), tell)
    measured = []
    if files.held_out:
        held_out = Prompts(files.held_out, tokenizer, chat, recipe.prompt_tokens, recipe.seed + 1)
        measured = [measure(recipe, target, network, ends, iter(held_out), at) for at in recipe.temperatures]
    save_draft(output, config, network.state_dict(), int8=recipe.int8)
    report = {
        "recipe": msgspec.to_builtins(recipe),
        "training_files": [path.name for path in files.training],
        "held_out_files": [path.name for path in files.held_out],
        "measured": msgspec.to_builtins(measured),
        "torch": torch.__version__,
    }
    (output / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return measured


def shape_of(recipe: Recipe, target: Target) -> DraftConfig:
    """The draft's shape: heads and sizes as the target's. The mask is the vocabulary's last token, which has hardly a
    use in text."""
    of = target.config
    extra: dict[str, dict[str, int]] = {
        "dflash": {},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": recipe.rank, "selector_top_k": 16},
        "dspark": {"markov_rank": recipe.rank},
    }
    if recipe.kind not in extra:
        raise TextError(f"a draft of kind {recipe.kind!r} is not known; known: {', '.join(extra)}")
    return DraftConfig(
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
        **extra[recipe.kind],
    )


def _learn(
    recipe: Recipe,
    target: Target,
    network: DraftNetwork,
    ends: frozenset[int],
    prompts: Iterator[list[int]],
    tell: Callable[[Progress], None],
) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator(target.device).manual_seed(recipe.seed)
    warm = max(1, min(100, recipe.steps // 10))

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warm) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / recipe.steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    started, writing = time.monotonic(), 0.0
    written: Written | None = None
    for step in range(recipe.steps):
        if written is None or step % recipe.rounds == 0:
            begun = time.monotonic()
            temperature = recipe.temperatures[step // recipe.rounds % len(recipe.temperatures)]
            written = target.write(
                list(islice(prompts, recipe.sequences)),
                recipe.answer_tokens,
                temperature,
                network.config.target_layer_ids,
                ends,
                generator,
            )
            writing += time.monotonic() - begun
        anchors_SA = draw_anchors(written, recipe.anchors, generator)
        found = blocks(network, target.embed, target.head, written, anchors_SA)
        loss = loss_of(found)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        right = _survival(found.right(), found.known_QP).tolist()
        tell(Progress(step + 1, recipe.steps, float(loss.detach()), right, time.monotonic() - started, writing))


@torch.no_grad()
def measure(
    recipe: Recipe,
    target: Target,
    network: DraftNetwork,
    ends: frozenset[int],
    prompts: Iterator[list[int]],
    temperature: float,
) -> Measured:
    """Acceptance at every place of what the target writes to held-out prompts."""
    generator = torch.Generator(target.device).manual_seed(recipe.seed + 1)
    rights, knowns = [], []
    for first in range(0, recipe.measured, recipe.sequences):
        count = min(recipe.sequences, recipe.measured - first)
        layers = network.config.target_layer_ids
        written = target.write(list(islice(prompts, count)), recipe.answer_tokens, temperature, layers, ends, generator)
        every = torch.arange(written.prompt_tokens, written.tokens_ST.shape[1] - network.config.proposals)
        for part in torch.split(every, 16):
            anchors_SA = part.to(target.device).expand(count, -1)
            found = blocks(network, target.embed, target.head, written, anchors_SA)
            # A block counts where its whole length was written before the end.
            whole = found.known_QP.all(1)
            rights.append(found.right()[whole].cpu())
            knowns.append(found.known_QP[whole].cpu())
    right, known = torch.cat(rights), torch.cat(knowns)
    by_position = _survival(right, known).tolist()
    return Measured(temperature, by_position, sum(by_position), len(right))


def draw_anchors(written: Written, count: int, generator: torch.Generator) -> torch.Tensor:
    """Places [S, A] of anchors: the last token of the prompt, or a token of the answer before its end."""
    first, last = written.prompt_tokens - 1, written.tokens_ST.shape[1] - 2
    lengths_S = (written.valid_ST.sum(1) - 2).clamp(min=first, max=last)
    random_SA = torch.rand(len(lengths_S), count, generator=generator, device=lengths_S.device)
    return first + (random_SA * (lengths_S - first + 1)[:, None]).long()


def _survival(right_QP: torch.Tensor, known_QP: torch.Tensor) -> torch.Tensor:
    return (right_QP & known_QP).sum(0) / known_QP.sum(0).clamp(min=1)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise TextError(f"--device {name} cannot be used here: {error}") from None
    return device
