"""`lowlat serve`."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lowlat.cli.options import engine_options
from lowlat.cli.progress import LoadProgress
from lowlat.engine.config import EngineConfig

if TYPE_CHECKING:
    from lowlat.engine.messages import Ready, Starting
    from lowlat.server.text_model import TextModel

EPILOG = """
Examples:

  lowlat serve --model smollm2 --port 8000

  curl localhost:8000/v1/completions -d '{"prompt": "Once upon"}'

  LOWLAT_API_KEY=secret lowlat serve --host 0.0.0.0

Clients send a key as the header Authorization: Bearer secret. SIGTERM or Ctrl-C: no new work, open streams finish
within --drain-seconds, exit code 0; a second one ends at once.
"""

_HTTP, _LIMITS = "HTTP", "Limits"


@engine_options
def serve(
    *,
    config: EngineConfig,
    host: Annotated[
        str, typer.Option("--host", rich_help_panel=_HTTP, help="Address to listen on; 0.0.0.0: all networks.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", rich_help_panel=_HTTP, min=0, max=65535, help="0: any free port.")
    ] = 8000,
    admin_port: Annotated[
        int | None,
        typer.Option(
            "--admin-port",
            rich_help_panel=_HTTP,
            min=0,
            max=65535,
            help="Serve /metrics and the admin routes here, on 127.0.0.1, and not on the public port.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", rich_help_panel=_HTTP, help="Name for clients; default: from --model."),
    ] = None,
    tool_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "llama3",
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "deepseek_v41",
            "harmony",
            "muse",
        ],
        typer.Option(
            "--tool-parser", rich_help_panel=_HTTP, help="How the model writes tool calls; auto: by its template."
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        Literal["auto", "off", "think", "harmony", "muse"],
        typer.Option(
            "--reasoning-parser",
            rich_help_panel=_HTTP,
            help="How it writes reasoning, which then comes as reasoning_content; off: it stays in the content.",
        ),
    ] = "auto",
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            rich_help_panel=_HTTP,
            help="Key that clients must send; may be given several times. Better in LOWLAT_API_KEY: "
            "command lines can be read by other users.",
        ),
    ] = None,
    log_format: Annotated[
        Literal["auto", "json", "text"],
        typer.Option("--log-format", rich_help_panel=_HTTP, help="auto: text on a terminal, else JSON lines."),
    ] = "auto",
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", rich_help_panel=_LIMITS, min=0, help="Sequences that may wait; more get a 429."),
    ] = 256,
    max_body_mib: Annotated[
        float, typer.Option("--max-body-mib", rich_help_panel=_LIMITS, min=0.001, help="Largest body of a request.")
    ] = 16,
    max_n: Annotated[
        int, typer.Option("--max-n", rich_help_panel=_LIMITS, min=1, help="Most choices of a prompt.")
    ] = 16,
    max_prompts: Annotated[
        int, typer.Option("--max-prompts", rich_help_panel=_LIMITS, min=1, help="Most prompts in one request.")
    ] = 64,
    max_score_items: Annotated[
        int, typer.Option("--max-score-items", rich_help_panel=_LIMITS, min=1, help="Most items of a scoring request.")
    ] = 4096,
    score_mode: Annotated[
        Literal["auto", "sis", "mis"],
        typer.Option(
            "--score-mode",
            rich_help_panel=_HTTP,
            help="Scoring requests that leave it open: one sequence an item (sis), all items in one (mis), or the "
            "cheaper way (auto). Scores are the same.",
        ),
    ] = "auto",
    max_connections: Annotated[
        int, typer.Option("--max-connections", rich_help_panel=_LIMITS, min=1, help="Open connections; more get a 503.")
    ] = 4096,
    drain_seconds: Annotated[
        float, typer.Option("--drain-seconds", rich_help_panel=_LIMITS, min=0, help="Time to finish after SIGTERM.")
    ] = 30,
    start_wait_seconds: Annotated[
        float,
        typer.Option("--start-wait-seconds", rich_help_panel=_LIMITS, min=0, help="Requests wait so long for a start."),
    ] = 30,
) -> None:
    """Serve a model over HTTP, with the OpenAI API, on localhost unless told otherwise."""
    from lowlat.engine.client import EngineClient
    from lowlat.engine.supervisor import engine_program
    from lowlat.logs import log_event, set_up_logging

    begun = time.monotonic()
    lines_are_json = set_up_logging(log_format)
    progress = LoadProgress()

    def say(done: int, total: int, what: str) -> None:
        if not lines_are_json:
            progress(done, total, what)
        elif done in (0, total):
            log_event("starting", what=what, done=done, total=total)

    def on_progress(event: Starting) -> None:
        say(event.done, event.total, event.what)

    def load_text() -> TextModel:
        # Engine and front both open the model; whoever comes first converts it, and says so.
        return load_text_model(
            config.model, served_model_name, say, tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )

    def on_ready(ready: Ready, address: str) -> None:
        progress.close()
        kernels = f", kernels {ready.kernels}" if ready.kernels else ""
        if not lines_are_json:
            print(
                f"lowlat serves {ready.model} at {address} ({ready.dtype} on {ready.device}{kernels}; "
                f"ready in {time.monotonic() - begun:.1f} s). Ctrl-C ends it.",
                file=sys.stderr,
                flush=True,
            )

    program = engine_program(lines_are_json)
    engine = EngineClient(config, program=program, on_progress=on_progress)
    engine.spawn()  # it loads while this process imports the server
    try:
        from lowlat.server.run import serve as run_server
        from lowlat.server.settings import ServerSettings
        from lowlat.server.text_model import load_text_model

        settings = ServerSettings(
            host=host,
            port=port,
            admin_port=admin_port,
            served_model_name=served_model_name,
            api_keys=tuple(api_key or filter(None, [os.environ.get("LOWLAT_API_KEY", "")])),
            max_queue=max_queue,
            max_body_bytes=int(max_body_mib * 2**20),
            max_n=max_n,
            max_prompts=max_prompts,
            max_score_items=max_score_items,
            score_mode=score_mode,
            max_connections=max_connections,
            drain_s=drain_seconds,
            start_wait_s=start_wait_seconds,
            log_format=log_format,
        )
        code = run_server(config, settings, engine=engine, load_text=load_text, on_ready=on_ready)
    finally:
        progress.close()
        engine.kill()
    raise typer.Exit(code)
