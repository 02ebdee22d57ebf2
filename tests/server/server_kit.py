"""A live server in a thread, with the scripted engine of fake_engine.py, and a tokenizer of single bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lowlat.engine.client import EngineClient
from lowlat.engine.config import EngineConfig
from lowlat.server.app import create_app
from lowlat.server.run import DrainingServer, listen, serve_app, uvicorn_config
from lowlat.server.settings import ServerSettings
from lowlat.server.state import ServerState
from lowlat.server.text_model import TextModel
from lowlat.text.chat import ChatTemplate
from lowlat.text.tokenizer import Tokenizer

FAKE_PROGRAM = (sys.executable, str(Path(__file__).with_name("fake_engine.py")))
EOS, START, END = 256, 257, 258
PATIENCE_S = 120.0
"""How long a test waits for what must come: only what hangs takes so long, however busy the machine is."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def byte_tokenizer(bos: bool = False, words: tuple[str, ...] = ()) -> Tokenizer:
    """Token id n is the byte n; 256 ends a sequence, 257 and 258 mark messages (257 begins a text with `bos`)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    from lowlat.text.token_bytes import byte_of_character

    table = byte_of_character()
    library = tokenizers.Tokenizer(models.BPE({char: table[char] for char in alphabet}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<eos>", "<s>", "<e>"])
    library.add_tokens(list(words))
    assert [library.token_to_id(name) for name in ("<eos>", "<s>", "<e>")] == [EOS, START, END]
    if bos:
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", START)]
        )
    return Tokenizer(library, bos_id=START if bos else None, eos_ids=[EOS])


def byte_text_model(bos: bool = False, template: str | None = TEMPLATE, words: tuple[str, ...] = ()) -> TextModel:
    """`words` are tokens of their own, from id 259 on."""
    chat = None if template is None else ChatTemplate(template, {})
    return TextModel(name="fake", path="fake-model", tokenizer=byte_tokenizer(bos, words), chat_template=chat)


def ids(text: str) -> list[int]:
    return list(text.encode())


def scripted(reply: str, **script: Any) -> dict[str, Any]:
    """Fields that make a request's answer this text; `script` are more fields of the fake engine's Script."""
    return {"cache_salt": json.dumps({"reply": ids(reply), **script}, separators=(",", ":"))}


def held(after: int = 5) -> dict[str, Any]:
    """Fields that make a request stand still in the fake engine after so many tokens, until `Live.release`."""
    return {"cache_salt": json.dumps({"hold_after": after})}


def stands_still(pid: int) -> bool:
    """Whether a process was stopped by a signal and waits for SIGCONT."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextlib.contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that does nothing inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: stands_still(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Clock:
    """Stands for the module `time` in the engine's client: seconds that a test skips count as waited for."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._skipped

    def skip(self, seconds: float) -> None:
        self._skipped += seconds


class Live:
    """A server that listens on a free port of 127.0.0.1."""

    def __init__(self, state: ServerState, server: DrainingServer, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.state = state
        self.server = server
        self.loop = loop
        self.url = url
        self.admin_url: str | None = None
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Run a function on the server's loop and return what it returns."""

        async def run() -> Any:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def release(self) -> None:
        """Let all requests go on that stand still in the fake engine."""
        asyncio.run_coroutine_threadsafe(self.state.engine.call("release"), self.loop).result(PATIENCE_S)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def send(self, path: str, **body: Any) -> socket.socket:
        """A connection over which a request went out whose answer nobody has read."""
        data = json.dumps(body).encode()
        raw = self.connect()
        raw.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return raw

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> Any:
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str, **body: Any) -> Any:
        answer = self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream, `[DONE]` included."""
        return list(self.stream(path, **body))

    def stream(self, path: str, **body: Any) -> Iterator[Any]:
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            if answer.status_code != 200:
                answer.read()
            assert answer.status_code == 200, answer.text
            for line in answer.iter_lines():
                if line:
                    assert line.startswith("data: "), line
                    data = line.removeprefix("data: ")
                    yield data if data == "[DONE]" else json.loads(data)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples; `name` may carry labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if not line.startswith("#") and (line.split(" ")[0] == name or line.startswith(name + "{")):
                total += float(line.rsplit(" ", 1)[1])
        return total


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Poll until `condition` gives something true, and return it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found or time.monotonic() > deadline:
            assert found, "condition not met in time"
            return found
        time.sleep(0.01)


@contextlib.contextmanager
def live_server(
    script: dict[str, Any] | None = None,
    *,
    config: EngineConfig | None = None,
    text: TextModel | None = None,
    program: Sequence[str] = FAKE_PROGRAM,
    wait_ready: bool = True,
    heartbeat_timeout: float = 5.0,
    restart_window_s: float = 3600.0,
    **settings: Any,
) -> Iterator[Live]:
    """A server over a scripted engine, unless `program` is another; `settings` are fields of ServerSettings."""
    earlier = os.environ.get("FAKE_ENGINE")
    os.environ["FAKE_ENGINE"] = json.dumps(script or {})
    model = text or byte_text_model()
    engine = EngineClient(
        config or EngineConfig(model="fake-model"),
        program=program,
        heartbeat_timeout=heartbeat_timeout,
        restart_window_s=restart_window_s,
    )

    async def load_text() -> TextModel:
        return model

    options = ServerSettings(port=0, **settings)
    state = ServerState(options, engine, load_text)
    server = DrainingServer(uvicorn_config(create_app(state), options), state)
    listener = listen(options.host, options.port)
    admin = None if options.admin_port is None else listen(options.admin_host, options.admin_port)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(serve_app(server, state, listener, admin=admin)), daemon=True
    )
    thread.start()
    live = Live(state, server, loop, f"http://127.0.0.1:{listener.getsockname()[1]}")
    live.admin_url = None if admin is None else f"http://127.0.0.1:{admin.getsockname()[1]}"
    try:
        wait_for(lambda: server.started)
        if wait_ready:
            wait_for(lambda: live.http.get("/ready").status_code == 200)
        yield live
    finally:
        live.http.close()
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"
        loop.close()
        if earlier is None:
            os.environ.pop("FAKE_ENGINE", None)
        else:
            os.environ["FAKE_ENGINE"] = earlier


def refuse(live: Live, path: str, body: Any, status: int = 400) -> Any:
    """The error that a bad request gets, before the engine hears of it."""
    before = (live.state.engine.open_requests, live.state.engine.stats.prompt_tokens)
    answer = live.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body).encode())
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert (live.state.engine.open_requests, live.state.engine.stats.prompt_tokens) == before
    return error
