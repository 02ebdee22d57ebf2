"""Names of what an engine may be doing around a step. A host reports those in use; a library lists those it accepts.

This is an allow-list: a name that a library has not listed refuses it, so a capability added tomorrow refuses every
library of today until its author has looked at it. A capability's version grows when what it asks of kernels changes.
"""

from __future__ import annotations

CAPABILITIES: dict[str, str] = {
    "attention.data-parallel": "attention runs on different requests on each rank",
    "compile": "the general forward is compiled",
    "context-parallel": "one request's context is spread over ranks",
    "cpu-offload": "weights live in host memory",
    "deterministic": "results must repeat bit for bit at every batch size",
    "disaggregation": "prefill and decode run in different engines and hand KV over",
    "elastic-ranks": "ranks may leave and join while serving",
    "expert-parallel": "experts are spread over ranks",
    "expert-rebalancing": "experts move between ranks while serving",
    "grammar": "logits are masked between forward and sampling",
    "hidden-states": "hidden states of the step are returned to the client or to a draft model",
    "hidden-states.taps": "a step hands over states after chosen layers beside its logits, for a draft model",
    "kv-offload": "KV pages leave the device and come back",
    "kv-quantised": "keys and values are stored in fewer bits than the activations",
    "layer-hooks": "forward hooks, tracing or tensor dumps on inner modules",
    "lora": "adapters change weights per request",
    "memory-release": "device memory is given back while idle",
    "multi-node": "tensor-parallel ranks on several machines",
    "multimodal": "embeddings of images or sound replace token embeddings",
    "overlap-batches": "two batches are in flight on one device",
    "pipeline-parallel": "layers are spread over ranks",
    "routed-experts": "the chosen experts of each token are returned",
    "sentinel-weights": "kernels are installed before the real weights arrive",
    "speculative.ragged": "requests of one verify step have different numbers of rows",
    "speculative.verify": "several rows of a request are verified in one step",
    "weight-update": "weights are updated while serving",
}
