"""A loaded SGLang model on one rank, as the contract sees it: weights by name, ranks, and the two-phase build."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lowlat_plugin import guard
from lowlat_plugin.agreement import digest, settle
from lowlat_plugin.facts import EngineFacts
from lowlat_plugin.hosts.sglang_facts import model_facts, page_size_for
from lowlat_plugin.kernel import BuildContext, Kernel, Plan, Workspace
from lowlat_plugin.reasons import Reason, Refused
from lowlat_plugin.registry import Candidate, implementation
from lowlat_plugin.steps import KVLayout

if TYPE_CHECKING:
    from torch import Tensor

_KERNEL = "_lowlat_kernel"


class Ranks:
    """The contract's all-gather over SGLang's tensor-parallel CPU group."""

    def __init__(self) -> None:
        from sglang.srt.kernel_plugins.nvidia import binding

        self._group = binding.get_parallel().tp_group
        self.size = int(self._group.world_size)
        self.rank = int(getattr(self._group, "rank_in_group", 0))

    def all_gather(self, payload: bytes) -> list[bytes]:
        import torch.distributed as dist

        gathered: list[Any] = [b""] * self.size
        dist.all_gather_object(gathered, payload, group=self._group.cpu_group)
        return gathered


class FusedWeights:
    """This rank's weights under Hugging Face names: SGLang's fused matrices are cut back into their parts.

    `qkv_proj` holds q, k and v below one another, `gate_up_proj` gate and up; both are views, not copies.
    """

    def __init__(self, model: Any, layout: KVLayout) -> None:
        self._kv_rows = layout.kv_heads * layout.head_dim
        self._tensors: dict[str, Tensor] = {}
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            self._add(name, parameter.data)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        return self._tensors[name]

    def _add(self, name: str, tensor: Tensor) -> None:
        import torch

        if ".qkv_proj." in name:
            sizes = [tensor.shape[0] - 2 * self._kv_rows, self._kv_rows, self._kv_rows]
            rows = torch.split(tensor, sizes)
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), rows, strict=True))
            fused = "qkv_proj"
        elif ".gate_up_proj." in name:
            parts = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True))
            fused = "gate_up_proj"
        else:
            parts, fused = {name: tensor}, name
        for part, piece in parts.items():
            self._tensors[name.replace(fused, part)] = piece


def kernel_of(candidate: Candidate, model: Any) -> Kernel:
    """The one kernel object of a model; it rides on the model outside of its modules."""
    kernel = model.__dict__.get(_KERNEL)
    if kernel is None:
        kernel = model.__dict__[_KERNEL] = implementation(candidate.spec)
    assert isinstance(kernel, Kernel)
    return kernel


def observe(candidate: Candidate, copies: dict[Any, Any], model: Any, name: str, tensor: Tensor) -> None:
    """SGLang's load hook: show a checkpoint's tensor to the kernels."""
    kernel_of(candidate, model).observe_weight(name, tensor)


def model_reasons(candidate: Candidate, model: Any, hf_config: Any) -> list[Reason]:
    """The whole guard again on the loaded model, which is all that SGLang asks of a draft model."""
    context = model_context(candidate, model, hf_config, deadline_s=60.0, tokens=1)
    reasons = guard.check(candidate.spec, context.facts)
    return reasons or guard.check_model(kernel_of(candidate, model), context)


def model_context(candidate: Candidate, model: Any, hf_config: Any, deadline_s: float, tokens: int) -> BuildContext:
    ranks, first = Ranks(), next(model.parameters())
    dtype = str(first.dtype).removeprefix("torch.")
    facts = _facts(candidate, hf_config, ranks.size, dtype, deadline_s)
    heads = int(getattr(hf_config, "num_attention_heads", 1))
    kv_heads = max(1, int(getattr(hf_config, "num_key_value_heads", None) or heads) // ranks.size)
    head_dim = int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads)
    layout = KVLayout(kv_heads, head_dim, facts.page_size, facts.kv_dtype, kv_heads * head_dim, head_dim)
    limits = candidate.spec.limits(facts.isa)
    return BuildContext(
        facts=facts,
        limits_widths=limits.widths if limits else frozenset(),
        layout=layout,
        device=str(first.device),
        rank=ranks.rank,
        world_size=ranks.size,
        deadline_s=deadline_s,
        weights=FusedWeights(model, layout),
        workspace=Workspace(str(first.device)),
        max_requests=max(limits.widths) if limits and limits.widths else 0,
        tokens_per_request=tokens,
        weights_whole=ranks.size == 1,
        model=model,
    )


def _facts(candidate: Candidate, hf_config: Any, size: int, dtype: str, deadline_s: float) -> EngineFacts:
    from sglang.srt.kernel_plugins.nvidia import binding

    requires = candidate.spec.requires
    return model_facts(
        candidate.spec,
        hf_config,
        isa=binding.device_isa() or "none",
        tensor_parallel=size,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=page_size_for(candidate.spec, max(requires.page_sizes or {1})),
        # Formats and settings were checked on the server's arguments; here they are as the spec wants them.
        weight_formats=requires.weight_formats or frozenset({"plain"}),
        settings={name: c.one_of[0] if c.one_of else None for name, c in requires.settings.items()},
        watchdog_s=2 * deadline_s,
    )


def build_kernel(candidate: Candidate, model: Any, hf_config: Any, sglang: Any) -> tuple[Kernel, Plan, EngineFacts]:
    """Probe, agree, build, agree. Raises Refused on every rank if any rank cannot."""
    ranks, name = Ranks(), candidate.key
    tokens = int(getattr(sglang, "tokens_per_request", 1))
    kernel = kernel_of(candidate, model)
    context = settle(
        ranks, name, "context", lambda: model_context(candidate, model, hf_config, sglang.deadline_s, tokens)
    )

    def probe() -> Plan:
        plan = kernel.probe(context)
        faults = guard.check_plan(candidate.spec, plan, context)
        if faults:
            raise Refused(name, faults)
        return plan

    plan = settle(ranks, name, "probe", probe, lambda found: digest(found.identity()))

    def build() -> None:
        try:
            kernel.build(context)
        finally:
            context.workspace.close()

    settle(ranks, name, "build", build)
    return kernel, plan, context.facts
