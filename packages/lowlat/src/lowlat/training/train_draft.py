"""Training a draft: the target writes, the draft learns to foresee it; then acceptance is measured on held-out text."""

from __future__ import annotations

import json
import math
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from lowlat.engine.build import eos_ids
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.speculative.draft_files import DraftConfig, default_taps, save_draft
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.draft_loss import blocks, loss_of
from lowlat.training.muon import Muon
from lowlat.training.recipe import Measured, Progress, Recipe
from lowlat.training.target import Target, Written
from lowlat.training.texts import Prompts, TextError, Texts

_FIRST_NORM = 0.2
_WARM = 0.03
"""Part of a training in which the learning rate rises."""
_TELL_S = 2.0
"""Least seconds between reports: each waits for the device."""
_LOOKED_AT = 7
"""One in so many blocks of a step is looked at for acceptance, and teaches confidence."""
_ALONE_TEMPERATURE = 0.9
_FRAME = 256
"""More tokens than stand before a chat's first words."""
_SPAN = 192
"""Tokens at a prompt's end that can be anchors."""
_MIXED = 8
"""Most writings that a step's sequences come from."""
_WRITTEN = 20
"""Tokens of the target count so many times those of the texts, in the choice of what can be guessed."""
_COMMON = 2e-5
"""Share of all tokens that the first token has beside what is counted, falling with its number: tokenizers number
tokens by how common they are."""

Tell = Callable[[Progress], None]


def train(recipe: Recipe, output: Path, tell: Tell) -> list[Measured]:
    """Train, measure, and write the draft with training.json into `output`.

    Raises `TextError`, `CheckpointError`, `UnsupportedModelError`, `DraftFileError`.
    """
    device = _device(recipe.device)
    checkpoint = open_checkpoint(recipe.model)
    tokenizer = checkpoint.tokenizer()
    chat = checkpoint.chat(tokenizer)
    room = max(recipe.prompt_tokens + recipe.answer_tokens, _FRAME + recipe.alone_tokens) + recipe.block_size
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = Target(checkpoint, device, dtype, room)
    config = shape_of(recipe, target)
    config.check()
    files = Texts([Path(path) for path in recipe.data], recipe.hold_out)
    prompts = Prompts(files.training, tokenizer, chat, recipe.prompt_tokens, recipe.seed, anywhere=True)
    torch.manual_seed(recipe.seed)
    network = DraftNetwork(config, room)
    # States of a new draft point anywhere: at full size the target's head would be very sure of very wrong tokens.
    torch.nn.init.constant_(network.norm.weight, _FIRST_NORM)
    network.to(device)
    training = Training(recipe, target, network, frozenset(eos_ids(checkpoint)))
    training.run(prompts, tell)
    measured = []
    if files.held_out:
        held_out = Prompts(files.held_out, tokenizer, chat, recipe.prompt_tokens, recipe.seed + 1)
        measured = [training.measure(held_out, at) for at in sorted(set(recipe.temperatures))]
    weights = network.state_dict() | {"fc.weight_columns": training.factors_X}
    save_draft(output, config, weights, int8=recipe.int8)
    report = {
        "recipe": msgspec.to_builtins(recipe),
        "steps": training.steps,
        "training_files": [path.name for path in files.training],
        "held_out_files": [path.name for path in files.held_out],
        "measured": msgspec.to_builtins(measured),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
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
        sliding_window=recipe.window,
        draft_vocab_size=recipe.vocabulary if recipe.vocabulary < of.vocab_size else 0,
        **extra[recipe.kind],
    )


