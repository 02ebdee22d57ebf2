"""`lowlat serve --spec draft` with a tiny model: over HTTP, answers are token by token those of a server without it.

The random draft of a random checkpoint is hardly ever right. So that drafts are accepted in all numbers, its Markov
head is taught the word pairs of the answers; the target stays as it was.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from deepseek_kit import some_tokens
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lowlat.bench.local_server import local_server
from lowlat.cli.main import app

ANSWER, CHUNK, CROWDED = 300, 64, 76
LONG = some_tokens(150, seed=101)
CROWD = [some_tokens(100, seed=seed) for seed in (102, 103, 104)]


class Client:
    """Greedy completions of token ids, and the server's counters."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=300)

    def complete(self, prompt: list[int] | list[list[int]], count: int) -> tuple[list[list[int]], int]:
        """The answers' token ids, and how many prompt tokens were cached."""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        found: Any = reply.json()
        answers = [choice["token_ids"] for choice in sorted(found["choices"], key=lambda choice: choice["index"])]
        assert all(len(answer) == count for answer in answers)
        return answers, found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def count(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"lowlat_{name}_total"))


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(folder: Path, dtype: str, kv_tokens: int, *more: str) -> Any:
    flags = f"--dtype {dtype} --threads 1 --chunk-tokens {CHUNK} --max-batch 3 --kv-tokens {kv_tokens}"
    return local_server(["--model", str(folder), *flags.split(), *more])


def teach(folder: Path, answers: list[list[int]], target: Path) -> None:
    """Copy a checkpoint with a draft whose Markov head alone decides, by the most frequent successor of each token."""
    shutil.copytree(folder, target)
    (path,) = target.glob("model-*.safetensors")
    tensors = load_file(str(path))
    head, embed = (tensors[f"mtp.2.markov_head.{part}.weight"] for part in ("head", "embed"))
    codes = torch.nn.functional.normalize(torch.randn(head.shape, generator=torch.Generator().manual_seed(1)), dim=1)
    head.copy_(codes)
    pairs = Counter(pair for answer in answers for pair in itertools.pairwise(answer))
    for (before, after), _ in sorted(pairs.items(), key=lambda item: item[1]):
        embed[before] = head[after]
    tensors["mtp.2.norm.weight"].zero_()
    save_file(tensors, str(path))


@pytest.fixture(scope="module")
def expected(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The checkpoint, made by the command, and the answers of a server that does not guess."""
    folder = tmp_path_factory.mktemp("http") / "tiny-v41"
    made = CliRunner().invoke(app, ["make-checkpoint", "--config", "tiny-v41", "--seed", "0", str(folder)])
    assert made.exit_code == 0, made.output
    with serve(folder, dtype, 1024) as server:
        client = Client(server.url)
        (long,), _ = client.complete(LONG, ANSWER)
        follow = [*LONG, *long, 7, 8, 9]
        (turn,), _ = client.complete(follow, 10)
        crowd, _ = client.complete(CROWD, CROWDED)
        assert client.count("guessed_tokens") == client.count("preemptions") == 0
    return {"folder": folder, "long": long, "follow": follow, "turn": turn, "crowd": crowd}


@pytest.fixture(scope="module")
def drafting(dtype: str, expected: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("taught") / "tiny-v41"
    teach(expected["folder"], [expected["long"], expected["turn"], *expected["crowd"]], folder)
    with serve(folder, dtype, 464, "--spec", "draft", "--spec-width", "6") as server:
        yield Client(server.url)


def test_three_hundred_tokens_over_chunks_and_prefix_hits(drafting: Client, expected: dict[str, Any]) -> None:
    before = drafting.count("steps")
    (first,), cached = drafting.complete(LONG, 1)
    assert drafting.count("steps") - before >= 3, "150 tokens in chunks of 64"
    assert (first, cached) == (expected["long"][:1], 0)
    (answer,), cached = drafting.complete(LONG, ANSWER)
    assert answer == expected["long"]
    assert cached == 144, "the prompt's whole pages"
    assert 50 < drafting.count("accepted_tokens") < drafting.count("guessed_tokens")
    (answer,), cached = drafting.complete(expected["follow"], 10)
    assert answer == expected["turn"]
    assert cached == 448, "150 tokens and the answer but for its last token, in whole pages"


def test_requests_that_preempt_each_other(drafting: Client, expected: dict[str, Any]) -> None:
    """Three prompts of 100 tokens fit into 29 pages of 16; with 76 tokens of answer, 11 pages for each, they do not."""
    preempted, accepted = drafting.count("preemptions"), drafting.count("accepted_tokens")
    answers, _ = drafting.complete(CROWD, CROWDED)
    assert answers == expected["crowd"]
    assert drafting.count("preemptions") > preempted
    assert drafting.count("accepted_tokens") > accepted
