"""Drafts beside the model: opened and checked before pages are counted, bound to the runner once there are pools."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from lowlat.cache.groups import bytes_per_token, whole
from lowlat.cache.layout import KVLayout, KVPool
from lowlat.engine.config import EngineConfig
from lowlat.engine.config_checks import draft_path
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.host_drawing import token_keys
from lowlat.engine.runner import ModelRunner
from lowlat.engine.sampler import draw_guess
from lowlat.engine.setup_error import SetupError
from lowlat.layers.step import StepInputs
from lowlat.models.base import BuildContext, Model
from lowlat.models.config import UnsupportedModelError
from lowlat.models.decoder import Decoder, Taps
from lowlat.models.device_decoder import DeviceDecoder
from lowlat.models.loading.checkpoint import Checkpoint, open_checkpoint
from lowlat.models.loading.errors import CheckpointError
from lowlat.models.registry import build_model
from lowlat.parallel.group import SingleRank
from lowlat.platform.base import PackedLinear
from lowlat.speculative import int8_linear
from lowlat.speculative.derived_tokens import with_table
from lowlat.speculative.device_draft import SHARPNESS, BlockDraft, DeviceDraft, SmallModelDraft
from lowlat.speculative.dflash import BlockProposer, draft_layout
from lowlat.speculative.draft_files import DraftConfig, DraftFileError, load_draft
from lowlat.speculative.draft_model import ModelProposer
from lowlat.speculative.draft_network import DraftNetwork
from lowlat.speculative.packed_network import PackedNetwork
from lowlat.speculative.proposer import Choose, Proposer

_MOST_SEQUENTIAL = 15


class Draft(Protocol):
    """A draft that is not bound yet."""

    proposals: int
    """Most guesses that it can make at once."""
    token_bytes: int
    """Bytes of its own that it keeps for every token of the KV pool."""
    taps: tuple[int, ...]
    """Layers of the model whose states it looks at."""

    def bind(self, runner: ModelRunner) -> Proposer:
        """Make its pools, at the slots of the runner's. Only rank 0's proposes."""

    def bind_device(self, runner: DeviceRunner) -> DeviceDraft:
        """The same for a runner whose state lives on the device."""


def open_draft(config: EngineConfig, checkpoint: Checkpoint, model: Model, build: BuildContext) -> Draft | None:
    """The draft that `config` names; None where none is needed. Raises `SetupError`."""
    path = draft_path(config)
    if path is None:
        return None
    if config.spec == "draft-model":
        return _SmallModel(path, checkpoint, build)
    if not isinstance(model, Decoder):
        raise SetupError(f"--spec {config.spec} needs a dense decoder; {config.model} is none: use --spec ngram")
    return _TrainedDraft(path, checkpoint, model, build)


def _choose(runner: ModelRunner, tokens_V: torch.Tensor | None = None, sharpness: float = 1.0) -> Choose:
    keys_V = None if tokens_V is None else token_keys(tokens_V.numpy())
    return lambda logits_V, slot, position: draw_guess(logits_V, runner.sampling_of(slot), position, keys_V, sharpness)


class _SmallModel:
    """A whole model of the same vocabulary, on rank 0."""

    proposals = _MOST_SEQUENTIAL
    taps: tuple[int, ...] = ()

    def __init__(self, path: str, target: Checkpoint, build: BuildContext) -> None:
        try:
            checkpoint = open_checkpoint(path)
            _check_vocabulary(checkpoint, target)
            alone = BuildContext(build.platform, SingleRank(), build.dtype, build.max_context)
            model = build_model(checkpoint, alone, lambda done, total: None)
        except (CheckpointError, UnsupportedModelError) as error:
            raise SetupError(f"--draft: {error}") from error
        if not isinstance(model, Decoder):
            raise SetupError(f"--draft {path}: a draft model must be a dense decoder")
        if any(model.config.windows):
            raise SetupError(f"--draft {path}: a draft model with windows of attention is not supported; use another")
        longest = checkpoint.config.get("max_position_embeddings") or 0
        if longest < build.max_context:
            raise SetupError(
                f"--draft {path} has a context of {longest} tokens, the model of {build.max_context}: "
                f"use --max-context {longest} or less"
            )
        self._model = model
        self.token_bytes = bytes_per_token(whole(model.cache_groups()))

    def bind(self, runner: ModelRunner) -> Proposer:
        pages, size = _pool_size(runner)
        pool = KVPool(self._model.kv_layout(pages, size), torch.device("cpu"))
        return ModelProposer(self._model, pool, runner.rows, min_rows=runner.rows.min_rows, choose=_choose(runner))

    def bind_device(self, runner: DeviceRunner) -> DeviceDraft:
        small = DeviceDecoder(self._model, runner.model.ops)
        pool = KVPool(self._model.kv_layout(*_pool_size(runner.host)), runner.device)
        runner.model.taps = ((), lambda _, step: small.states(step, pool))
        # Where the host runs a step, its forward must do the same.
        runner.model.decoder.taps = Taps((), lambda _, step: self._model.states(step, pool))
        return SmallModelDraft(lambda step: small.forward(step, pool), runner.model.ops, runner.tables)


def _embedded(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    return model.embed(tokens.to(model.embedding_VH.device)).cpu()


class _TrainedDraft:
    """A DFlash, DFlash 2 or DSpark draft of this model."""

    def __init__(self, path: str, checkpoint: Checkpoint, model: Decoder, build: BuildContext) -> None:
        try:
            config, weights = load_draft(Path(path))
            _check_target(config, model)
            self._positions = build.max_context + config.block_size
            self._network = DraftNetwork(config, self._positions)
            self._network.load_state_dict(with_table(config, weights, partial(_embedded, model)))
        except DraftFileError as error:
            raise SetupError(f"--draft: {error}") from error
        except RuntimeError as error:
            reason = str(error).replace("\n", " ")
            raise SetupError(f"--draft {path}: config.json and model.safetensors do not fit: {reason}") from error
        self._network.requires_grad_(False).eval()
        self.proposals = config.proposals
        self.taps = config.target_layer_ids
        layout = draft_layout(self._network, 1, 1)
        self.token_bytes = layout.layers * layout.bytes_per_layer
        self._model = model
        vocabulary = self._network.vocabulary
        self._head_weight: Callable[[], torch.Tensor | None] = lambda: _whole_head(checkpoint, model, build, vocabulary)
        self._dtype, self._pack = build.dtype, build.platform.pack

    def bind(self, runner: ModelRunner) -> Proposer:
        pages, size = _pool_size(runner)
        pool = KVPool(draft_layout(self._network, pages, size), torch.device("cpu"))
        choose = _choose(runner, self._network.vocabulary, SHARPNESS)
        network, head, packed = self._network, self._host_head(), None
        if network.config.kind != "dflash2":
            packed = PackedNetwork(network, int8_linear.product)
        if int8_linear.available():
            network = int8_linear.with_int8(network, layers=packed is None)
        proposer = BlockProposer(network, pool, runner.rows, self._model.embed, head, choose=choose, packed=packed)
        if runner.rank == 0:
            self._model.taps = Taps(self._network.config.target_layer_ids, proposer.extend)
        return proposer

    def _host_head(self) -> Callable[[torch.Tensor], torch.Tensor]:
        weight_VH = self._head_weight()
        if int8_linear.available() and weight_VH is not None:
            return int8_linear.int8_product(weight_VH)
        head, dtype = self._device_head(), self._dtype
        return lambda x_RH: head(x_RH.to(dtype)).float()

    def _device_head(self) -> PackedLinear:
        weight_VH = self._head_weight()
        return self._model.head if weight_VH is None else self._pack(weight_VH)

    def bind_device(self, runner: DeviceRunner) -> DeviceDraft:
        config = self._network.config
        draft = BlockDraft(
            self._network.to(runner.device, runner.kv.keys[0].dtype),
            runner.model.ops,
            draft_layout(self._network, *_pool_size(runner.host)),
            runner.tables,
            positions=self._positions,
            embed=runner.model.embed,
            head=self._device_head(),
            pack=self._pack,
        )
        layers = tuple(sorted(config.target_layer_ids))
        runner.model.taps = (layers, lambda x_RX, step: draft.extend(x_RX, step.positions_R, step.write_slots_R))

        def take(features_RX: torch.Tensor, step: StepInputs) -> None:
            draft.extend(features_RX[: step.real_rows], step.positions_R[: step.real_rows], step.write_slots)

        # Where the host runs a step, its forward must do the same.
        self._model.taps = Taps(layers, take)
        return draft


def _pool_size(runner: ModelRunner) -> tuple[int, int]:
    """Pages and their size, those of the target's own pool. Only rank 0 needs more than one page."""
    layout = runner.kv.layout
    pages = layout.pages if isinstance(layout, KVLayout) else 0
    if pages < 1:
        raise SetupError("drafts beside the model need a model with pages of keys and values: use --spec ngram")
    return (pages if runner.rank == 0 else 1), layout.page_size


