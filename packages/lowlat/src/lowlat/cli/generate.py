"""`lowlat generate`: continue one prompt, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from lowlat.cli.options import engine_options, sampling_options
from lowlat.cli.progress import LoadProgress
from lowlat.engine.config import SIMULATED, EngineConfig
from lowlat.engine.request import SamplingParams

if TYPE_CHECKING:
    from lowlat.offline import Engine

EPILOG = """
Examples:

  lowlat generate --prompt "The capital of France is" --temperature 0

  lowlat generate --model ./model.gguf --prompt-ids ids.json --json

  echo "Once upon a time" | lowlat generate --prompt - --stop "." --seed 7

A file of ids is a JSON list, such as [1, 2, 3]. With --json, one object: text, token_ids, logprobs, finish_reason,
stop_reason, usage, timings, and with --spec: speculation.
"""


@engine_options
@sampling_options(max_tokens=64)
def generate(
    *,
    config: EngineConfig,
    sampling: SamplingParams,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.")] = None,
    prompt_ids: Annotated[
        Path | None,
        typer.Option("--prompt-ids", help="File with a JSON list of token ids, instead of --prompt; - reads stdin."),
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option("--stop-token-id", min=0, help="End with this token; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(
            "--logprobs", min=0, max=20, help="Log-probabilities: of the chosen tokens and of so many others."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continue a prompt and print the text as it comes."""
    start: str | list[int] = _prompt(prompt, prompt_ids)
    sampling = msgspec.structs.replace(
        sampling, stop_token_ids=tuple(stop_token_id or ()), ignore_eos=ignore_eos, logprobs=logprobs
    )
    with LoadProgress() as progress:
        from lowlat import Engine

        engine = Engine(config, progress=progress)
    with engine:
        if json:
            print(_json(engine.generate(start, sampling, stop=stop or ()), engine.speculation()))
        else:
            _print_stream(engine, start, sampling, stop or [])


def _prompt(text: str | None, file: Path | None) -> str | list[int]:
    if (text is None) == (file is None):
        raise typer.BadParameter("give either --prompt TEXT or --prompt-ids FILE")
    if file is not None:
        return _read_ids(file)
    assert text is not None
    if text == "-":
        text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return text


def _read_ids(file: Path) -> list[int]:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        ids = msgspec.json.decode(data, type=list[Annotated[int, msgspec.Meta(ge=0)]])
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}", param_hint="--prompt-ids") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} is not a JSON list of ids: {error}", param_hint="--prompt-ids") from None
    if not ids:
        raise typer.BadParameter(f"{file} holds no ids", param_hint="--prompt-ids")
    return ids


def _print_stream(engine: Engine, start: str | list[int], sampling: SamplingParams, stop: list[str]) -> None:
    tokens, reason = 0, None
    for delta in engine.stream(start, sampling, stop=stop):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        tokens, reason = delta.completion_tokens, delta.finish_reason or reason
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(f"[{tokens} tokens, {reason}]", file=sys.stderr)
    report = engine.speculation()
    if report is not None and report.tokens_per_step is not None and report.break_even is not None:
        print(
            f"[{report.tokens_per_step:.2f} tokens a step, break-even {report.break_even:.2f}, "
            f"{report.accepted} of {report.guessed} guesses right]",
            file=sys.stderr,
        )
    if report is not None and report.simulated_acceptance is not None:
        print(f"[{SIMULATED}]", file=sys.stderr)


def _json(generation: Any, speculation: Any) -> str:
    """One object on one line; bytes of tokens as lists of numbers."""
    fields = msgspec.to_builtins(generation, builtin_types=(bytes,))
    for entry in fields.get("logprobs") or []:
        for token in (entry, *entry["top"]):
            token["bytes"] = list(token["bytes"])
    if fields.get("logprobs") is None:
        fields.pop("logprobs", None)
    if speculation is not None:
        fields["speculation"] = msgspec.to_builtins(speculation)
    return msgspec.json.encode(fields).decode()
