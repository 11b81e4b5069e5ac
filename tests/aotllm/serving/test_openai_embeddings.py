"""`/v1/embeddings` over ASGI and, with the official client, over a socket."""

from __future__ import annotations

import base64
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import Executor
from aotllm.serving.openai.embeddings import EmbeddingRequest
from tests.aotllm.byte_tokenizer import BOS
from tests.aotllm.fake_manager import FakeEngine, FakeManager
from tests.aotllm.serving.http_client import Ask, Client
from tests.aotllm.serving.test_http_fuzz import VALUES, bodies
from tests.aotllm.serving.test_http_server import Serve, client_of, serve

__all__ = ["serve"]  # a fixture

PATH = "/v1/embeddings"
MEAN = np.array([(BOS + 97) / 2, (BOS**2 + 97**2) / 2, 0, 1])
"""Of "a", before it is normalized: the fake model's hidden state of a token is [token, its square, adapter, 1]"""


def unit(vector: Any) -> list[float]:
    return (np.asarray(vector) / np.linalg.norm(vector)).tolist()  # type: ignore[no-any-return]


def test_an_answer(ask: Ask):
    body = ask(FakeManager(num_cached_tokens=1)).post(PATH, {"input": "a", "model": "m", "user": "u"}).json()
    assert body.pop("id").startswith("embd-")
    assert body.pop("created") > 0
    [data] = body.pop("data")
    assert data.pop("embedding") == pytest.approx(unit(MEAN))
    assert data == {"object": "embedding", "index": 0}
    assert body == {
        "object": "list",
        "model": "m",
        "usage": {
            "prompt_tokens": 2,
            "total_tokens": 2,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["ab", "c"], [(BOS, 97, 98), (BOS, 99)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_four_kinds_of_input(ask: Ask, given: object, tokens: list[tuple[int, ...]]):
    manager = FakeManager()
    body = ask(manager).post(PATH, {"input": given, "pooling": "last", "normalize": False}).json()
    assert [request.prompt_token_ids for request in manager.submitted] == tokens
    assert [(each["index"], each["embedding"][0]) for each in body["data"]] == [
        (index, float(ids[-1])) for index, ids in enumerate(tokens)
    ]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(map(len, tokens))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, unit(MEAN)),
        ({"normalize": False}, MEAN.tolist()),
        ({"pooling": "last"}, unit([97, 97**2, 0, 1])),
        ({"dimensions": 2}, unit(MEAN[:2])),
        ({"dimensions": 2, "normalize": False}, MEAN[:2].tolist()),
        ({"dimensions": 4}, unit(MEAN)),
        ({"add_special_tokens": False}, unit([97, 97**2, 0, 1])),
        ({"encoding_format": None, "dimensions": None, "pooling": None}, unit(MEAN)),
    ],
)
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_options(ask: Ask, options: dict[str, object], expected: list[float], encoding: str):
    body = ask(FakeManager()).post(PATH, {"input": "a", "encoding_format": encoding, **options}).json()
    got = body["data"][0]["embedding"]
    if isinstance(got, str):
        assert options.get("encoding_format", encoding) == "base64"
        got = np.frombuffer(base64.b64decode(got), "<f4").tolist()
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("given", "options", "tokens"),
    [
        ("abcd", {"truncate_prompt_tokens": 3}, (BOS, 97, 98)),
        ("abcd", {"truncate_prompt_tokens": 3, "truncation_side": "left"}, (98, 99, 100)),
        ([1, 2, 3, 4], {"truncate_prompt_tokens": 2}, (1, 2)),
        ([1, 2], {"truncate_prompt_tokens": 5}, (1, 2)),
        (list(range(1, 12)), {"truncate_prompt_tokens": -1}, tuple(range(1, 9))),
    ],
)
def test_truncation(ask: Ask, given: object, options: dict[str, object], tokens: tuple[int, ...]):
    manager = FakeManager(max_seq_len=8)
    response = ask(manager).post(PATH, {"input": given, **options})
    assert response.status_code == 200, response.text
    assert manager.submitted[0].prompt_token_ids == tokens


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "Field required"),
        ({"input": []}, "input", "1 to 4"),
        ({"input": ["a", ""]}, "input", "none of them empty"),
        ({"input": ["a"] * 5}, "input", "1 to 4"),
        ({"input": [[1], []]}, "input", "none of them empty"),
        ({"input": [260]}, "input", "token ids are integers from 0 to 259"),
        ({"input": "abcdefgh"}, "input", "maximum context length is 8 tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 5}, "dimensions", "between 1 and 4"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "pooling": "max"}, "pooling", "mean"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between 1 and 8"),
        ({"input": "a", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "between 1 and 8"),
        ({"input": "a", "retention_priority": 101}, "retention_priority", "100"),
    ],
    ids=str,
)
def test_what_is_refused(ask: Ask, body: dict[str, object], param: str, message: str):
    manager = FakeManager(max_seq_len=8)
    response = ask(manager, max_prompts=4).post(PATH, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not manager.running


def test_an_unknown_model(ask: Ask):
    assert ask(FakeManager()).post(PATH, {"input": "a", "model": "x"}).status_code == 404


def test_all_or_none(ask: Ask):
    manager = FakeManager(max_queue_size=2, stepping="by hand")
    response = ask(manager).post(PATH, {"input": ["a", "b", "c"]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert not manager.running


@pytest.mark.parametrize("encoding", [None, "float"])  # None: the client asks for base64 and decodes it
def test_the_official_client(serve: Serve, encoding: Any):
    client = client_of(serve(FakeManager()))
    options = {} if encoding is None else {"encoding_format": encoding}
    answer = client.embeddings.create(model="m", input=["a", "b"], **options)
    assert [each.index for each in answer.data] == [0, 1]
    assert answer.data[0].embedding == pytest.approx(unit(MEAN))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="m", input="a", dimensions=5)


def test_a_client_that_leaves_frees_its_requests(serve: Serve):
    manager = FakeManager(stepping="by hand")
    address = urlsplit(serve(manager))
    body = httpx.Request("POST", "http://x", json={"input": ["a", "b"]}).read()
    with closing(socket.create_connection((address.hostname, address.port))) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        manager.wait_until(lambda m: len(m.running) == 2)
    manager.wait_until(lambda m: not m.running)
    assert sorted(set(manager.cancelled)) == [1, 2]


def test_time_over_is_an_error(start: Callable[..., Executor]):
    class Slow(FakeManager):
        def submit(self, request: Any) -> int:
            request_id = super().submit(request)
            self.time_out(request_id)
            return request_id

    response = Client({"m": start(Slow(stepping="by hand"))}).post(PATH, {"input": "a", "timeout": 0.5})
    assert (response.status_code, response.json()["error"]["type"]) == (504, "TimeoutError")


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Client]:
    with Executor(FakeEngine(), manager_factory=lambda *_: FakeManager()) as executor:  # type: ignore[arg-type]
        yield Client({"m": executor})


@settings(deadline=None, max_examples=150)
@given(body=bodies(EmbeddingRequest, input=st.text(max_size=5) | VALUES))
def test_no_body_is_a_fault_of_the_server(fuzzed: Client, body: dict[str, object]):
    response = fuzzed.post(PATH, body)
    assert response.status_code in (200, 400), response.text
