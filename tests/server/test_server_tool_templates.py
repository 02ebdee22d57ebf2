"""What a chat template sees of tools, of calls made before, and of their answers."""

from __future__ import annotations

import json

from server_kit import Live
from tools_kit import TIME, WEATHER, nest, past_call, tool_server

from lowlat.text.tool_calls.formats import AnswerFormats

TOOLS = [WEATHER, TIME]


def test_the_template_sees_tools_calls_and_answers(server: Live) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"A <e>"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "21"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True}}
    ids = server.post("/v1/tokenize", **body).json()["tokens"]
    text = server.post("/v1/detokenize", tokens=ids).json()["prompt"]
    tools, _, rest = text.removeprefix("<s>tools\n").partition("<e>")
    assert json.loads(tools) == WEATHER
    assert rest == (
        "<s>user\nq<e><s>assistant\n(hm)"
        '[call weather {"city": "A <e>"}]<e><s>tool\n21[answers c1]<e><think on><s>assistant\n'
    )
    sent = server.post("/v1/chat/completions", **body, max_tokens=1, return_token_ids=True).json()
    assert sent["choices"][0]["prompt_token_ids"] == ids
    # What looked like a control token in the arguments stayed text.
    assert ids.count(258) == 4


def test_a_template_that_knows_no_tools_gets_words(server: Live) -> None:
    plain = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}<s>assistant\n"
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the weather in Paris?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}},
                {"id": "c2", "function": {"name": "time", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    with tool_server(template=plain) as live:
        ids = live.post("/v1/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
        text = live.post("/v1/detokenize", tokens=ids).json()["prompt"]
        assert text.startswith("<s>system\nBe brief.\n\nYou may call functions")
        assert '"name": "weather", "description": "The weather in a city."' in text
        assert text.endswith(
            "<s>assistant\nI look.\n"
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call><e>'
            "<s>user\n<tool_response>\n21 degrees\n</tool_response>\n<tool_response>\nnoon\n</tool_response><e>"
            "<s>assistant"
        )
        assert live.post("/v1/chat/completions", messages=messages[:2], tools=TOOLS).json()["choices"][0]["message"][
            "tool_calls"
        ]
    with tool_server(AnswerFormats("llama3"), template=plain) as live:
        answer = live.post("/v1/chat/completions", messages=messages, tools=TOOLS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "tools_unsupported")


def test_templates_that_want_arguments_as_text_get_them() -> None:
    text = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ 'call ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    with tool_server(template=text + "{{ tools }}") as live:
        call = {"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}
        ids = live.post("/v1/tokenize", messages=[{"role": "assistant", "tool_calls": [call]}]).json()["tokens"]
        assert bytes(ids).decode() == 'call {"a": 1}None'


def test_values_as_deep_as_allowed_go_through_a_template(server: Live) -> None:
    messages = [{"role": "user", "content": "q"}, past_call(nest(128))]
    for fields in ({}, {"chat_template_kwargs": {"a": nest(128)}}):
        answer = server.post("/v1/chat/completions", messages=messages, max_tokens=3, **fields)
        assert answer.status_code == 200, answer.text
