"""`/v1/chat/completions` over ASGI, down to the bytes of a stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aotllm.errors import Internal
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask, events

HI = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT_TOKENS = len(b"user\nhi\nassistant\n") + 3


def test_an_answer(ask: Ask):
    client = ask(FakeManager(says("né"), num_cached_tokens=2))
    response = client.post("/v1/chat/completions", {"messages": HI, "model": "m"})
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "né"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "total_tokens": NUM_PROMPT_TOKENS + 4,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_the_bytes_of_a_stream(ask: Ask):
    manager = FakeManager(says("né"), stepping="by hand")
    body = {"messages": HI, "model": "m", "stream": True}
    response = ask(manager).post_in_steps(manager, "/v1/chat/completions", body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = events(response.text)[0]
    head = f'"id":"{first["id"]}","created":{first["created"]},"model":"m","object":"chat.completion.chunk"'

    def chunk(delta: str, end: str = '"finish_reason":null') -> str:
        return f'data: {{{head},"choices":[{{"index":0,"delta":{{{delta}}},"logprobs":null,{end}}}]}}\n\n'

    assert response.text == "".join(
        [
            chunk('"role":"assistant","content":""'),
            chunk('"content":"n"'),
            chunk('"content":"é"'),  # two tokens, one character: never half of it
            chunk('"content":""', '"finish_reason":"stop","stop_reason":null'),
            "data: [DONE]\n\n",
        ]
    )


def test_usage_comes_last_when_asked_for(ask: Ask):
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(ask(FakeManager(says("ab"), num_cached_tokens=3)).post("/v1/chat/completions", body).text)
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_continuous_usage_counts_up(ask: Ask):
    body = {"messages": HI, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    manager = FakeManager(says("ab"), stepping="by hand")
    chunks = events(ask(manager).post_in_steps(manager, "/v1/chat/completions", body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_are_one_request_and_count_the_prompt_once(ask: Ask, stream: bool):
    manager = FakeManager(nth_answer=lambda request, index: f"{request.sampling.seed + index}".encode())
    body = {"messages": HI, "n": 3, "seed": 7, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = ask(manager).post("/v1/chat/completions", body)
    texts, reasons = {0: "", 1: "", 2: ""}, []
    if stream:
        chunks = events(response.text)
        roles = [c["choices"][0]["index"] for c in chunks[:-1] if "role" in c["choices"][0]["delta"]]
        assert sorted(roles) == [0, 1, 2]
        for chunk in chunks[:-1]:
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"]["content"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        usage = chunks[-1]["usage"]
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["message"]["content"]
            reasons.append(choice["finish_reason"])
        usage = response.json()["usage"]
    assert texts == {0: "7", 1: "8", 2: "9"}
    assert reasons == ["stop"] * 3
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT_TOKENS, 6)
    assert [request.n for request in manager.submitted] == [3]


def test_a_stop_string_is_not_streamed(ask: Ask):
    body = {"messages": HI, "stream": True, "stop": ["DEF"]}
    chunks = events(ask(FakeManager(says("ABCDEFG"))).post("/v1/chat/completions", body).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "ABC"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "DEF"


def test_logprobs_have_the_true_bytes_and_no_infinities(ask: Ask):
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    choice = ask(FakeManager(says("é"))).post("/v1/chat/completions", body).json()["choices"][0]
    token = {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]}
    assert choice["logprobs"] == {
        "content": [{**token, "top_logprobs": [token, {"token": "\0", "logprob": -9999.0, "bytes": [0]}]}]
    }
    assert choice["finish_reason"] == "length"


def test_streamed_logprobs_are_those_of_the_whole(ask: Ask):
    body = {"messages": HI, "logprobs": True}
    whole = ask(FakeManager(says("né"))).post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    text = ask(FakeManager(says("né"))).post("/v1/chat/completions", {**body, "stream": True}).text
    parts = [chunk["choices"][0]["logprobs"] for chunk in events(text)]
    assert [entry for part in parts if part for entry in part["content"]] == whole


def test_sampling_fields_reach_the_request(ask: Ask):
    manager = FakeManager(says("ok"))
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "stop_token_ids": [4]}
    ask(manager).post("/v1/chat/completions", {"messages": HI, "max_completion_tokens": 9, "max_tokens": 8, **fields})
    sampling = manager.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop_token_ids": (4,)}
    assert sampling.max_tokens == 9


def test_penalties_and_constraints_reach_the_request(ask: Ask):
    manager = FakeManager(says("ok"))
    fields = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "no_repeat_ngram_size": 3,
        "typical_p": 0.9,
        "min_tokens": 2,
        "logit_bias": {"97": -100, "8": 1.5},
        "allowed_token_ids": [97, 98],
        "bad_words": ["x"],
    }
    assert ask(manager).post("/v1/chat/completions", {"messages": HI, **fields}).status_code == 200
    sampling = manager.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields | {
        "logit_bias": ((8, 1.5), (97, -100.0)),
        "allowed_token_ids": (97, 98),
        "bad_words": ("x",),
    }
    assert manager.submitted[0].bad_words_token_ids == (tuple(b"x"), tuple(b" x"))


def test_null_means_not_set(ask: Ask):
    manager = FakeManager(says("ok"))
    names = (
        "temperature",
        "top_p",
        "stop",
        "seed",
        "max_tokens",
        "n",
        "stream",
        "tools",
        "response_format",
        "logit_bias",
    )
    nulls = dict.fromkeys(names)
    assert ask(manager).post("/v1/chat/completions", {"messages": HI, **nulls}).status_code == 200


def test_text_parts_are_joined(ask: Ask):
    manager = FakeManager(says("ok"))
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    client = ask(manager)
    client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    client.post("/v1/chat/completions", {"messages": HI})
    assert manager.submitted[0].prompt_token_ids == manager.submitted[1].prompt_token_ids


def test_a_failure_inside_a_stream_is_an_event_and_done_follows(ask: Ask):
    manager = FakeManager(lambda _: [ord("a"), Internal("KV pool lost")])
    response = ask(manager).post("/v1/chat/completions", {"messages": HI, "stream": True})
    assert response.status_code == 200
    assert events(response.text)[-1] == {
        "error": {"message": "KV pool lost", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


def test_a_failure_is_a_status_when_nothing_was_sent(ask: Ask):
    response = ask(FakeManager(lambda _: [Internal("KV pool lost")])).post("/v1/chat/completions", {"messages": HI})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "KV pool lost"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_server_cancels_is_told_to_try_again(ask: Ask, stream: bool):
    def answer(_: object) -> Iterator[int]:
        yield ord("a")
        manager.cancel(1)  # as shutdown does
        yield ord("b")

    manager = FakeManager(answer)
    response = ask(manager).post("/v1/chat/completions", {"messages": HI, "stream": stream})
    error = (events(response.text)[-1] if stream else response.json())["error"]
    assert (response.status_code, error["code"]) == (200 if stream else 503, 503)
    assert "shutting down" in error["message"]
