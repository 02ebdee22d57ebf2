"""Faults of what a client reads: streamed text, stop rules, log-probabilities, scores, choices."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from faults_kit import at_rest, simulated_server, solo
from server_kit import byte_tokenizer, ids, live_server, scripted

from lowlat.text.output import OutputAssembler


@pytest.fixture(scope="module")
def live():
    with live_server() as server:
        yield server


@pytest.fixture(scope="module", params=[1, 4], ids=["plain", "guesses"])
def simulated(request):
    """The engine's own scheduler and cache, over a device without arithmetic; with and without speculative steps."""
    with simulated_server({"page_size": 32, "chunk_tokens": 16, "pages": 40, "width": request.param}) as server:
        yield server


def streamed(events):
    """Per index: everything that a stream's choices said, joined, and their finish reasons."""
    found: dict[int, dict] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "logprobs": {}, "reasons": []})
            one["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(values)
            if choice["finish_reason"]:
                one["reasons"].append(choice["finish_reason"])
    return found


def test_a01_what_was_sent_is_never_sent_again():
    """Half characters, spaces and texts that may become stop strings, in every cut of the bytes."""
    text = "A 世ab 世世 b"
    data = text.encode()
    for stops in ([], [" 世x"], ["世b", "b 世!"], ["世世世", " ?"]):
        for first in range(len(data)):
            for second in range(first, len(data)):
                assembler = OutputAssembler(byte_tokenizer(), stop=stops)
                sent = ""
                for part in (data[:first], data[first:second], data[second:]):
                    sent += assembler.push(list(part)).text
                    assert text.startswith(sent), "a part was sent twice or taken back"
                sent += assembler.push([], finish_reason="length").text
                assert sent == text


def test_a02_characters_stay_whole_in_streams_side_by_side(live):
    texts = ["ďábelské 🔥👋 社区", "Příliš žluťoučký 🐎 kůň", "日本語のテキスト"]

    def run(text):
        return [
            choice["text"]
            for event in live.events("/v1/completions", prompt=text, max_tokens=len(text.encode()))[:-1]
            for choice in event["choices"]
        ]

    with ThreadPoolExecutor(len(texts)) as pool:
        for text, deltas in zip(texts, pool.map(run, texts), strict=True):
            assert "".join(deltas) == text
            assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("burst", [1, 2, 3, 7])
def test_a04_a06_nothing_of_a_stop_string_leaks_and_all_ends_at_one_token(live, burst):
    """Bursts stand for accepted drafts: text, ids, log-probabilities and usage end where one token a step ends them."""
    body = scripted("DEFGHIJKLMN", burst=burst) | {
        "prompt": "Here is the English alphabet: ABC",
        "stop": ["DEFGHIJ"],
        "temperature": 0,
        "max_tokens": 50,
        "logprobs": 2,
        "return_token_ids": True,
    }
    whole = live.complete(**body)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "DEFGHIJ")
    assert choice["token_ids"] == ids("DEFGHIJ")
    assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == 7
    events = live.events("/v1/completions", **body)
    assert "".join(c["text"] for event in events[:-1] for c in event["choices"]) == ""
    kept = live.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "DEFGHIJ"


def test_a08_nothing_ends_an_answer_before_min_tokens(live):
    newlines = scripted("\n" * 30)
    body = {"prompt": "test/", "stop": ["\n"], "min_tokens": 20, "max_tokens": 25, "temperature": 0}
    answer = live.complete(**body | newlines)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (21, "stop")
    assert answer["choices"][0]["text"] == "\n" * 20
    refused = live.post("/v1/completions", **body | {"max_tokens": 19})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_a10_every_token_has_its_log_probability(simulated):
    prompt = [71, 72, 73]
    expected = solo(prompt, 40, ignore_eos=True)
    body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    choice = simulated.complete(**body)["choices"][0]
    assert choice["token_ids"] == expected
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([-0.01 * token for token in expected])
    assert {len(values) for values in logprobs.values()} == {40}
    assert streamed(simulated.events("/v1/completions", **body))[0]["logprobs"] == logprobs
    # A stop string that ends inside a burst: everything ends at its last token.
    for place in range(3, 30):
        stop = bytes(expected[place : place + 2]).decode()
        first = bytes(expected).decode().index(stop)
        ended = simulated.complete(**body, stop=stop)
        choice = ended["choices"][0]
        assert choice["token_ids"] == expected[: first + 2]
        assert choice["text"] == bytes(expected[:first]).decode()
        assert len(choice["logprobs"]["tokens"]) == ended["usage"]["completion_tokens"] == first + 2
    assert at_rest(simulated)


