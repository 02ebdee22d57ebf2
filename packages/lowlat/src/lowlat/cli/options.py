"""Options that commands share: one for each field of EngineConfig, and those of sampling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import typer

from lowlat.engine.config import EngineConfig
from lowlat.engine.request import SamplingParams

_DEFAULTS = EngineConfig()
_MODEL, _COMPUTE, _MEMORY, _KERNELS = "Model", "Compute", "Memory and batching", "Low-latency kernels"
_GRAMMARS = "Answers that follow a grammar (JSON schemas, regular expressions)"


def _option(*flags: str, panel: str, help: str, **limits: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, help=help, **limits)


def _width(text: str) -> int | None:
    if text == "auto":
        return None
    if text.isdecimal() and 2 <= int(text) <= 16:
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither auto nor a number from 2 to 16")


ENGINE_OPTIONS: dict[str, Any] = {
    "model": Annotated[
        str,
        _option(
            "--model",
            "-m",
            panel=_MODEL,
            help="An embedded model (smollm2), a Hugging Face style folder, or a .gguf file. See: lowlat models",
        ),
    ],
    "dtype": Annotated[
        Literal["auto", "float32", "bfloat16"],
        _option("--dtype", panel=_MODEL, help="Number format; auto: float32 on a CPU, bfloat16 on a GPU."),
    ],
    "device": Annotated[
        Literal["auto", "cpu", "cuda"],
        _option(
            "--device",
            panel=_COMPUTE,
            help="Where to run. auto: an NVIDIA GPU where there is one, otherwise the CPU.",
        ),
    ],
    "tensor_parallel": Annotated[
        int, _option("--tensor-parallel", "--tp", panel=_COMPUTE, min=1, help="Ranks that share every layer.")
    ],
    "threads": Annotated[
        int | None,
        _option("--threads", panel=_COMPUTE, min=1, help="CPU threads of each rank; default: cores / ranks."),
    ],
    "max_batch": Annotated[
        int, _option("--max-batch", panel=_MEMORY, min=1, help="Requests that may run at the same time.")
    ],
    "max_context": Annotated[
        int | None,
        _option("--max-context", panel=_MEMORY, min=2, help="Longest prompt + answer; default: the model's limit."),
    ],
    "chunk_tokens": Annotated[
        int, _option("--chunk-tokens", panel=_MEMORY, min=1, help="Most prompt tokens computed in one step.")
    ],
    "page_size": Annotated[
        int, _option("--page-size", panel=_MEMORY, min=1, help="Tokens of one page of the KV cache.")
    ],
    "kv_tokens": Annotated[
        int | None, _option("--kv-tokens", panel=_MEMORY, min=2, help="Size of the KV cache; default: from memory.")
    ],
    "prefix_cache": Annotated[
        bool, _option("--prefix-cache/--no-prefix-cache", panel=_MEMORY, help="Reuse the cache of shared prefixes.")
    ],
    "session_budget": Annotated[
        float,
        _option(
            "--session-budget",
            panel=_MEMORY,
            min=0,
            max=1,
            help="Part of the KV cache that sessions (session_id) may pin while their agents wait for tools; 0: none.",
        ),
    ],
    "session_ttl": Annotated[
        float,
        _option(
            "--session-ttl", panel=_MEMORY, min=0.001, help="Seconds that a session's pin stays after its last request."
        ),
    ],
    "session_ttl_max": Annotated[
        float,
        _option("--session-ttl-max", panel=_MEMORY, min=0.001, help="Most seconds that a request may ask for."),
    ],
    "run_ahead": Annotated[
        int,
        _option(
            "--run-ahead", panel=_COMPUTE, min=0, help="Steps launched before the result of an earlier one is read."
        ),
    ],
    "replay_tail": Annotated[
        int,
        _option(
            "--replay-tail",
            panel=_COMPUTE,
            min=0,
            help="DeepSeek-V4.1: only so many last rows of a prefill chunk run through the decoder half, which halves "
            "a prefill. Changes answers a little; for prompt log-probabilities all rows run. 0: off, exact.",
        ),
    ],
    "replay_prefix": Annotated[
        int,
        _option(
            "--replay-prefix",
            panel=_COMPUTE,
            min=0,
            help="DeepSeek-V4.1: run so many cached tokens again where a prefix is cached but its state is not, "
            "instead of computing all of it. Changes answers a little. 0: off, exact.",
        ),
    ],
    "engram_placement": Annotated[
        Literal["auto", "shards", "peer", "host"],
        _option(
            "--engram-placement",
            panel=_MEMORY,
            help="Where Engram tables (DeepSeek-V4.1) lie: shards, each rank its columns, joined by an all-reduce; "
            "peer, each rank maps all ranks' columns; host, one copy for the node, mapped from the checkpoint; "
            "auto: shards where they fit into memory, else host. Answers stay the same.",
        ),
    ],
    "spec": Annotated[
        Literal["off", "ngram", "draft", "draft-model", "dflash", "dflash2", "dspark"],
        _option(
            "--spec",
            panel=_COMPUTE,
            help="Guess tokens: ngram, as they followed the same words before; draft, by the model's own draft; "
            "draft-model, by a small model; dflash, dflash2 or dspark, by a draft trained for the model. "
            "Answers stay the same.",
        ),
    ],
    "draft": Annotated[
        str | None,
        _option(
            "--draft",
            panel=_COMPUTE,
            help="For --spec draft-model: a model of the same vocabulary. For the trained drafts: a folder that "
            "lowlat train-draft wrote; smollm2 has a dspark draft of its own.",
        ),
    ],
    "spec_width": Annotated[
        int | None,
        _option(
            "--spec-width",
            panel=_COMPUTE,
            parser=_width,
            metavar="auto|2-16",
            help="Rows of a request in such a step; auto: as many as make tokens come fastest, at most 8.",
        ),
    ],
    "spec_simulate_acceptance": Annotated[
        float | None,
        _option(
            "--spec-simulate-acceptance",
            panel=_COMPUTE,
            min=1,
            max=16,
            help="For benchmarks: so many tokens a step count as right, whatever is. Answers mean nothing then.",
        ),
    ],
    "grammar_seconds": Annotated[
        float,
        _option("--grammar-seconds", panel=_GRAMMARS, min=0.01, help="Processor time in which a grammar must compile."),
    ],
    "grammar_memory_mib": Annotated[
        int, _option("--grammar-memory-mib", panel=_GRAMMARS, min=16, help="Memory that one grammar may take.")
    ],
    "grammar_bytes": Annotated[
        int, _option("--grammar-bytes", panel=_GRAMMARS, min=1, help="Longest text of a grammar or schema.")
    ],
    "grammar_depth": Annotated[
        int, _option("--grammar-depth", panel=_GRAMMARS, min=1, help="Most brackets inside brackets in it.")
    ],
    "seed": Annotated[
        int | None,
        _option(
            "--engine-seed",
            panel=_COMPUTE,
            help="Seeds of requests that bring none are drawn from this one; default: a new one at every start.",
        ),
    ],
    "low_latency": Annotated[
        Literal["off", "auto", "require"],
        _option("--low-latency", panel=_KERNELS, help="Whether a kernel library may replace decode steps."),
    ],
    "kernels": Annotated[
        str | None, _option("--kernels", panel=_KERNELS, help="Kernel library by name; a named one must start.")
    ],
    "watchdog_s": Annotated[
        float,
        _option(
            "--watchdog-seconds", panel=_COMPUTE, min=1, help="Without progress for so long, an engine counts as hung."
        ),
    ],
}
"""By field of EngineConfig; a test holds that none is missing."""


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command that takes `config: EngineConfig`, with one option for each of its fields."""
    defaults = {name: getattr(_DEFAULTS, name) for name in ENGINE_OPTIONS}
    return _spread(command, "config", ENGINE_OPTIONS, defaults, EngineConfig)


