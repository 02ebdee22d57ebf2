"""`lowlat chat --url`: the terminal's side of a streamed chat, against a live server."""

import pytest
from server_kit import live_server, wait_for

from lowlat.cli.remote import RemoteError, remote_answer
from lowlat.engine.request import SamplingParams

MESSAGES = [{"role": "user", "content": "h\u00e9"}]
SAMPLING = SamplingParams(
    max_tokens=9, temperature=0.5, top_k=3, seed=1, min_p=0.1, repetition_penalty=1.1, presence_penalty=1, min_tokens=2
)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_pieces_join_to_the_answer(live, suffix):
    pieces = list(remote_answer(live.url + suffix, SAMPLING, None)(MESSAGES))
    assert "".join(pieces) == live.chat("h\u00e9", max_tokens=9)["choices"][0]["message"]["content"]


def test_leaving_early_cancels():
    with live_server({"hold_after": 5}) as live:
        answer = remote_answer(live.url, SamplingParams(max_tokens=100), None)(MESSAGES)
        next(answer)
        answer.close()
        wait_for(lambda: live.metric('lowlat_sequences_total{finish_reason="abort"}') == 1)


def test_refusals_and_missing_servers_are_told():
    with live_server(api_keys=("k",)) as live:
        assert list(remote_answer(live.url, SAMPLING, "k")(MESSAGES))
        with pytest.raises(RemoteError, match=r"API key.*LOWLAT_API_KEY"):
            list(remote_answer(live.url, SAMPLING, None)(MESSAGES))
        with pytest.raises(RemoteError, match="no room"):
            list(remote_answer(live.url, SAMPLING, "k")([{"role": "user", "content": "x" * 200}]))
    with pytest.raises(RemoteError, match="Is a server running there"):
        list(remote_answer(live.url, SAMPLING, None)(MESSAGES))
