"""`/v1/tokenize` and `/v1/detokenize`: the ids that the generating routes compute, and back."""

import pytest
from server_kit import END, EOS, START, byte_text_model, ids, live_server

from lowlat.server.tokenize import DetokenizeRequest, TokenizeRequest


def test_a_chat_has_the_ids_of_the_chat_route(live):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi <s> é"}]
    answer = live.post("/v1/tokenize", messages=messages).json()
    sent = live.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True).json()
    assert answer["tokens"] == sent["choices"][0]["prompt_token_ids"]
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 128
    bare = live.post("/v1/tokenize", messages=messages, add_generation_prompt=False).json()["tokens"]
    assert answer["tokens"] == [*bare, START, *ids("assistant\n")]
    assert bare[-1] == END


def test_a_prompt_has_the_ids_of_the_completions_route():
    with live_server(text=byte_text_model(bos=True)) as server:
        sent = server.complete(prompt="aé", max_tokens=1, return_token_ids=True)
        answer = server.post("/v1/tokenize", prompt="aé", return_token_strs=True).json()
        assert answer["tokens"] == sent["choices"][0]["prompt_token_ids"] == [START, *ids("aé")]
        assert answer["token_strs"] == ["<s>", "a", "bytes:\\xc3", "bytes:\\xa9"]
        assert server.post("/v1/tokenize", prompt="aé", add_special_tokens=False).json()["tokens"] == ids("aé")
        assert server.post("/v1/tokenize", prompt="").json()["tokens"] == [START]


def test_there_and_back(live):
    text = "two words, 世界\n"
    tokens = live.post("/v1/tokenize", prompt=text).json()["tokens"]
    assert live.post("/v1/detokenize", tokens=tokens).json()["prompt"] == text
    assert live.post("/v1/detokenize", tokens=[97, EOS]).json()["prompt"] == "a<eos>"
    assert live.post("/v1/detokenize", tokens=[97, EOS], skip_special_tokens=True).json()["prompt"] == "a"
    assert live.post("/v1/detokenize", tokens=[]).json()["prompt"] == ""
    assert live.post("/v1/detokenize", tokens=[97] * 20_000).json()["prompt"] == "a" * 20_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("tokenize", {"text": "a"}, "text"),
        ("detokenize", {"tokens": [1, 260]}, "tokens[1]"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_bad_fields_are_named(live, path, body, param):
    answer = live.post(f"/v1/{path}", **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    # msgspec writes "..." for an index.
    assert error["param"] in (param, param.replace("[0]", "[...]")), error


def test_keys_and_model_names_hold_here_too(live):
    assert live.post("/v1/tokenize", prompt="a", model="other").status_code == 404
    with live_server(api_keys=("secret",)) as server:
        for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
            assert server.post(f"/v1/{path}", **body).status_code == 401
            allowed = server.http.post(f"/v1/{path}", json=body, headers={"authorization": "Bearer secret"})
            assert allowed.status_code == 200


def test_the_documentation_names_every_field(documented):
    fields = {*TokenizeRequest.__struct_fields__, *DetokenizeRequest.__struct_fields__} - {"model"}
    assert [name for name in sorted(fields) if f"`{name}`" not in documented] == []