_SAMPLING = "Sampling"

SAMPLING_OPTIONS: dict[str, Any] = {
    "max_tokens": Annotated[
        int, _option("--max-tokens", "-n", panel=_SAMPLING, min=1, help="Most tokens to generate.")
    ],
    "temperature": Annotated[
        float, _option("--temperature", "-t", panel=_SAMPLING, min=0, max=2, help="0: always the most likely token.")
    ],
    "top_k": Annotated[int, _option("--top-k", panel=_SAMPLING, min=0, help="Only the k most likely tokens; 0: all.")],
    "top_p": Annotated[
        float,
        _option("--top-p", panel=_SAMPLING, min=0.0001, max=1, help="Only the most likely tokens of this probability."),
    ],
    "min_p": Annotated[
        float,
        _option(
            "--min-p", panel=_SAMPLING, min=0, max=1, help="Least probability, as a part of the likeliest token's."
        ),
    ],
    "repetition_penalty": Annotated[
        float,
        _option(
            "--repetition-penalty", panel=_SAMPLING, min=0.01, max=10, help="Above 1: against what was said before."
        ),
    ],
    "presence_penalty": Annotated[
        float,
        _option("--presence-penalty", panel=_SAMPLING, min=-2, max=2, help="Taken from tokens that the answer holds."),
    ],
    "frequency_penalty": Annotated[
        float, _option("--frequency-penalty", panel=_SAMPLING, min=-2, max=2, help="The same, for each time.")
    ],
    "min_tokens": Annotated[
        int, _option("--min-tokens", panel=_SAMPLING, min=0, help="Nothing ends the answer before so many tokens.")
    ],
    "seed": Annotated[int | None, _option("--seed", panel=_SAMPLING, min=0, help="Makes sampling repeatable.")],
}


def sampling_options(max_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command that takes `sampling: SamplingParams`, with the options of sampling and this default length."""
    base = msgspec.structs.replace(SamplingParams(), max_tokens=max_tokens)
    defaults = {name: getattr(base, name) for name in SAMPLING_OPTIONS}
    return lambda command: _spread(command, "sampling", SAMPLING_OPTIONS, defaults, SamplingParams)


def _spread(
    command: Callable[..., Any],
    parameter: str,
    options: dict[str, Any],
    defaults: dict[str, Any],
    build: Callable[..., Any],
) -> Callable[..., Any]:
    """Replace one parameter of a command by the options that build its value. Names get a prefix, so none collide."""
    own = inspect.signature(command).parameters
    hints = get_type_hints(command, include_extras=True)
    prefix = f"{parameter}__"

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        chosen = {name: values.pop(prefix + name) for name in options}
        return command(**values, **{parameter: build(**chosen)})

    kept = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given.default, annotation=hints[name])
        for name, given in own.items()
        if name != parameter
    ]
    added = [
        inspect.Parameter(prefix + name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in options.items()
    ]
    run.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {given.name: given.annotation for given in (*kept, *added)}
    del run.__wrapped__
    return run
