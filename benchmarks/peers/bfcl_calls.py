"""Functions and questions of the Berkeley Function Calling Leaderboard through `tool_choice: required`.

    bash benchmarks/peers/bfcl_calls.sh --count 60

What is judged is the server, not the model: every call must name an offered function, and its arguments must parse and
fit the function's JSON schema, as the `jsonschema` package reads it. Whether a small model calls the right thing is not
looked at. Exit code 1 where an answer fails. Run by `make peers`, with an environment of its own.
"""

import argparse
import collections
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import jsonschema

CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "simple_java",
    "live_simple",
    "live_multiple",
)
TYPES = {
    "dict": "object", "HashMap": "object", "Hashtable": "object", "object": "object",
    "float": "number", "double": "number", "number": "number",
    "integer": "integer", "long": "integer", "short": "integer", "byte": "integer", "int": "integer",
    "string": "string", "String": "string", "char": "string", "Char": "string",
    "boolean": "boolean", "Boolean": "boolean",
    "array": "array", "tuple": "array", "Array": "array", "ArrayList": "array", "Queue": "array", "Stack": "array",
    "Set": "array", "null": "null",
}  # fmt: skip
KEPT = ("description", "default", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")


BOUNDS = {"string": ("maxLength", 32), "array": ("maxItems", 4)}
"""For what the leaderboard leaves open: a small model repeats itself without end, and a cut answer shows nothing."""


def to_schema(form: dict[str, Any]) -> dict[str, Any]:
    """A parameter as the leaderboard describes it (types of Python and Java) as a JSON schema."""
    schema: dict[str, Any] = {key: form[key] for key in KEPT if key in form}
    kind = TYPES.get(form.get("type", ""), "string")  # `any` and what nobody knows: a text
    if "enum" in form:
        return {"description": str(form.get("description", "")), "enum": form["enum"]}
    schema["type"] = kind
    if kind in BOUNDS:
        schema.setdefault(*BOUNDS[kind])
    if kind == "object":
        properties = {name: to_schema(value) for name, value in form.get("properties", {}).items()}
        schema["properties"] = properties
        schema["required"] = [name for name in form.get("required", []) if name in properties]
    if kind == "array":
        schema["items"] = to_schema(form.get("items", {}))
    return schema


def questions(data: pathlib.Path, count: int, seed: int) -> list[tuple[str, list[Any], list[dict[str, Any]]]]:
    """`count` questions drawn evenly from the categories: their ids, messages of the first turn, and tools."""
    choose = random.Random(seed)
    drawn = []
    for number, category in enumerate(CATEGORIES):
        lines = (data / f"BFCL_v4_{category}.json").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        share = count // len(CATEGORIES) + (number < count % len(CATEGORIES))
        for row in choose.sample(rows, min(share, len(rows))):
            tools = [
                {
                    "type": "function",
                    "function": {
                        "name": function["name"],
                        "description": function["description"],
                        "parameters": to_schema(function["parameters"]),
                    },
                }
                for function in row["function"]
            ]
            drawn.append((row["id"], row["question"][0], tools))
    return drawn


def judge(answer: dict[str, Any], tools: list[dict[str, Any]]) -> tuple[str, int]:
    """`valid`, `cut` (the token limit came before the answer's end), or what is wrong; and how many calls there are."""
    if "refused" in answer:
        return str(answer["refused"]), 0
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in calls:
        function = call["function"]
        if function["name"] not in schemas:
            return f"calls {function['name']!r}, which was not offered", len(calls)
        try:
            jsonschema.Draft202012Validator(schemas[function["name"]]).validate(json.loads(function["arguments"]))
        except (ValueError, jsonschema.ValidationError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}", len(calls)
    if choice["finish_reason"] == "length":
        return "cut", len(calls)
    if not calls or choice["finish_reason"] != "tool_calls" or choice["message"]["content"]:
        return "does not consist of calls", len(calls)
    return "valid", len(calls)


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        return {"refused": f"{error.code}: {error.read().decode()[:300]}"}


def serve(lowlat: str, model: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on a free port, and wait until it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [lowlat, "serve", "--model", model, "--port", str(port), "--max-context", "8192"]
    command += ["--log-format", "json", "--grammar-seconds", "20"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        time.sleep(0.5)
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return process, url
        except OSError:
            continue
    process.kill()
    raise SystemExit("the server was not ready within five minutes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=pathlib.Path, required=True, help="folder bfcl_eval/data of the package bfcl-eval"
    )
    parser.add_argument("--lowlat", default="lowlat", help="the command")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, default=60, help="questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument(
        "--parallel", action="store_true", help="allow several calls an answer (small models never end)"
    )
    parser.add_argument("--result", type=pathlib.Path, help="write what was found here, as JSON")
    options = parser.parse_args()

    drawn = questions(options.data, options.count, options.seed)
    process, url = serve(options.lowlat, options.model)
    begun = time.monotonic()

    def one(question: tuple[str, list[Any], list[dict[str, Any]]]) -> tuple[str, str, int]:
        id, messages, tools = question
        answer = ask(
            url,
            {
                "messages": messages,
                "tools": tools,
                "tool_choice": "required",
                "parallel_tool_calls": options.parallel,
                "temperature": 0.7,
                "seed": options.seed,
                "max_tokens": options.max_tokens,
            },
        )
        return id, *judge(answer, tools)

    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(one, drawn))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    verdicts = collections.Counter(verdict if verdict in ("valid", "cut") else "wrong" for _, verdict, _ in found)
    for id, verdict, _ in found:
        if verdict != "valid":
            print(f"{id}: {verdict}")
    print(f"{verdicts['valid']} of {len(found)} answers are valid, {verdicts['cut']} cut, {verdicts['wrong']} wrong")
    if options.result is not None:
        options.result.write_text(
            json.dumps(
                {
                    "benchmark": "bfcl-calls",
                    "date": datetime.date.today().isoformat(),
                    "machine": {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
                    "command": " ".join(["benchmarks/peers/bfcl_calls.py", *sys.argv[1:]]),
                    "model": options.model,
                    "questions": len(found),
                    "calls": sum(calls for _, _, calls in found),
                    "valid": verdicts["valid"],
                    "cut": verdicts["cut"],
                    "wrong": verdicts["wrong"],
                    "categories": list(CATEGORIES),
                    "seconds": round(time.monotonic() - begun, 1),
                },
                indent=1,
            )
            + "\n"
        )
    return 0 if verdicts["valid"] == len(found) else 1


def processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