class Training:
    """One draft's training: the target's writings, the steps, and what is measured after them."""

    def __init__(self, recipe: Recipe, target: Target, network: DraftNetwork, ends: frozenset[int]) -> None:
        self._recipe, self._target, self._network, self._ends = recipe, target, network, ends
        self.steps = 0
        self.factors_X: torch.Tensor | None = None
        """By which features are multiplied, so that all have about the same size."""
        self._generator = torch.Generator(target.device).manual_seed(recipe.seed)
        self._kept: deque[Written] = deque(maxlen=recipe.kept)
        self._writings = self._prompted = 0
        # Matrices between states go by Muon, which needs far fewer steps; rows of tokens and norms by AdamW.
        inner = [weight for name, weight in network.named_parameters() if _inner(name, weight)]
        others = [weight for name, weight in network.named_parameters() if not _inner(name, weight)]
        self._muon = Muon(inner)
        self._adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def run(self, prompts: Prompts, tell: Tell) -> None:
        """Write and learn until steps or seconds are over."""
        recipe = self._recipe
        started, told, writing = time.monotonic(), 0.0, 0.0
        done = 0.0
        while done < 1.0:
            if self.steps % recipe.rounds == 0:
                begun = time.monotonic()
                self._write(prompts)
                if self.steps == 0:
                    self._prepare(prompts)
                writing += time.monotonic() - begun
            passed = time.monotonic() - started
            begin = passed / recipe.seconds if recipe.seconds else self.steps / recipe.steps
            loss, right_QP, known_QP = self._step(min(1.0, begin))
            self.steps += 1
            passed = time.monotonic() - started
            done = min(1.0, passed / recipe.seconds if recipe.seconds else self.steps / recipe.steps)
            if passed - told > _TELL_S or done == 1.0 or self.steps == 1:
                right = _survival(right_QP, known_QP).tolist()  # waits for the device
                passed = told = time.monotonic() - started
                tell(Progress(self.steps, done, float(loss), right, passed, writing))

    def _prepare(self, prompts: Prompts) -> None:
        """Choose the tokens that can be guessed, and scale features, by what the target writes."""
        network, vocabulary = self._network, self._network.config.vocab_size
        while len(self._kept) < min(len(self._recipe.temperatures), self._recipe.kept):
            self._write(prompts)
        self.factors_X = 1 / self._kept[0].features_STX.abs().mean((0, 1), dtype=torch.float32).clamp(min=1e-6)
        for of in self._kept:
            of.features_STX.mul_(self.factors_X)
        if network.vocabulary is not None:
            counts_V = prompts.counts(vocabulary)
            for of in self._kept:
                tokens = of.tokens_ST[:, of.prompt_tokens :].cpu().flatten()
                counts_V += _WRITTEN * tokens.bincount(minlength=vocabulary)
            network.draft_tokens.copy_(_most_common(counts_V, network.config.draft_vocab_size))

    def _write(self, prompts: Prompts) -> None:
        recipe = self._recipe
        count = recipe.writes * recipe.sequences
        self._writings += 1
        if recipe.alone_tokens and self._writings % 3 == 0:
            opening = prompts.openings(count)
            written = self._written(opening, recipe.alone_tokens, _ALONE_TEMPERATURE, self._generator, frozenset())
        else:
            temperature = recipe.temperatures[self._prompted % len(recipe.temperatures)]
            # Temperatures and lengths take turns, each with each.
            lengths = _lengths(recipe.prompt_tokens)
            length = lengths[self._prompted // len(recipe.temperatures) % len(lengths)]
            self._prompted += 1
            drawn = prompts.draw(length, count, recipe.sessions)
            written = self._written(drawn, recipe.answer_tokens, temperature, self._generator, self._ends)
        self._kept.append(written)
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)

    def _written(
        self,
        drawn: list[list[int]],
        tokens: int,
        temperature: float,
        generator: torch.Generator,
        ends: frozenset[int],
    ) -> Written:
        recipe, layers = self._recipe, self._network.config.target_layer_ids
        kept = recipe.window + _SPAN if recipe.window else None
        written = self._target.write(drawn, tokens, temperature, layers, ends, generator, kept)
        if self.factors_X is not None:
            written.features_STX.mul_(self.factors_X)
        return written

    def _batch(self) -> Written:
        """Sequences of some writings of one shape, in equal parts."""
        draw = random.Random(self.steps)
        shape = draw.choice(self._kept).tokens_ST.shape
        alike = [written for written in self._kept if written.tokens_ST.shape == shape]
        chosen = draw.sample(alike, min(_MIXED, len(alike)))
        rows = []
        for index, written in enumerate(chosen):
            share = self._recipe.sequences * (index + 1) // len(chosen)
            share -= self._recipe.sequences * index // len(chosen)
            order = torch.randperm(len(written.tokens_ST), generator=self._generator, device=self._target.device)
            rows.append(order[:share])
        return Written.joined(chosen, rows)

    def _step(self, done: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Learn once; loss, and what was right and known of the blocks that were looked at."""
        recipe, network = self._recipe, self._network
        rate = recipe.learning_rate * min(1.0, (done + 1e-3) / _WARM) * _cooling(done)
        self._muon.rate = self._adam.param_groups[0]["lr"] = rate
        written = self._batch()
        anchors_SA = draw_anchors(written, recipe.anchors, self._generator, recipe.text_anchors)
        with torch.autocast(self._target.device.type, torch.bfloat16, enabled=self._target.dtype == torch.bfloat16):
            found = blocks(network, self._target, written, anchors_SA)
        every = min(_LOOKED_AT, len(found.wanted_QP))
        right_QP = found.right(every)
        loss = loss_of(found, right_QP, every)
        network.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        return loss.detach(), right_QP, found.judged()[::every]

    @torch.no_grad()
    def measure(self, prompts: Prompts, temperature: float) -> Measured:
        """Acceptance at every place of what the target writes to held-out prompts."""
        recipe, target = self._recipe, self._target
        generator = torch.Generator(target.device).manual_seed(recipe.seed + 1)
        rights, knowns = [], []
        for first in range(0, recipe.measured, recipe.sequences):
            count = min(recipe.sequences, recipe.measured - first)
            drawn = prompts.draw(recipe.prompt_tokens, count)
            written = self._written(drawn, recipe.answer_tokens, temperature, generator, self._ends)
            every = torch.arange(written.prompt_tokens, written.tokens_ST.shape[1] - self._network.config.proposals)
            for part in torch.split(every, 16):
                anchors_SA = part.to(target.device).expand(count, -1)
                with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
                    found = blocks(self._network, target, written, anchors_SA)
                # A block counts where its whole length was written before the end.
                whole = found.known_QP.all(1)
                rights.append(found.right()[whole].cpu())
                knowns.append(found.known_QP[whole].cpu())
        right, known = torch.cat(rights), torch.cat(knowns)
        by_position = _survival(right, known).tolist()
        return Measured(temperature, by_position, sum(by_position), len(right))


def draw_anchors(written: Written, count: int, generator: torch.Generator, texts: int = 0) -> torch.Tensor:
    """Places [S, A] of anchors: the last token of the prompt, or a token of the answer before its end; the last
    `texts` of them tokens of the prompt, if that is long."""
    first, last = written.prompt_tokens - 1, written.tokens_ST.shape[1] - 2
    lengths_S = (written.valid_ST.sum(1) - 2).clamp(min=first, max=last)
    random_SA = torch.rand(len(lengths_S), count, generator=generator, device=lengths_S.device)
    places_SA = first + (random_SA * (lengths_S - first + 1)[:, None]).long()
    earliest = max(0, first - _SPAN)
    if first - earliest == _SPAN:
        places_SA[:, count - texts :] = (earliest + random_SA[:, count - texts :] * (first - earliest)).long()
    return places_SA


def _lengths(longest: int) -> tuple[int, ...]:
    """Lengths of prompts: a draft shall know short ones and long ones."""
    return (longest,) if longest < _SPAN else (longest // 3, longest, longest // 2)


def _inner(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and (name.startswith("layers.") or name == "fc.weight")


def _cooling(done: float) -> float:
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


def _most_common(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent tokens, in rising order."""
    rank_V = torch.arange(len(counts_V))
    expected_V = counts_V + counts_V.sum() * _COMMON * 1000 / (rank_V + 1000)
    return expected_V.topk(size).indices.sort().values


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