def _whole_head(
    checkpoint: Checkpoint, model: Decoder, build: BuildContext, vocabulary: torch.Tensor | None
) -> torch.Tensor | None:
    """Weights of the target's head for the tokens `vocabulary`, of all ranks; None: the model's own has just those."""
    if vocabulary is None and build.communicator.shard.size == 1:
        return None
    tied = model.config.tie_word_embeddings
    weight_VH = model.embedding_VH if tied else checkpoint.tensor("lm_head.weight", build.dtype)
    # The draft moves to the model's device later than this.
    return weight_VH if vocabulary is None else weight_VH.index_select(0, vocabulary.to(weight_VH.device))


def _check_target(config: DraftConfig, model: Decoder) -> None:
    target = model.config
    facts = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "num_target_layers": (config.num_target_layers, target.num_hidden_layers),
    }
    wrong = [f"{name} {mine}, the model's is {its}" for name, (mine, its) in facts.items() if mine != its]
    if wrong:
        raise DraftFileError(f"the draft was trained for another model ({'; '.join(wrong)}): train one for this")


def _check_vocabulary(draft: Checkpoint, target: Checkpoint) -> None:
    """Raises `CheckpointError` unless a token's number means the same in both."""
    sizes = draft.config.get("vocab_size"), target.config.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{draft.name} has {sizes[0]} tokens and {target.name} {sizes[1]}: a draft model needs the same "
            "vocabulary; choose a smaller model of the same family"
        )
    if _tokens(draft) != _tokens(target):
        raise CheckpointError(
            f"the tokenizers of {draft.name} and {target.name} differ: a draft model needs the same vocabulary; "
            "choose a smaller model of the same family"
        )


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    try:
        data = json.loads((checkpoint.folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = {entry["content"]: int(entry["id"]) for entry in data.get("added_tokens") or []}
        return {**{str(token): int(n) for token, n in data["model"]["vocab"].items()}, **added}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.name}: tokenizer.json holds no table of tokens ({error})") from None
