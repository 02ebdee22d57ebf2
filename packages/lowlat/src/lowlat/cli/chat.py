"""`lowlat chat`: a conversation in the terminal, in this process or with a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from lowlat.cli.options import engine_options, sampling_options
from lowlat.cli.progress import LoadProgress
from lowlat.engine.config import SIMULATED, EngineConfig
from lowlat.engine.request import SamplingParams

EPILOG = """
Examples:

  lowlat chat --system "Answer in one sentence."

  lowlat chat --url http://localhost:8000

  echo "Name three colours." | lowlat chat --temperature 0

With --url a server answers (its key: LOWLAT_API_KEY); without it the model is loaded here. Inside: /reset forgets the
conversation, /system TEXT sets the system message, /exit or Ctrl-D ends, Ctrl-C stops an answer.
"""

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]


@engine_options
@sampling_options(max_tokens=1024)
def chat(
    *,
    config: EngineConfig,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Talk to this server instead of loading a model; options of models are unused."),
    ] = None,
) -> None:
    """Talk to a model, with answers as they come. Reads lines from stdin where it is not a terminal."""
    if url is not None:
        from lowlat.cli.remote import remote_answer

        converse(remote_answer(url, sampling, os.environ.get("LOWLAT_API_KEY")), system)
        return
    with LoadProgress() as progress:
        from lowlat import Engine

        engine = Engine(config, progress=progress)

    def answer(messages: list[Message]) -> Iterator[str]:
        if config.spec_simulate_acceptance is not None:
            print(f"[{SIMULATED}]", file=sys.stderr)
        for delta in engine.stream(engine.chat_ids(messages), sampling):
            yield delta.text

    with engine:
        converse(answer, system)


def converse(answer: Answer, system: str | None) -> None:
    """Read lines, print answers, keep the conversation. An answer stopped by Ctrl-C stays as far as it came."""
    terminal = sys.stdin.isatty()
    messages: list[Message] = []
    if terminal:
        print("/reset, /system TEXT, /exit; Ctrl-C stops an answer.", file=sys.stderr)
    while (line := _read_line(terminal)) is not None:
        if not line:
            continue
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit"):
            return
        if command == "/reset":
            messages.clear()
        elif command == "/system":
            system = rest or None
        elif command.startswith("/") and terminal and command[1:].isalpha():
            print(f"no command {command}: /reset, /system TEXT, /exit", file=sys.stderr)
        else:
            _turn(answer, system, messages, line)


def _turn(answer: Answer, system: str | None, messages: list[Message], line: str) -> None:
    messages.append({"role": "user", "content": line})
    said: list[str] = []
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    try:
        for text in answer([*head, *messages]):
            said.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        # The conversation outgrew the context, or the template refuses it: say so, forget the line, go on.
        messages.pop()
        print(f"error: {error}", file=sys.stderr)
        return
    sys.stdout.write("\n")
    messages.append({"role": "assistant", "content": "".join(said)})


def _read_line(terminal: bool) -> str | None:
    """The next line without its end, or None when there is no more."""
    if not terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        from rich.prompt import Prompt

        return Prompt.ask("[bold]you[/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
