"""A small engine: dense Llama-family models on paged KV, written to be read. What `StepInputs` means is defined here.

Covers Llama, Qwen2 (biases on q, k, v) and Qwen3 (RMS norm of each query and key head), tied or untied heads.

Shape suffixes: R rows, D model width, H query heads, K key/value heads, E head dimension, S slots, T entries attended
to, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lowlat_plugin.agreement import Agreement, Alone
from lowlat_plugin.conformance.case import Case
from lowlat_plugin.facts import EngineFacts, deadline_for
from lowlat_plugin.kernel import BuildContext, Workspace
from lowlat_plugin.spec import KernelSpec
from lowlat_plugin.steps import Binding, KVLayout, LayerKV, StepInputs, StepOutputs
from lowlat_plugin.version import FEATURES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FEATURES_OFFERED = frozenset(FEATURES) - {"coverage.layers", "shadow.forced", "graphs"}


class ReferenceHost:
    """One rank of the reference engine. Implements `lowlat_plugin.Host`."""

    def __init__(self, case: Case, agreement: Agreement | None = None, pages: int = 96) -> None:
        import torch

        self.case = case
        self.agreement = agreement or Alone()
        self.device = case.device
        config = case.config
        self.vocab_size: int = config["vocab_size"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.pages = pages
        self.generation = 0
        self.facts = self._facts()
        self.reallocate()

    def _facts(self) -> EngineFacts:
        case = self.case
        features = FEATURES_OFFERED | ({"graphs"} if case.device.startswith("cuda") else set())
        capabilities = {"speculative.verify": 1} if case.tokens_per_request > 1 else {}
        return EngineFacts(
            architecture=case.config["architectures"][0],
            config=case.config,
            vendor=case.spec.vendor,
            isa=case.isa,
            dtype=case.dtype,
            weight_formats=case.weight_formats,
            kv_dtype=case.dtype,
            page_size=case.page_size,
            resident_blocks=case.resident_blocks,
            shared_memory=case.shared_memory,
            capabilities=capabilities,
            settings=case.settings,
            features=frozenset(features),
            watchdog_s=2 * case.deadline_s,
        )

    # -- the host's side of the contract -----------------------------------------------------------------------------

    def reallocate(self) -> None:
        """New pools at new addresses; what the old ones held is gone."""
        import torch

        shape = (self.pages * self.case.page_size, self.kv_heads, self.head_dim)
        layers = self.case.config["num_hidden_layers"]
        new = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2 * layers)]
        self.layers = tuple(LayerKV(new[2 * i], new[2 * i + 1]) for i in range(layers))
        self.generation += 1

    def layout(self, slots: int) -> KVLayout:
        width = self.kv_heads * self.head_dim
        return KVLayout(
            self.kv_heads, self.head_dim, self.case.page_size, self.case.dtype, width, self.head_dim, slots=slots
        )

    def context(self, spec: KernelSpec, workspace: Workspace) -> BuildContext:
        limits = spec.limits(self.case.isa)
        return BuildContext(
            facts=self.facts,
            limits_widths=limits.widths if limits else frozenset(),
            layout=self.layout(slots=0),
            device=self.device,
            rank=self.agreement.rank,
            world_size=self.facts.tensor_parallel,
            deadline_s=deadline_for(self.facts.watchdog_s),
            weights=self,
            workspace=workspace,
            checkpoint=self.case.checkpoint,
            max_requests=max(limits.widths, default=1) if limits else 1,
            tokens_per_request=self.case.tokens_per_request,
        )

    def names(self) -> Iterable[str]:
        return self.case.weights.keys()

    def get(self, name: str) -> Tensor:
        return self.case.weights[name]

    def binding(self) -> Binding:
        return Binding(self.generation, self.layout(self.pages * self.case.page_size), self.layers)

    def scratch_pages(self) -> Sequence[int]:
        return range(self.pages)

    def memory_bytes(self) -> int | None:
        import torch

        if self.device.startswith("cuda"):
            return torch.cuda.memory_allocated(self.device)
        return resident_bytes()

    def synchronize(self) -> None:
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    # -- the general path --------------------------------------------------------------------------------------------

    def general(self, step: StepInputs, forced: Mapping[str, Tensor] | None = None) -> StepOutputs:
        """The model's own forward for a step of any mode: writes keys and values, returns logits of every row."""
        import torch

        weights, config = self.case.weights, self.case.config
        with torch.inference_mode():
            x_RD = weights["model.embed_tokens.weight"][step.token_ids_R].to(self.dtype)
            for index, layer in enumerate(self.layers):
                prefix = f"model.layers.{index}."
                h_RD = self._norm(x_RD, prefix + "input_layernorm.weight")
                x_RD = x_RD + self._attention(h_RD, prefix + "self_attn.", layer, step)
                h_RD = self._norm(x_RD, prefix + "post_attention_layernorm.weight")
                gate = torch.nn.functional.silu(self._linear(h_RD, prefix + "mlp.gate_proj"))
                x_RD = x_RD + self._linear(gate * self._linear(h_RD, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")
            x_RD = self._norm(x_RD, "model.norm.weight")
            tied = config.get("tie_word_embeddings", False)
            head_VD = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
            return StepOutputs((x_RD @ head_VD.to(self.dtype).T).float())

    def _linear(self, x_RD: Tensor, name: str) -> Tensor:
        y: Tensor = x_RD @ self.case.weights[name + ".weight"].to(self.dtype).T
        bias = self.case.weights.get(name + ".bias")
        return y if bias is None else y + bias.to(self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale: Tensor = (wide.square().mean(-1, keepdim=True) + self.case.config["rms_norm_eps"]).rsqrt()
        normed: Tensor = (wide * scale).to(self.dtype) * self.case.weights[name].to(self.dtype)
        return normed

    def _attention(self, h_RD: Tensor, prefix: str, layer: LayerKV, step: StepInputs) -> Tensor:
        import torch

        rows = h_RD.shape[0]
        q_RHE = self._linear(h_RD, prefix + "q_proj").view(rows, self.heads, self.head_dim)
        k_RKE = self._linear(h_RD, prefix + "k_proj").view(rows, self.kv_heads, self.head_dim)
        v_RKE = self._linear(h_RD, prefix + "v_proj").view(rows, self.kv_heads, self.head_dim)
        if prefix + "q_norm.weight" in self.case.weights:
            q_RHE, k_RKE = self._norm(q_RHE, prefix + "q_norm.weight"), self._norm(k_RKE, prefix + "k_norm.weight")
        q_RHE, k_RKE = self._rope(q_RHE, step.positions_R), self._rope(k_RKE, step.positions_R)
        real = step.write_slots_R >= 0
        layer.k_SHD[step.write_slots_R[real]] = k_RKE[real].to(layer.k_SHD.dtype)
        layer.v_SHD[step.write_slots_R[real]] = v_RKE[real].to(layer.v_SHD.dtype)
        out_RHE = torch.zeros_like(q_RHE)
        starts = step.query_start_Q1.tolist()
        for request, length in enumerate(step.lengths_Q.tolist()):
            if length:
                part = slice(starts[request], starts[request + 1])
                entries_T = self._entries(step.page_table_QP[request], length)
                out_RHE[part] = self._attend(q_RHE[part], step.positions_R[part], layer, entries_T)
        return self._linear(out_RHE.reshape(rows, -1), prefix + "o_proj")

    def _entries(self, table_P: Tensor, length: int) -> Tensor:
        """Slots of positions 0 to length - 1."""
        import torch

        positions = torch.arange(length, device=table_P.device)
        size = self.case.page_size
        return table_P.long()[positions // size] * size + positions % size

    def _attend(self, q_RHE: Tensor, positions_R: Tensor, layer: LayerKV, entries_T: Tensor) -> Tensor:
        import torch

        repeat = self.heads // self.kv_heads
        k_THE = layer.k_SHD[entries_T].to(q_RHE.dtype).repeat_interleave(repeat, dim=1)
        v_THE = layer.v_SHD[entries_T].to(q_RHE.dtype).repeat_interleave(repeat, dim=1)
        scores_HRT = torch.einsum("rhe,the->hrt", q_RHE, k_THE).float() * self.head_dim**-0.5
        later = torch.arange(len(entries_T), device=positions_R.device)[None, :] > positions_R[:, None]
        weights_HRT = scores_HRT.masked_fill(later, float("-inf")).softmax(-1).to(q_RHE.dtype)
        return torch.einsum("hrt,the->rhe", weights_HRT, v_THE)

    def _rope(self, x_RHE: Tensor, positions_R: Tensor) -> Tensor:
        """Rotate the two halves of each head against one another, at base^(-2i/E) radians a position."""
        import torch

        half = self.head_dim // 2
        theta: float = self.case.config.get("rope_theta", 10000.0)
        steps = torch.arange(half, dtype=torch.float64, device=x_RHE.device)
        angles_RE = positions_R.double()[:, None] * theta ** (-steps / half)
        cos, sin = angles_RE.cos().float()[:, None], angles_RE.sin().float()[:, None]
        a, b = x_RHE[..., :half].float(), x_RHE[..., half:].float()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_RHE.dtype)


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM, or None off Linux."""
    import resource
    from pathlib import Path

    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return None
