"""What an arm is, and how arms are found by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from lowlat.bench.presets import DenseShape, FolderShape
from lowlat.bench.results import known_arm, library_arm


class ArmUnavailableError(RuntimeError):
    """An arm that cannot run here; the text says why and what would help."""


class StepCase(msgspec.Struct, frozen=True, kw_only=True):
    """One step to measure: `requests` requests of one row each, every one with `context` tokens in the cache."""

    shape: DenseShape | FolderShape
    requests: int = 1
    context: int = 1024
    dtype: str = "bfloat16"
    device: str = "cpu"
    seed: int = 0
    model: str | None = None
    """A folder with real weights (or `smollm2`); None: random weights of the shape."""
    steps: int = 5
    """Steps timed by each call of an arm's `measure`."""
    spec: str = "off"
    """As `lowlat serve --spec`: tokens are guessed, a step checks them all, and one counts as right, whatever is."""
    draft: str | None = None
    """As `lowlat serve --draft`."""

    @property
    def dense(self) -> DenseShape:
        """The shape, for arms that write the step themselves. Raises ArmUnavailableError for other models."""
        if not isinstance(self.shape, DenseShape):
            raise ArmUnavailableError(f"only lowlat's own runner computes {self.shape.name}")
        return self.shape


class StepArm(Protocol):
    """A way to compute the step. Built once, measured in alternation with others, then closed."""

    note: str
    weight_bytes: int | None
    """Bytes of weights that a step reads, where they are not those of the case's dtype."""

    def measure(self) -> list[float]:
        """Microseconds of `case.steps` steps, each timed alone."""

    def close(self) -> None:
        """Free what it holds."""


def _torch_eager(case: StepCase) -> StepArm:
    from lowlat.bench.arms.torch_step import TorchArm

    return TorchArm(case, compiled=False)


def _torch_compile(case: StepCase) -> StepArm:
    from lowlat.bench.arms.torch_step import TorchArm

    return TorchArm(case, compiled=True)


def _transformers(case: StepCase) -> StepArm:
    from lowlat.bench.arms.transformers_arm import TransformersArm

    return TransformersArm(case)


def _general(case: StepCase) -> StepArm:
    from lowlat.bench.arms.general import GeneralArm

    return GeneralArm(case)


def _vllm(case: StepCase) -> StepArm:
    from lowlat.bench.arms.peers import VllmArm

    return VllmArm(case)


def _sglang(case: StepCase) -> StepArm:
    from lowlat.bench.arms.peers import SglangArm

    return SglangArm(case)


BUILDERS: Mapping[str, Callable[[StepCase], StepArm]] = {
    "general": _general,
    "torch-eager-graph": _torch_eager,
    "torch-compile": _torch_compile,
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}

_PACKAGES = {"transformers": "transformers", "vllm": "vllm", "sglang": "sglang"}


def importable(name: str) -> bool:
    """Whether the package that an arm needs is installed; arms of this project always are."""
    package = _PACKAGES.get(name)
    return package is None or importlib.util.find_spec(package) is not None


def kernel_library(arm: str) -> str | None:
    """Name of the kernel library that an arm stands for: `lowlat-NAME` is its own, `plugin:NAME` means NAME."""
    if arm.startswith("plugin:"):
        return arm.removeprefix("plugin:")
    return arm if arm.startswith("lowlat-") else None


def check_library_arm(name: str, library: str) -> None:
    """Raise ValueError where results would refuse an arm of a kernel library, before anything is measured."""
    if not known_arm(name):
        wanted = library_arm(library)
        cure = f"write {wanted}" if known_arm(wanted) else "a library is named in lower case"
        raise ValueError(f"results know no arm {name!r}: {cure}")


def check_arm(name: str) -> None:
    """Raise ValueError for a name that is no arm, so that a misspelt one is told before anything is measured."""
    library = kernel_library(name)
    if name != "read-floor" and name not in BUILDERS and library is None:
        known = ", ".join(["read-floor", *BUILDERS])
        raise ValueError(f"{name!r} is no arm; known: {known}, and kernel libraries as lowlat-NAME or plugin:NAME")
    if library is not None:
        check_library_arm(name, library)


def check_model(folder: str) -> None:
    """Raise ValueError where a folder (or `smollm2`) holds no model that lowlat opens."""
    from lowlat.models.loading.checkpoint import open_checkpoint
    from lowlat.models.loading.errors import CheckpointError

    try:
        open_checkpoint(folder)
    except CheckpointError as error:
        raise ValueError(f"--model-folder: {error}") from error


def build_arm(name: str, case: StepCase) -> StepArm:
    """Build an arm. Raises ArmUnavailableError naming the reason, and ValueError for a name that is no arm."""
    check_arm(name)
    library = kernel_library(name)
    if library is not None:
        from lowlat.bench.arms.general import GeneralArm

        return GeneralArm(case, kernels=library)
    if not importable(name):
        raise ArmUnavailableError(f"{_PACKAGES[name]} is not installed")
    return BUILDERS[name](case)
