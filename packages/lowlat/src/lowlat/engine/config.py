"""Settings of an engine: what a user may choose, with the defaults of this project."""

from __future__ import annotations

import msgspec

SIMULATED = "acceptance is simulated: the text means nothing"
"""What is said beside every answer with `spec_simulate_acceptance`."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All choices that shape an engine; one value of it describes a server completely.

    Sizes are in tokens. `None` means: chosen from the model, the device and its memory when the engine is built.
    """

    model: str = "smollm2"
    dtype: str = "auto"
    """`auto`, `float32` or `bfloat16`. `auto` is float32 on a CPU and bfloat16 on a GPU."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`."""
    tensor_parallel: int = 1
    threads: int | None = None
    """CPU threads of each rank; None: the machine's cores but one, over the ranks."""
    max_batch: int = 16
    """Requests that may run at the same time."""
    max_context: int | None = None
    """Longest prompt + answer; None: the model's own limit."""
    chunk_tokens: int = 512
    """Most prompt tokens computed in one step (prefill chunk)."""
    page_size: int = 16
    kv_tokens: int | None = None
    """Tokens that the KV pool can hold; None: from memory."""
    prefix_cache: bool = True
    session_budget: float = 0.5
    """Part of the KV pool's pages that sessions may pin; 0: session ids change nothing."""
    session_ttl: float = 300.0
    """Seconds that a session's pin stays after its last request, where the request does not say."""
    session_ttl_max: float = 3600.0
    """Most seconds that a request may ask for."""
    run_ahead: int = 1
    """Steps launched before the result of an earlier one is read (0: none)."""
    replay_tail: int = 0
    """Rows at the end of each prefill chunk that run through all layers (DeepSeek-V4.1); the others stop where the last
    compressed cache is written, which halves a prefill. An approximation; 0: off, exact."""
    replay_prefix: int = 0
    """Cached tokens that run again where a cached prefix has no state of its own (DeepSeek-V4.1), so that it can be
    used nevertheless. An approximation; 0: off, exact."""
    engram_placement: str = "auto"
    """Where Engram tables (DeepSeek-V4.1) lie. `shards`: each rank holds its columns, an all-reduce joins them; `peer`:
    each rank maps all ranks' columns; `host`: one copy for the node, the checkpoint's own file mapped; `auto`: `shards`
    where a rank's columns fit into memory beside its weights, else `host`."""
    spec: str = "off"
    """`off`; `ngram`: guess tokens that followed the same words before; `draft`: ask the model's own draft (DSpark);
    `draft-model`: ask a small model; `dflash`, `dflash2`, `dspark`: ask a draft that was trained for the model. Several
    guesses are checked in one step."""
    draft: str | None = None
    """The small model, or the folder of the trained draft."""
    spec_width: int | None = None
    """Rows of a request in a speculative step: one, and the guesses. None: as many as make tokens come fastest, at most
    8, by measured times of steps and measured acceptance."""
    spec_simulate_acceptance: float | None = None
    """For benchmarks: so many tokens a step count as right, whatever is; answers mean nothing then."""
    grammar_seconds: float = 5.0
    """Processor time in which a grammar must compile."""
    grammar_memory_mib: int = 512
    """Memory that a grammar's process may take."""
    grammar_bytes: int = 65536
    """Longest text of a grammar, such as a JSON schema."""
    grammar_depth: int = 64
    """Most brackets inside brackets in a grammar."""
    seed: int | None = None
    """Seeds of requests that bring none are drawn from this one; None: from a new one at every start."""
    low_latency: str = "auto"
    """`off`, `auto` or `require`: whether a kernel library may replace decode steps."""
    kernels: str | None = None
    """Name of the kernel library to use; named ones are required."""
    watchdog_s: float = 60.0
    """Seconds without progress after which the engine counts as hung."""
