"""Training a draft: the target writes, the draft learns to foresee it; then acceptance is measured on held-out text."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from lowlat.engine.build import eos_ids
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.speculative.derived_tokens import DOWN, UP, DerivedTokens
from lowlat.speculative.draft_files import (
    DraftConfig,
    DraftFileError,
    default_taps,
    load_draft,
    load_factors,
    save_draft,
)
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.training.bank import Bank
from lowlat.training.compiled import compiled
from lowlat.training.draft_loss import blocks, loss_of
from lowlat.training.graphs import StepGraphs
from lowlat.training.muon import Muon
from lowlat.training.recipe import Measured, Progress, Recipe
from lowlat.training.target import Target, Written
from lowlat.training.texts import Prompts, TextError, Texts

_FIRST_NORM = 0.2
_FIRST_PLACES = 0.2
"""Standard deviation of the Markov head's embedding, at first."""
_WARM = 0.03
"""Part of a training in which the learning rate rises."""
_TELL_S = 2.0
"""Least seconds between reports: each waits for the device."""
_LOOKED_AT = 23
"""One in so many blocks of a step is looked at for acceptance, and teaches confidence."""
_ALONE_TEMPERATURE = 0.9
_ALONE_EVERY = 6
_FRAME = 256
"""More tokens than stand before a chat's first words."""
_SPAN = 192
"""Tokens at a prompt's end that can be anchors."""
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
    network = new_network(recipe, config, room)
    network.to(device)
    training = Training(recipe, target, network, frozenset(eos_ids(checkpoint)))
    training.run(prompts, tell)
    measured = []
    if files.held_out:
        held_out = Prompts(files.held_out, tokenizer, chat, recipe.prompt_tokens, recipe.seed + 1)
        at_each = sorted(set(recipe.temperatures))
        measured = [training.measure(training.held_out(held_out, at), at) for at in at_each]
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


def new_network(recipe: Recipe, config: DraftConfig, room: int) -> DraftNetwork:
    """Of random weights, for sequences of `room` tokens."""
    network = DraftNetwork(config, room)
    if recipe.derived and config.kind == "dspark":
        network.markov_embed = DerivedTokens(config, recipe.derived)
    # States of a new draft point anywhere: at full size the target's head would be very sure of very wrong tokens.
    torch.nn.init.constant_(network.norm.weight, _FIRST_NORM)
    return network