@pytest.mark.parametrize("burst", [1, 3, 5])
def test_a11_streamed_arrays_equal_the_whole_ones(live, burst):
    body = scripted("Hello World Foo é", burst=burst) | {
        "prompt": "Sag: ä",
        "echo": True,
        "logprobs": 2,
        "max_tokens": 12,
    }
    choice = live.complete(**body)["choices"][0]
    joined = streamed(live.events("/v1/completions", **body))[0]
    assert joined["text"] == choice["text"] == "Sag: äHello World "
    assert joined["logprobs"] == choice["logprobs"]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2] * (len(ids("Sag: ä")) + 11)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[len("Sag: ä".encode())] == len("Sag: ä"), "the answer's offsets begin behind the prompt"
    for offset, token in zip(offsets, choice["logprobs"]["tokens"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("length", [31, 32, 33, 65])
def test_a12_prompt_scores_are_whole_on_a_cache_hit(simulated, length):
    prompt = [(7 * n + length) % 250 for n in range(length)]
    body = {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 1, "ignore_eos": True, "return_token_ids": True}
    warm = simulated.complete(prompt=prompt, max_tokens=1, ignore_eos=True)
    again = simulated.complete(prompt=prompt, max_tokens=1, ignore_eos=True)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (length - 1) // 32 * 32, "the cache holds the prompt"
    first, second = simulated.complete(**body), simulated.complete(**body)
    table = first["choices"][0]["prompt_logprobs"]
    assert len(table) == length
    assert table[0] is None
    assert [entry[str(id)]["logprob"] for entry, id in zip(table[1:], prompt[1:], strict=True)] == pytest.approx(
        [-0.01 * id for id in prompt[1:]]
    )
    assert second["choices"] == first["choices"]
    assert first["choices"][0]["token_ids"] == solo(prompt, 1, ignore_eos=True)
    assert warm["choices"][0]["text"] == first["choices"][0]["text"]
    echo = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    logprobs = simulated.complete(**echo)["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs == [None, *(pytest.approx(-0.01 * id) for id in prompt[1:])]


def test_a14_infinity_never_reaches_json(live, simulated):
    """The alternatives of both engines here hold minus infinity, as masked tokens do."""

    def finite(text):
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in an answer"))

    body = {"prompt": "correct horse", "echo": True, "logprobs": 2, "temperature": 1, "top_k": 1, "max_tokens": 4}
    for server in (live, simulated):
        answer = server.post("/v1/completions", **body)
        assert answer.status_code == 200
        tops = finite(answer.content)["choices"][0]["logprobs"]["top_logprobs"]
        values = [value for top in tops[1:] for value in top.values()]
        assert -9999.0 in values
        assert all(isinstance(value, float | int) and value >= -9999 for value in values)
        with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            for line in stream.iter_lines():
                if line and line != "data: [DONE]":
                    finite(line.removeprefix("data: "))
    table = simulated.complete(prompt="ab", max_tokens=0, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert [candidate["logprob"] for candidate in table[1].values()] == [-9999.0, pytest.approx(-0.98)]


@pytest.mark.parametrize("prompt", ["Your answer: Yes", ids("Your answer: Yes")])
def test_a15_scoring_calls_hold_the_prompt_and_no_token_more(simulated, prompt):
    for max_tokens in (0, 1):
        body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "ignore_eos": True}
        answer = simulated.complete(**body)
        logprobs = answer["choices"][0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {16 + max_tokens}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["usage"]["prompt_tokens"] == 16
        assert answer["choices"][0]["text"].startswith("Your answer: Yes")
        assert max_tokens or answer["choices"][0]["text"] == "Your answer: Yes"
        joined = streamed(simulated.events("/v1/completions", **body))[0]
        assert joined["logprobs"] == logprobs
        assert joined["reasons"] == ["length"]
    assert at_rest(simulated)


def test_a30_every_choice_comes_once_with_one_ending(simulated):
    """Prompts whose answers end at different lengths, four choices each."""
    prompts = [[70 + n, 80 + n] for n in range(6)]
    expected = [solo(prompt, 30) for prompt in prompts]
    assert len({len(answer) for answer in expected}) > 1, "their lengths differ"
    body = {"prompt": prompts[:4], "n": 4, "max_tokens": 30, "return_token_ids": True}
    for _ in range(3):
        answer = simulated.complete(**body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(16))
        for choice in answer["choices"]:
            assert choice["token_ids"] == expected[choice["index"] // 4]
            assert choice["finish_reason"] in ("stop", "length")
        assert answer["usage"]["completion_tokens"] == 4 * sum(map(len, expected[:4]))
        assert answer["usage"]["prompt_tokens"] == 8, "each prompt counts once"
        found = streamed(simulated.events("/v1/completions", **body))
        assert sorted(found) == list(range(16))
        assert all(len(one["reasons"]) == 1 for one in found.values())
    stream = simulated.stream("/v1/completions", prompt=[90, 91], n=8, max_tokens=100, ignore_eos=True)
    next(stream)
    stream.close()
    assert at_rest(simulated), "leaving frees all choices"
