"""An OpenAI-compatible server with fixed token times, so that what a client measures has a known truth.

    python tests/bench/scripted_server.py --port 8123 --ttft-ms 60 --itl-ms 10

Every request gets `max_tokens` words; the first leaves `ttft` after the request was read and word n leaves at `ttft + n
* itl`, on an absolute schedule that does not drift. With `--tokens-per-chunk` several words leave together, as
speculation makes them. With `--hold 3:9` answers of 3 tokens wait until 9 requests were read. `--fail-every`, `--usage`
and `--models` make it a server that fails or says odd things. It also takes the flags by which `lowlat bench ab` tells
two servers apart. A word between spaces counts as a token. `GET /script/log` lists, for each request in order of
arrival: what was asked, when it was read, and when each word was written (seconds).
"""

import argparse
import asyncio
import contextlib
import http
import json
import time


class Script:
    """The fixed times, the limits, and the log of what was done when."""

    def __init__(
        self,
        ttft_ms=60.0,
        itl_ms=10.0,
        tokens_per_chunk=1,
        max_context=1 << 20,
        model="scripted",
        low_latency="off",
        kernels=None,
        gain=2.0,
        hold="0:0",
        fail_every=None,
        usage=None,
        models=None,
        models_status=200,
    ):
        self.held_tokens, self.held_until = map(int, hold.split(":"))
        self.low_latency = low_latency
        self.kernels = kernels
        self.ttft = ttft_ms / 1e3
        self.itl = itl_ms / 1e3 / (1.0 if low_latency == "off" else gain)
        self.tokens_per_chunk = tokens_per_chunk
        self.fail_every = fail_every
        self.usage = usage
        self.models = models
        self.models_status = models_status
        self.max_context = max_context
        self.model = model
        self.log = []
        self.seen = []

    def cached(self, prompt):
        """Longest common word prefix with an earlier prompt, and remember this one."""
        best = 0
        for other in self.seen:
            common = 0
            for a, b in zip(prompt, other):
                if a != b:
                    break
                common += 1
            best = max(best, common)
        self.seen = [*self.seen[-31:], prompt]
        return min(best, len(prompt) - 1)


def reply(status, body):
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    reason = http.HTTPStatus(status).phrase
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def prompt_text(body):
    if "messages" not in body:
        return body["prompt"]
    parts = []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        parts.append(f"<{message['role']}> {content}")
    return " ".join(parts)


def piece(chat, model, text, finish=None, role=False):
    choice = {"index": 0, "finish_reason": finish}
    if chat:
        choice["delta"] = {"role": "assistant", "content": ""} if role else ({"content": text} if text else {})
    else:
        choice["text"] = text
    name = "chat.completion.chunk" if chat else "text_completion"
    return {"id": "scripted-1", "object": name, "created": int(time.time()), "model": model, "choices": [choice]}


def chunked(event):
    data = b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def generate(script, chat, body, writer):
    read_at = time.perf_counter()
    words = prompt_text(body).split()
    count = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    if len(words) + count > script.max_context:
        message = f"This model's maximum context length is {script.max_context} tokens, not {len(words)} + {count}"
        writer.write(reply(400, {"error": {"message": message, "code": "context_length_exceeded"}}))
        return
    entry = {"read": read_at, "due": [], "written": [], "prompt": len(words), "tokens": count}
    entry["messages"] = [m["role"] for m in body.get("messages", [])]
    entry["ignore_eos"] = body.get("ignore_eos")
    entry["first"] = " ".join(words[:12])
    script.log.append(entry)
    if script.fail_every and count > 4 and sum(e["tokens"] > 4 for e in script.log) % script.fail_every == 0:
        writer.write(reply(500, {"error": {"message": "out of pages"}}))
        return
    usage = {"prompt_tokens": len(words), "completion_tokens": count, "total_tokens": len(words) + count}
    usage["prompt_tokens_details"] = {"cached_tokens": script.cached(words)}
    if script.usage is not None:
        usage = json.loads(script.usage)
    while count == script.held_tokens and len(script.log) < script.held_until:
        await asyncio.sleep(0.005)
    start = time.perf_counter()
    if not body.get("stream"):
        await asyncio.sleep(script.ttft + script.itl * (count - 1))
        text = " ".join(["word"] * count)
        choice = {"index": 0, "finish_reason": "length"}
        choice.update({"message": {"role": "assistant", "content": text}} if chat else {"text": text})
        writer.write(reply(200, {"id": "scripted-1", "model": script.model, "choices": [choice], "usage": usage}))
        return
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    if chat:
        writer.write(chunked(piece(chat, script.model, "", role=True)))
    for first in range(0, count, script.tokens_per_chunk):
        size = min(script.tokens_per_chunk, count - first)
        due = start + script.ttft + first * script.itl
        entry["due"].append(due)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        last = first + size >= count
        writer.write(chunked(piece(chat, script.model, " word" * size, "length" if last else None)))
        entry["written"].append(time.perf_counter())
        await writer.drain()
    if (body.get("stream_options") or {}).get("include_usage"):
        final = piece(chat, script.model, "")
        final["choices"], final["usage"] = [], usage
        writer.write(chunked(final))
    writer.write(chunked(b"[DONE]") + b"0\r\n\r\n")


async def serve_connection(script, reader, writer):
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            method, path, _ = head.split(" ", 2)
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            raw = await reader.readexactly(int(fields.get("content-length", 0)))
            if method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
                await generate(script, "chat" in path, json.loads(raw), writer)
            elif path == "/v1/models" and script.models is not None:
                writer.write(reply(script.models_status, script.models))
            elif path == "/v1/models":
                card = {"id": script.model, "object": "model", "owned_by": "scripted", "created": 0}
                card["max_model_len"] = script.max_context
                writer.write(reply(200, {"object": "list", "data": [card]}))
            elif path == "/script/log":
                writer.write(reply(200, script.log))
            elif path == "/metrics":
                steps = sum(len(entry["written"]) for entry in script.log)
                kind = "general" if script.low_latency == "off" else "plugin"
                text = f'lowlat_low_latency_steps_total{{path="{kind}",reason=""}} {steps}.0\n'
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            elif path in ("/health", "/ready", "/"):
                writer.write(reply(200, {"status": "ok"}))
            else:
                writer.write(reply(404, {"error": {"message": f"nothing at {path}"}}))
            await writer.drain()
    writer.close()


async def start(script, port=0):
    """Serve on localhost; returns (server, port)."""

    async def connected(reader, writer):
        await serve_connection(script, reader, writer)

    server = await asyncio.start_server(connected, "127.0.0.1", port, limit=1 << 26)
    return server, server.sockets[0].getsockname()[1]


async def run(script, port):
    server, port = await start(script, port)
    print(json.dumps({"port": port}), flush=True)
    async with server:
        await server.serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=60.0)
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--fail-every", type=int, help="each so-many-th request of more than 4 tokens fails")
    parser.add_argument("--usage", help="JSON that stands for every usage")
    parser.add_argument("--models", help="body of the answer to /v1/models")
    parser.add_argument("--models-status", type=int, default=200)
    parser.add_argument("--max-context", type=int, default=1 << 20)
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--low-latency", choices=["off", "auto", "require"], default="off")
    parser.add_argument("--kernels")
    parser.add_argument("--gain", type=float, default=2.0, help="factor by which --low-latency shortens the gaps")
    parser.add_argument("--hold", default="0:0", metavar="TOKENS:REQUESTS")
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(Script(**arguments), port))


if __name__ == "__main__":
    main()