class Training:
    """One draft's training: the target's writings, the steps, and what is measured after them."""

    def __init__(self, recipe: Recipe, target: Target, network: DraftNetwork, ends: frozenset[int]) -> None:
        self._recipe, self._target, self._network, self._ends = recipe, target, network, ends
        self.steps = 0
        self.factors_X: torch.Tensor | None = None
        """By which features are multiplied, so that all have about the same size."""
        if recipe.start is not None:
            self.factors_X = _begin(network, Path(recipe.start))
        self._generator = torch.Generator(target.device).manual_seed(recipe.seed)
        longest = min(recipe.prompt_tokens, self._kept_tokens() or recipe.prompt_tokens) + recipe.answer_tokens
        longest = max(longest, _FRAME + recipe.alone_tokens if recipe.alone_tokens else 0)
        self.bank = Bank(recipe.kept, longest)
        self._writings = self._prompted = 0
        # Matrices between states go by Muon, which needs far fewer steps; rows of tokens and norms by AdamW.
        inner = [weight for name, weight in network.named_parameters() if _inner(name, weight)]
        others = [weight for name, weight in network.named_parameters() if not _inner(name, weight)]
        self._rate = torch.zeros((), device=target.device)
        self._muon = Muon(inner)
        self._muon.rate = self._rate
        on_gpu = target.device.type == "cuda"
        self._adam = torch.optim.AdamW(
            others, lr=self._rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True, capturable=on_gpu
        )
        self._graphs = StepGraphs(self._learn) if on_gpu else None
        self._fast = compiled(network) if on_gpu else network

    def run(self, prompts: Prompts, tell: Tell) -> None:
        """Write and learn until steps or seconds are over."""
        recipe = self._recipe
        started, told, writing = time.monotonic(), 0.0, 0.0
        done = 0.0
        while done < 1.0:
            if self.steps % recipe.rounds == 0:
                self._wait()
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
        """Choose the tokens that can be guessed by what the target writes."""
        network, vocabulary = self._network, self._network.config.vocab_size
        while len(self.bank) < min(len(self._recipe.temperatures), self._recipe.kept):
            self._write(prompts)
        if network.vocabulary is not None and self._recipe.start is None:
            counts_V = prompts.counts(vocabulary)
            counts_V += _WRITTEN * self.bank.tokens().cpu().bincount(minlength=vocabulary)
            network.draft_tokens.copy_(_most_common(counts_V, network.config.draft_vocab_size))
        if network.config.kind == "dspark":
            self._place_tokens()

    @torch.no_grad()
    def _place_tokens(self) -> None:
        """Begin with tokens of the Markov head where the target's embedding has them, in its widest directions: like
        tokens begin alike, and rare ones know something from the start."""
        known, places = self._network.vocabulary, self._network.markov_embed
        if isinstance(places, DerivedTokens):
            places.embed(self._network.config, known, self._target.embed)
        if not isinstance(places, torch.nn.Embedding) or self._recipe.start is not None:
            return
        embed = places.weight
        tokens = torch.arange(len(embed), device=embed.device) if known is None else known
        rows_VH = self._target.embed(tokens).float()
        rows_VH = rows_VH - rows_VH.mean(0)
        directions_HH = torch.linalg.eigh(rows_VH.T @ rows_VH).eigenvectors
        rows_VE = rows_VH @ directions_HH[:, -embed.shape[1] :]
        embed[: len(tokens), : rows_VE.shape[1]] = rows_VE * (_FIRST_PLACES / rows_VE.std().clamp(min=1e-6))

    def _write(self, prompts: Prompts) -> None:
        recipe = self._recipe
        count = recipe.writes * recipe.sequences
        self._writings += 1
        if recipe.alone_tokens and self._writings % _ALONE_EVERY == 0:
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
        self.bank.put(written)
        self._wait()

    def _wait(self) -> None:
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
        layers = self._network.config.target_layer_ids
        written = self._target.write(drawn, tokens, temperature, layers, ends, generator, self._kept_tokens())
        if self.factors_X is None:
            self.factors_X = 1 / written.features_STX.abs().mean((0, 1), dtype=torch.float32).clamp(min=1e-6)
        written.features_STX.mul_(self.factors_X)
        return written

    def _kept_tokens(self) -> int | None:
        """Tokens of a prompt that are of use; None: all."""
        return self._recipe.window + _SPAN if self._recipe.window else None

    def _step(self, done: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Learn once; loss, and what was right and known of the blocks that were looked at."""
        recipe = self._recipe
        self._rate.fill_(recipe.learning_rate * min(1.0, (done + 1e-3) / _WARM) * _cooling(done, recipe.cooling))
        written = self.bank.written
        assert written is not None
        rows_S = self.bank.draw(recipe.sequences, random.Random(self.steps))
        ends = written.valid_ST[rows_S], written.prompt_S[rows_S], written.begin_S[rows_S]
        anchors_SA = draw_anchors(*ends, recipe.anchors, self._generator, recipe.text_anchors)
        accepting = recipe.accepting if done > 1 - recipe.cooling else 0.0
        learn = self._learn if self._graphs is None else self._graphs.run
        return learn(rows_S, anchors_SA, accepting)

    def _learn(
        self, rows_S: torch.Tensor, anchors_SA: torch.Tensor, accepting: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The device's part of a step: it never waits for the device."""
        network, target, written = self._fast, self._target, self.bank.written
        assert written is not None
        written = written.rows(rows_S)
        low = target.dtype == torch.bfloat16
        with torch.autocast(target.device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            found = blocks(network, target, written, anchors_SA)
        every = min(_LOOKED_AT, len(found.wanted_QP))
        right_QP = found.right(every)
        loss = loss_of(found, right_QP, every, accepting)
        network.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        self._muon.step()
        self._adam.step()
        return loss.detach(), right_QP, found.judged()[::every]

    def held_out(self, prompts: Prompts, temperature: float) -> list[Written]:
        """What the target writes to held-out prompts."""
        recipe = self._recipe
        generator = torch.Generator(self._target.device).manual_seed(recipe.seed + 1)
        parts = []
        for first in range(0, recipe.measured, recipe.sequences):
            count = min(recipe.sequences, recipe.measured - first)
            drawn = prompts.draw(recipe.prompt_tokens, count)
            parts.append(self._written(drawn, recipe.answer_tokens, temperature, generator, self._ends))
        return parts

    @torch.no_grad()
    def measure(self, parts: list[Written], temperature: float) -> Measured:
        """Acceptance in steps through what the target has written, as the engine makes them: each begins behind the
        tokens that the one before brought."""
        target, steps = self._target, []
        for written in parts:
            sequences = len(written.tokens_ST)
            every = torch.arange(int(written.prompt_S[0]), written.tokens_ST.shape[1] - self._network.config.proposals)
            rights, wholes = [], []
            for part in torch.split(every, 16):
                anchors_SA = part.to(target.device).expand(sequences, -1)
                with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
                    found = blocks(self._network, target, written, anchors_SA)
                rights.append(found.right().view(sequences, len(part), -1).cpu())
                # A block counts where its whole length was written before the end.
                wholes.append(found.known_QP.all(1).view(sequences, -1).cpu())
            right_SAP = torch.cat(rights, 1)
            steps.append(right_SAP[walked(right_SAP.sum(2)) & torch.cat(wholes, 1)])
        right_XP = torch.cat(steps)
        by_position = right_XP.float().mean(0).tolist()
        return Measured(temperature, by_position, sum(by_position), len(right_XP))


def walked(accepted_SA: torch.Tensor) -> torch.Tensor:
    """[S, A]: at which places steps begin, if the step at each place accepts so many tokens."""
    begins_SA = torch.zeros_like(accepted_SA, dtype=torch.bool)
    for row_A, begins_A in zip(accepted_SA.tolist(), begins_SA, strict=True):
        place = 0
        while place < len(row_A):
            begins_A[place] = True
            place += 1 + row_A[place]
    return begins_SA


def draw_anchors(
    valid_ST: torch.Tensor,
    prompt_S: torch.Tensor,
    begin_S: torch.Tensor,
    count: int,
    generator: torch.Generator,
    texts: int = 0,
) -> torch.Tensor:
    """Places [S, A] of anchors: the last token of the prompt, or a token of the answer before its end; the last
    `texts` of them tokens of the prompt, if that is long."""
    first_S = prompt_S - 1
    lengths_S = (valid_ST.sum(1) - 2).clamp(max=valid_ST.shape[1] - 2).maximum(first_S)
    random_SA = torch.rand(len(first_S), count, generator=generator, device=first_S.device)
    places_SA = first_S[:, None] + (random_SA * (lengths_S - first_S + 1)[:, None]).long()
    in_text_SA = (first_S - _SPAN)[:, None] + (random_SA * _SPAN).long()
    is_text_SA = (torch.arange(count, device=first_S.device) >= count - texts) & (first_S - begin_S >= _SPAN)[:, None]
    return torch.where(is_text_SA, in_text_SA, places_SA)


def _begin(network: DraftNetwork, folder: Path) -> torch.Tensor:
    """Take the weights of an earlier draft; its factors of features. Raises `DraftFileError`."""
    config, weights = load_draft(folder)
    if config != network.config:
        raise DraftFileError(f"{folder}: its shape is not the one asked for: {config}, wanted {network.config}")
    device = network.fc.weight.device
    factors_X = load_factors(folder).to(device)
    weights["fc.weight"] = weights["fc.weight"].to(device) / factors_X
    network.load_state_dict(weights)
    return factors_X


def _lengths(longest: int) -> tuple[int, ...]:
    """Lengths of prompts: a draft shall know short ones and long ones."""
    return (longest,) if longest < _SPAN else (longest // 3, longest, longest // 2)


def _inner(name: str, weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and (name.startswith("layers.") or name in ("fc.weight", UP, DOWN))


def _cooling(done: float, part: float) -> float:
    """Factor on the learning rate, which falls in the last `part` of a training."""
    fallen = max(0.0, 1 - (1 - done) / part)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * fallen))


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
