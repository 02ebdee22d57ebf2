"""From a configuration to a proposer: what `--spec` means, what it needs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lowlat.engine.config import EngineConfig
from lowlat.engine.config_checks import MOST_WIDTH
from lowlat.engine.device_runner import DeviceRunner
from lowlat.engine.device_speculation import DeviceSpeculation
from lowlat.engine.device_state import to_device
from lowlat.engine.drafts import Draft
from lowlat.engine.runner import ModelRunner
from lowlat.engine.setup_error import SetupError
from lowlat.engine.speculation import Speculation
from lowlat.models.base import DraftingModel, Model
from lowlat.parallel.group import Communicator
from lowlat.speculative.device_draft import DeviceDraft
from lowlat.speculative.device_ngram import NgramDraft
from lowlat.speculative.draft_files import ARCHITECTURES, shipped_draft
from lowlat.speculative.ngram import NgramProposer
from lowlat.speculative.own_draft import OwnDraft
from lowlat.speculative.proposer import Proposer
from lowlat.speculative.step_times import StepTimes, rows_to_measure

_AUTO_WIDTH = 8
_MOST_MEASURED = 64


def spec_width(config: EngineConfig, model: Model, draft: Draft | None) -> int:
    """Most rows that a request may have in a decode step. Raises `SetupError`."""
    if config.spec == "off":
        return 1
    most = MOST_WIDTH
    if config.spec == "draft":
        block = model.draft_block if isinstance(model, DraftingModel) else 0
        if not block:
            shipped = [
                f"{kind} (its draft comes with lowlat)" for kind in ARCHITECTURES if shipped_draft(config.model, kind)
            ]
            instead = ", ".join([*shipped, "ngram", "off"])
            raise SetupError(
                f"--spec draft: {config.model} has no draft in its checkpoint; use --spec {instead}, or one that takes "
                "--draft"
            )
        most = min(most, 1 + block)
    elif draft is not None:
        most = min(most, 1 + draft.proposals)
    width = min(config.spec_width or _AUTO_WIDTH, most)
    simulated = config.spec_simulate_acceptance
    if simulated is not None and not 1 <= simulated <= width:
        wider = f", or a --spec-width of up to {most}" if width < most else ""
        raise SetupError(
            f"--spec-simulate-acceptance {simulated:g}: a step of {width} rows brings 1 to {width} tokens; "
            f"choose a number between{wider}"
        )
    return width


def make_speculation(
    config: EngineConfig,
    runner: ModelRunner,
    communicator: Communicator,
    width: int,
    draft: Draft | None,
    progress: Callable[[int, int, str], None],
) -> Speculation:
    """The proposer of `config`, and the table of step times; all ranks measure together."""
    proposer: Proposer = NgramProposer()
    if draft is not None:
        proposer = draft.bind(runner)
    if config.spec == "draft":
        model, kv = runner.model, runner.kv
        assert isinstance(model, DraftingModel)
        proposer = OwnDraft(lambda requests: model.propose(requests, kv))
    adaptive = config.spec_width is None and config.spec_simulate_acceptance is None
    speculation = Speculation(
        proposer,
        communicator,
        width=width,
        adaptive=adaptive,
        simulated=config.spec_simulate_acceptance,
        first=NgramProposer() if config.spec in ARCHITECTURES else None,
    )
    speculation.times = measure_steps(runner, config.max_batch, width, progress)
    return speculation


def make_device_speculation(config: EngineConfig, runner: DeviceRunner, width: int, draft: Draft | None) -> None:
    """Let a device's steps check guesses of the configuration's proposer."""
    runner.speculate(
        DeviceSpeculation(
            width=width,
            adaptive=config.spec_width is None and config.spec_simulate_acceptance is None,
            draft=_device_draft(config, runner, draft),
            simulated=config.spec_simulate_acceptance,
        )
    )


def _device_draft(config: EngineConfig, runner: DeviceRunner, draft: Draft | None) -> DeviceDraft:
    bound = None if draft is None else draft.bind_device(runner)
    if bound is not None and config.spec not in ARCHITECTURES:
        return bound

    def send(tokens: Sequence[int]) -> torch.Tensor:
        return to_device(tokens, torch.int32, runner.device)

    return NgramDraft(runner.model.ops, runner.tables, runner.max_pages * runner.kv.layout.page_size, send, bound)


def measure_steps(
    runner: ModelRunner, max_batch: int, width: int, progress: Callable[[int, int, str], None]
) -> StepTimes | None:
    """Times of decode steps of this model on this machine; None where the pool is too small to try."""
    room = runner.max_pages * runner.kv.layout.page_size - 1
    if room < width:
        return None
    counts = rows_to_measure(width, min(max_batch * width, max(_MOST_MEASURED, width)))
    seconds: dict[int, float] = {}
    # The most rows first: their pages serve all.
    for done, rows in enumerate(reversed(counts)):
        progress(done, len(counts), "measuring steps")
        measured = StepTimes.measure(lambda count: runner.time_rows(count, width, fill=not seconds), [rows])
        seconds.update(measured.table())
    return StepTimes(seconds)
