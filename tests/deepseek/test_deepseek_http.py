"""`lowlat serve --spec draft` with a tiny model: over HTTP, answers are token by token those of a server without it.

The random draft of a random checkpoint is hardly ever right. So that drafts are accepted in all numbers, its Markov
head is taught the word pairs of the answers; the target stays as it was.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from deepseek_kit import Runner, load, some_tokens
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from lowlat.bench.local_server import local_server
from lowlat.cli.main import app

ANSWER, CHUNK, CROWDED = 300, 64, 76
DRAFT = ("--spec", "draft", "--spec-width", "6")
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint from the command."""
    path = tmp_path_factory.mktemp("http") / "tiny-v41"
    made = CliRunner().invoke(app, ["make-checkpoint", "--config", "tiny-v41", "--seed", "0", str(path)])
    assert made.exit_code == 0, made.output
    return path


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_three_hundred_tokens_over_chunks_and_prefix_hits(folder: Path, tmp_path: Path, dtype: str) -> None:
    """Requests run alone here, so that also in float32, whose sums depend on a step's rows, a run repeats exactly."""
    with serve(folder, dtype, 512) as server:
        plain = Client(server.url)
        (long,), _ = plain.complete(LONG, ANSWER)
        follow = [*LONG, *long, 7, 8, 9]
        (turn,), _ = plain.complete(follow, 10)
        assert plain.count("guessed_tokens") == 0
    teach(folder, [long, turn], tmp_path / "taught")
    with serve(tmp_path / "taught", dtype, 512, *DRAFT) as server:
        drafting = Client(server.url)
        before = drafting.count("steps")
        assert drafting.complete(LONG, 1) == ([long[:1]], 0)
        assert drafting.count("steps") - before >= 3, "150 tokens in chunks of 64"
        (answer,), cached = drafting.complete(LONG, ANSWER)
        assert answer == long
        assert cached == 144, "the prompt's whole pages"
        assert 50 < drafting.count("accepted_tokens") < drafting.count("guessed_tokens")
        (answer,), cached = drafting.complete(follow, 10)
        assert answer == turn
        assert cached == 448, "150 tokens and the answer but for its last token, in whole pages"


def lone_answers(folder: Path) -> list[list[int]]:
    """What the quantised model says to each prompt of the crowd, without an engine."""
    model = load(folder, draft=False)
    runner = Runner(model)
    tokens = [list(prompt) for prompt in CROWD]
    best = [int(runner.prefill(state, prompt)[-1].argmax()) for state, prompt in enumerate(CROWD)]
    for _ in range(CROWDED):
        for one, token in zip(tokens, best, strict=True):
            one.append(token)
        rows = [runner.rows(state, one[-1:], len(one) - 1) for state, one in enumerate(tokens)]
        best = runner.run(*rows).argmax(-1).tolist()
    return [one[len(prompt) :] for one, prompt in zip(tokens, CROWD, strict=True)]


def test_requests_that_preempt_each_other(folder: Path, tmp_path: Path) -> None:
    """Prompts of 100 tokens take 7 pages of 16, with their answers 11, and there are 18.

    Two requests have too few however their steps lie, unless one starts 64 tokens after the other: the prompts come in
    one body and take two steps each.
    """
    expected = lone_answers(folder)
    teach(folder, expected, tmp_path / "taught")
    with serve(tmp_path / "taught", "bfloat16", 18 * 16, *DRAFT) as server:
        drafting = Client(server.url)
        answers, _ = drafting.complete(CROWD, CROWDED)
        assert answers == expected
        assert drafting.count("preemptions") > 0
        assert drafting.count("accepted_tokens") > 0
