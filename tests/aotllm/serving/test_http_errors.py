"""What clients are told when something is wrong: status, body, parameter."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

import aotllm
from aotllm import Executor
from aotllm.serving.options import ServingOptions
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says
from tests.aotllm.serving.http_client import Ask, Client

HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

BAD_REQUESTS = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    (CHAT, {"messages": HI, "temperature": -1}, "temperature"),
    (CHAT, {"messages": HI, "temperature": "hot"}, "temperature"),
    (CHAT, {"messages": HI, "top_p": 0}, "top_p"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "n": 0}, "n"),
    (CHAT, {"messages": HI, "n": 1000}, "n"),
    (CHAT, {"messages": HI, "stop": ["x"] * 17}, "stop"),
    (CHAT, {"messages": HI, "presence_penalty": 3}, "presence_penalty"),
    (CHAT, {"messages": HI, "repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 101}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"a": 1}}, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": [1]}, "logit_bias"),
    (CHAT, {"messages": HI, "allowed_token_ids": []}, "allowed_token_ids"),
    (CHAT, {"messages": HI, "bad_words": [""]}, "bad_words"),
    (CHAT, {"messages": HI, "min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "logprobs"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": [1, "a"]}, "prompt"),
    (TEXT, {"prompt": ["a"] * 1025}, "prompt"),
    (TEXT, {"prompt": [99999]}, "prompt_token_ids"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": -1, "echo": True}, "max_tokens"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "best_of": 129}, "best_of"),
    (TEXT, {"prompt": "a", "timeout": 0}, "timeout"),
    (TEXT, {"prompt": "a", "timeout": "long"}, "timeout"),
    (TEXT, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (TEXT, {"prompt": "a", "retention_priority": 101}, "retention_priority"),
    (TEXT, {"prompt": "a", "priority": 2**31}, "priority"),
    (TEXT, {"prompt": "a", "length_penalty": 2}, "length_penalty"),
    (TEXT, {"prompt": "a", "beam_width": 2}, "beam_width"),
    (TEXT, {"prompt": "a", "early_stopping": "never"}, "early_stopping"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "stream": True}, "stream"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "n": 3, "beam_width": 2}, "n"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "n": 100}, "beam_width"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "stop": "b"}, "stop"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "best_of": 3}, "best_of"),
    (TEXT, {"prompt": "a", "use_beam_search": True, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    (TEXT, {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
]

UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "continue_final_message": True,
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
}

HARMLESS = {
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "best_of": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "use_beam_search": False,
    "parallel_tool_calls": True,
    "user": "me",
    "metadata": {"a": 1},
    "service_tier": "auto",
    "something_new": [1, 2],
}


@pytest.mark.parametrize(("path", "body", "param"), BAD_REQUESTS)
def test_bad_requests(ask: Ask, path: str, body: dict[str, object], param: str):
    response = ask(FakeManager(says("ok"))).post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"], error["param"]) == (400, 400, "BadRequestError", param)
    assert error["message"]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_would_change_the_answer_and_is_not_there_is_refused(ask: Ask, name: str):
    response = ask(FakeManager(says("ok"))).post(CHAT, {"messages": HI, name: UNSUPPORTED[name]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)
    assert name in response.json()["error"]["message"]


def test_what_would_not_change_the_answer_is_ignored(ask: Ask):
    assert ask(FakeManager(says("ok"))).post(CHAT, {"messages": HI, **HARMLESS}).status_code == 200


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b'"text"', "application/json"),
        (b"null", "application/json"),
        (b"", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b'{"prompt":"\\ud800"}', "application/json"),
        (b'{"prompt":"a","cache_salt":"\\ud800"}', "application/json"),
        (b'{"prompt":"a","stop":"\\ud800"}', "application/json"),
        (b"prompt=a", "application/x-www-form-urlencoded"),
        (b'{"prompt":"a"}', "text/plain"),
        (b"[" * 100_000, "application/json"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "application/json"),
        (b'{"prompt":"a","temperature":NaN}', "application/json"),
        (b'{"prompt":"a","temperature":1e999}', "application/json"),
    ],
)
def test_bodies_that_are_no_request(ask: Ask, content: bytes, content_type: str):
    response = ask(FakeManager(says("ok"))).request(
        "POST", TEXT, content=content, headers={"Content-Type": content_type}
    )
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_model_whose_name_is_no_unicode_is_not_found(ask: Ask):
    content = b'{"prompt":"a","model":"\\ud800"}'
    response = ask(FakeManager()).request("POST", TEXT, content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_a_context_that_is_too_long_says_so_in_the_words_that_clients_look_for(ask: Ask):
    response = ask(FakeManager(says("ok"), max_seq_len=50)).post(TEXT, {"prompt": "a" * 60})
    assert response.status_code == 400
    assert "maximum context length is 50 tokens" in response.json()["error"]["message"]


def test_a_body_is_not_read_for_ever(ask: Ask):
    client = ask(FakeManager(says("ok")))
    chunk, sent = b" " * (1 << 20), 0

    async def endless_body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += len(chunk)
            yield chunk

    headers = {"Content-Type": "application/json"}
    response = client.request("POST", TEXT, content=endless_body(), headers=headers)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "ContentTooLargeError")
    assert sent <= ServingOptions().max_body_bytes + len(chunk)


def test_an_unknown_model(ask: Ask):
    response = ask(FakeManager(says("ok"))).post(TEXT, {"prompt": "a", "model": "other"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert "The model `other` does not exist" in error["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", CHAT, 405)])
def test_unknown_routes_have_our_body_too(ask: Ask, method: str, path: str, status: int):
    response = ask(FakeManager(says("ok"))).request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, status)


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_503_with_a_hint_and_leaves_nothing_running(ask: Ask, stream: bool):
    manager = FakeManager(lambda _: itertools.repeat(97), stepping="by hand", max_queue_size=2)
    response = ask(manager).post(TEXT, {"prompt": ["a", "b", "c"], "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["type"] == "ServiceUnavailableError"
    assert not manager.running


def test_a_server_that_shuts_down_says_503(start, ask: Ask):
    executor = start(FakeManager(says("ok")))
    client = Client({"m": executor})
    executor.shutdown()
    assert client.post(TEXT, {"prompt": "a"}).status_code == 503
    assert client.get("/health").status_code == 503


def test_a_fault_of_the_server_shows_no_internals(ask: Ask):
    manager = FakeManager(says("ok"))
    manager.submit = lambda request: 1 / 0
    response = ask(manager).post(TEXT, {"prompt": "a"})
    assert response.status_code == 500
    assert "Traceback" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"


def test_a_base_model_refuses_chats(ask: Ask):
    response = ask(FakeManager(says("ok")), FakeEngine(chat=False)).post(CHAT, {"messages": HI})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize(
    ("authorization", "status"),
    [(None, 401), ("Bearer wrong", 401), ("Bearer", 401), ("Basic one", 401), ("Bearer one", 200), ("bearer two", 200)],
)
def test_api_keys(ask: Ask, authorization: str | None, status: int):
    headers = {"Authorization": authorization} if authorization else {}
    client = ask(FakeManager(says("ok")), api_key=("one", "two"))
    response = client.post(TEXT, {"prompt": "a"}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json() == {"error": "Unauthorized"}
    assert client.get("/health").status_code == 200


def test_health_version_models(start):
    executors: dict[str, Executor] = {name: start(FakeManager(says(name), max_seq_len=77)) for name in ("a", "b/c")}
    client = Client(executors)
    health = client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    assert client.get("/version").json() == {"version": aotllm.__version__}
    listing = client.get("/v1/models").json()
    assert listing["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listing["data"]] == [
        ("a", "model", 77),
        ("b/c", "model", 77),
    ]
    assert client.get("/v1/models/b/c").json() == listing["data"][1]
    assert client.get("/v1/models/x").status_code == 404
    for name in executors:
        assert client.post(TEXT, {"prompt": "p", "model": name}).json()["choices"][0]["text"] == name


def test_the_schema_of_the_api_can_be_had(ask: Ask):
    document = ask(FakeManager(says("ok"))).get("/openapi.json").json()
    fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "Divides the logits" in fields["temperature"]["description"]
