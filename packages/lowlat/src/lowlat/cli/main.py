"""`lowlat`: the command line's entry. Every command's module is light; what is heavy is imported when it runs."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Annotated

import typer

from lowlat import __version__
from lowlat.cli import chat, generate, models, serve, train_draft
from lowlat.cli.errors import own_words

_EPILOG = """
Examples:

  lowlat serve

  lowlat serve --model ./Llama-3.2-1B --port 8001

  lowlat generate --prompt "The capital of France is" --temperature 0

  lowlat chat

lowlat COMMAND --help tells more.
"""

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="lowlat: one user's tokens, as fast as the hardware allows.",
    epilog=_EPILOG,
)
app.command("serve", epilog=serve.EPILOG)(serve.serve)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
app.command("chat", epilog=chat.EPILOG)(chat.chat)
app.command("train-draft", epilog=train_draft.EPILOG)(train_draft.train_draft)
app.command("models", epilog=models.EPILOG)(models.models)

_ELSEWHERE = {
    "plugins": ("lowlat.cli.plugins", "Kernel libraries: which are here, which fit, and why not."),
    "bench": ("lowlat.bench.cli", "Measure: steps, loads, comparisons, reports."),
}
"""Commands that other modules bring, each as a typer `app`; imported only when they are run."""


def _add_lazily(name: str, module: str, help: str) -> None:
    if importlib.util.find_spec(module) is None:
        return

    # The command's own app parses everything that follows, `--help` too.
    @app.command(
        name,
        help=help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def forward(context: typer.Context) -> None:
        importlib.import_module(module).app(args=context.args, prog_name=f"lowlat {name}")


for _name, (_module, _help) in _ELSEWHERE.items():
    _add_lazily(_name, _module, _help)


@app.command(
    "make-checkpoint",
    help="Write a random DeepSeek-V4 or V4.1 checkpoint in the published format, of any size.",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def make_checkpoint(context: typer.Context) -> None:
    from lowlat.models.deepseek_v4 import make_checkpoint as maker

    raise typer.Exit(maker.main(context.args))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lowlat {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if debug:
        os.environ["LOWLAT_DEBUG"] = "1"


def main() -> None:
    """Run; exit code 0 for success, 1 for a failure, 2 for a wrong call, 130 when interrupted."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has left; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("LOWLAT_DEBUG"):
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        sys.exit(1)


def explain(error: Exception) -> str:
    """One line: what this project's own errors say, and what others are called."""
    text = " ".join(own_words(error).split())
    if isinstance(error, ModuleNotFoundError):
        return f"{text}. One of lowlat's extras brings it (server, grammars, bench); in a checkout run `make install`"
    if type(error).__module__.startswith(("lowlat.", "lowlat_plugin.")) or isinstance(error, ValueError | OSError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (lowlat --debug COMMAND ... shows where)"


if __name__ == "__main__":
    main()
