"""`/v1/completions` over ASGI."""

from __future__ import annotations

import pytest

from tests.aotllm.byte_tokenizer import BOS
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.serving.http_client import Ask, events


def test_an_answer(ask: Ask):
    body = ask(FakeManager(says("sea"))).post("/v1/completions", {"prompt": "a", "model": "m"}).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "sea", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 6,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream(ask: Ask):
    body = {"prompt": "a", "stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    chunks = events(ask(FakeManager(says("sea"))).post("/v1/completions", body).text)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "s", "logprobs": None, "finish_reason": None, "stop_reason": None}],
        [{"index": 0, "text": "e", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        [],
    ]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        ([97, 98], ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_four_kinds_of_prompt(ask: Ask, prompt: object, texts: list[str], stream: bool):
    response = ask(FakeManager(echoes)).post("/v1/completions", {"prompt": prompt, "stream": stream, "n": 2})
    got = [""] * (2 * len(texts))
    for chunk in events(response.text) if stream else [response.json()]:
        for choice in chunk["choices"]:
            got[choice["index"]] += choice["text"]
    assert got == [text for text in texts for _ in range(2)]  # prompt-major


@pytest.mark.parametrize(("add", "tokens"), [(None, (BOS, 97)), (True, (BOS, 97)), (False, (97,))])
def test_bos_is_added_to_text_unless_told_otherwise(ask: Ask, add: bool | None, tokens: tuple[int, ...]):
    manager = FakeManager(says("ok"))
    ask(manager).post("/v1/completions", {"prompt": "a"} | ({} if add is None else {"add_special_tokens": add}))
    assert manager.submitted[0].prompt_token_ids == tokens


def test_sixteen_tokens_unless_told_otherwise(ask: Ask):
    manager = FakeManager(says("x" * 100))
    body = ask(manager).post("/v1/completions", {"prompt": "a"}).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("x" * 16, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "text"), [("né", "néok"), (list("né".encode()), "néok")])
def test_echo(ask: Ask, prompt: object, text: str, stream: bool):
    response = ask(FakeManager(says("ok"))).post("/v1/completions", {"prompt": prompt, "echo": True, "stream": stream})
    chunks = events(response.text) if stream else [response.json()]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(ask: Ask, stream: bool):
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 2, "stream": stream}
    response = ask(FakeManager(says("xy"))).post("/v1/completions", body)
    merged: dict[str, list[object]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for chunk in events(response.text) if stream else [response.json()]:
        for name, values in chunk["choices"][0]["logprobs"].items():
            merged[name] += values
    assert merged == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["x", "y"],
        "top_logprobs": [{"x": -0.5, "\0": -9999.0}, {"y": -0.5, "\0": -9999.0}],
    }
