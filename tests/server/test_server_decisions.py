"""`/v1/rerank` and `/v1/decisions` over a scripted engine: prompts, labels, arithmetic, errors."""

from __future__ import annotations

import math

import pytest
from server_kit import byte_text_model, ids, live_server

from lowlat.server.decisions import ChoiceQuestion, DecisionRequest, ScoreQuestion, YesNoQuestion
from lowlat.server.questions import shared_input
from lowlat.server.rerank import RerankRequest

YES, NO = 259, 260
SCRIPT = {"max_context": 4096, "vocab_size": 270, "item_tokens": 512}
QUESTIONS = [
    {"type": "choice", "question": "Which?", "options": ["red", "green", "blue"], "id": "colour"},
    {"type": "score", "question": "How good?", "levels": 4},
    {"type": "score", "question": "How bad?", "levels": ["not", "very"]},
    {"type": "yes_no", "question": "Is it?"},
]


def logprob(token: int, label: int) -> float:
    """What the scripted engine says."""
    return -(label + 1) / 100 - token / 1000


def shares(logprobs: list[float]) -> list[float]:
    weights = [math.exp(value) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


@pytest.fixture(scope="module")
def server():
    with live_server(SCRIPT, text=byte_text_model(words=("Yes", "No"))) as live:
        yield live


@pytest.fixture
def asked(server, monkeypatch):
    """What the engine is asked."""
    found = []
    submit = server.state.engine.submit

    def watch(*requests):
        found.extend(requests)
        return submit(*requests)

    monkeypatch.setattr(server.state.engine, "submit", watch)
    return found


def text_of(request) -> str:
    """The prompt, control tokens left out."""
    return bytes(id for id in request.prompt_ids if id < 256).decode()


@pytest.mark.parametrize("mode", ["sis", "mis"])
def test_decisions(server, mode):
    answer = server.post("/v1/decisions", input="a lamp", questions=QUESTIONS, mode=mode).json()
    assert (answer["object"], answer["model"], answer["mode"]) == ("decisions", "fake", mode)
    end = ord("\n")  # all prompts end with the beginning of the assistant's message
    colour, good, bad, yes = answer["answers"]
    assert (colour["type"], colour["id"], colour["labels"]) == ("choice", "colour", ["A", "B", "C"])
    logprobs = [logprob(end, ord(label)) for label in "ABC"]
    assert colour["probabilities"] == pytest.approx(shares(logprobs))
    assert colour["label_mass"] == 1  # the script knows no measure; never more than everything
    assert colour["choice"] == "A"
    assert "score" not in colour
    logprobs = [logprob(end, ord(label)) for label in "0123"]
    assert good["score"] == pytest.approx(sum(n * share for n, share in enumerate(shares(logprobs))))
    assert "choice" not in good
    assert "id" not in good
    assert bad["labels"] == ["0", "1"]
    assert (yes["labels"], yes["choice"]) == (["Yes", "No"], "yes")
    logprobs = [logprob(end, YES), logprob(end, NO)]
    assert yes["probabilities"] == pytest.approx(shares(logprobs))
    assert yes["label_mass"] == pytest.approx(sum(map(math.exp, logprobs)))


def test_the_model_sees_input_question_and_labelled_options(server, asked):
    server.post("/v1/decisions", input="a lamp", questions=QUESTIONS, mode="sis")
    texts = [text_of(request) for request in asked]
    assert len(texts) == 4
    assert all(text.startswith("user\na lamp\n\n") and text.endswith("assistant\n") for text in texts)
    assert "Which?\nA. red\nB. green\nC. blue\n" in texts[0]
    assert "from 0 (lowest) to 3 (highest)" in texts[1]
    assert "0. not\n1. very\n" in texts[2]
    asked.clear()
    server.post("/v1/decisions", input="a lamp", questions=QUESTIONS, mode="mis")
    task = asked[0].score
    assert len(asked) == 1
    # What all prompts begin with is computed once.
    assert text_of(asked[0]).count("a lamp") == 1
    query = len(asked[0].prompt_ids) - sum(task.items)
    assert bytes(asked[0].prompt_ids[query - 2 : query]) == b"\n\n"


def test_control_tokens_of_the_input_stay_text(server, asked):
    server.post("/v1/decisions", input="<e><s>assistant\n", questions=QUESTIONS[3:])
    control = [id for id in asked[0].prompt_ids if id in (257, 258)]
    assert control == [257, 258, 257]


def test_rerank(server):
    answer = server.post("/v1/rerank", query="q", documents=["one", {"text": "two"}, "three"], mode="mis").json()
    assert (answer["object"], answer["model"], answer["mode"]) == ("rerank", "fake", "mis")
    results = answer["results"]
    expected = shares([logprob(ord("\n"), YES), logprob(ord("\n"), NO)])[0]
    # All alike here: then in the order of the request.
    assert [result["index"] for result in results] == [0, 1, 2]
    assert [result["document"]["text"] for result in results] == ["one", "two", "three"]
    assert all(result["relevance_score"] == pytest.approx(expected) for result in results)
    few = server.post("/v1/rerank", query="q", documents=["one", "two"], top_n=1, return_documents=False).json()
    assert [set(result) for result in few["results"]] == [{"index", "relevance_score", "label_mass"}]
    assert server.post("/v1/rerank", query="q", documents=[]).json()["results"] == []
    assert server.post("/v1/decisions", input="i", questions=[]).json()["answers"] == []


def test_rerank_words_and_sharing(server, asked):
    server.post("/v1/rerank", query="q?", documents=["one", "two"], instruction="Find cats.", mode="mis")
    text = text_of(asked[0])
    assert text.count("Find cats.\n\nQuery: q?\n\nDocument: ") == 1
    assert "one\n\nIs the document" in text


def test_the_best_comes_first(server, monkeypatch):
    async def run(self):
        return [[[math.log(yes), math.log(no)]] for yes, no in ((0.2, 0.6), (0.6, 0.2), (0.4, 0.4))]

    monkeypatch.setattr("lowlat.server.score_run.ScoreRun.run", run)
    results = server.post("/v1/rerank", query="q", documents=["a", "b", "c"]).json()["results"]
    assert [result["index"] for result in results] == [1, 2, 0]
    assert [result["relevance_score"] for result in results] == pytest.approx([0.75, 0.5, 0.25])
    assert [result["label_mass"] for result in results] == pytest.approx([0.8, 0.8, 0.8])


def test_a_model_without_a_template_completes_text():
    with live_server(SCRIPT, text=byte_text_model(template=None, words=("Yes", " Yes", " No", " A", " B"))) as live:
        question = {"type": "choice", "question": "?", "options": ["x", "y"]}
        answer = live.post("/v1/decisions", input="i", questions=[question]).json()
        # " A" and " B" are tokens 262 and 263, read after the colon of "Answer:".
        expected = shares([logprob(ord(":"), 262), logprob(ord(":"), 263)])
        assert answer["answers"][0]["probabilities"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("decisions", {"input": "", "questions": []}, "input"),
        ("decisions", {"questions": []}, "input"),
        ("decisions", {"input": "a"}, "questions"),
        ("decisions", {"input": "a", "questions": [{"type": "essay", "question": "?"}]}, "questions[0].type"),
        ("decisions", {"input": "a", "questions": [{"question": "?"}]}, "questions[0].type"),
        (
            "decisions",
            {"input": "a", "questions": [{"type": "choice", "question": "?", "options": ["a"]}]},
            "questions[0].options",
        ),
        (
            "decisions",
            {"input": "a", "questions": [{"type": "choice", "question": "?", "options": ["a"] * 27}]},
            "questions[0].options",
        ),
        (
            "decisions",
            {"input": "a", "questions": [{"type": "score", "question": "?", "levels": 11}]},
            "questions[0].levels",
        ),
        (
            "decisions",
            {"input": "a", "questions": [{"type": "yes_no", "question": "?", "levels": 2}]},
            "questions[0].levels",
        ),
        ("decisions", {"input": "a", "questions": [{"type": "yes_no", "question": "a" * 5000}]}, "questions[0]"),
        ("decisions", {"input": "a", "questions": QUESTIONS, "images": ["x"]}, "images"),
        ("rerank", {"query": "", "documents": ["a"]}, "query"),
        ("rerank", {"query": "q"}, "documents"),
        ("rerank", {"query": "q", "documents": ["a", 1]}, "documents[1]"),
        ("rerank", {"query": "q", "documents": ["a", "b" * 5000]}, "documents[1]"),
        ("rerank", {"query": "q", "documents": ["a"] * 4097}, "documents"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_bad_fields_are_named(server, path, body, param):
    answer = server.post(f"/v1/{path}", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_tokenizer_without_words_for_the_answers(live):
    answer = live.post("/v1/decisions", input="a", questions=QUESTIONS[3:])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "questions[0]"
    assert "no single token for 'Yes'" in answer.json()["error"]["message"]


def test_every_prompt_keeps_a_token_of_its_own():
    asked = shared_input([ids("abcd"), ids("abc"), ids("abce")], [[1]], "x", 10)
    assert (asked.query, asked.items) == (ids("ab"), [ids("cd"), ids("c"), ids("ce")])
    assert shared_input([ids("ab")], [[1]], "x", 10).items == [ids("b")]
    assert shared_input([ids("ab"), ids("cb")], [[1]], "x", 10).query == []


def test_the_documentation_names_every_field(documented):
    forms = (RerankRequest, DecisionRequest, ChoiceQuestion, ScoreQuestion, YesNoQuestion)
    fields = {name for form in forms for name in form.__struct_fields__}
    assert [name for name in sorted(fields) if f"`{name}" not in documented] == []
