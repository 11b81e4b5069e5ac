"""What a server says of itself, and local tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.conversation import Message
from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.target import ServedModelCard, calibrate, find_model, local_tokenizer, probe
from aotllm.bench.words import COMMON_WORDS, Words
from aotllm.errors import AotllmError, InvalidRequest
from tests.aotllm.bench.socket_server import Request, SocketServer, http

CARDS = b'{"data":[{"id":"a","max_model_len":512},{"id":"b"}]}'


@pytest.mark.parametrize(
    ("answer", "name", "card"),
    [
        (http(CARDS), None, ServedModelCard("a", 512)),
        (http(CARDS), "b", ServedModelCard("b", None)),
        (http(CARDS), "hidden", ServedModelCard("hidden", None)),
        (http(b"", "404 Not Found"), "c", ServedModelCard("c", None)),
        (http(b"[]"), "c", ServedModelCard("c", None)),
    ],
)
def test_the_model(answer: bytes, name: str | None, card: ServedModelCard):
    server = SocketServer(lambda request: answer)
    assert server.run(lambda port: find_model(HttpClient(f"http://127.0.0.1:{port}"), name)) == card


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data":[]}', b'{"data":[{}]}', b'{"data":5}', b"<html>"])
def test_no_model_is_an_error_that_says_what_to_do(body: bytes):
    server = SocketServer(lambda request: http(body))
    with pytest.raises(AotllmError, match="name the model with --model"):
        server.run(lambda port: find_model(HttpClient(f"http://127.0.0.1:{port}"), None))


class Picky:
    """A server that refuses some options."""

    name = "picky"

    def __init__(self, refused: set[str], kind: str = "http_400") -> None:
        self.refused, self.kind, self.asked = refused, kind, 0

    async def generate(
        self, messages: list[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        self.asked += 1
        for name in self.refused:
            if getattr(settings, name):
                raise RequestFailed(self.kind, f"no {name}")
        record.usage(3 * len(messages[-1].text.split()) + 11, 1, None)

    async def close(self) -> None:
        pass


ALL = RequestSettings("m", ignore_eos=True, continuous_usage=True)


@pytest.mark.parametrize("refused", [set(), {"continuous_usage"}, {"continuous_usage", "ignore_eos"}], ids=str)
def test_what_the_server_refuses_is_left_out_and_told(refused: set[str]):
    told: list[str] = []
    server = SocketServer(lambda request: None)
    settings, _ = server.run(lambda port: probe(Picky(refused), ALL, told.append))
    left_out = {name for name in ("ignore_eos", "continuous_usage") if not getattr(settings, name)}
    assert left_out == refused
    assert len(told) == len(refused)


@pytest.mark.parametrize(("kind", "asked"), [("http_503", 1), ("http_401", 1), ("http_400", 4)])
def test_a_server_that_refuses_everything_is_not_measured(kind: str, asked: int):
    backend = Picky({"model"}, kind)
    with pytest.raises(RequestFailed, match="no model"):
        SocketServer(lambda request: None).run(lambda port: probe(backend, ALL, lambda line: None))
    assert backend.asked == asked


def calibrated(answer: bytes | None) -> Words:
    server = SocketServer(lambda request: answer)
    return server.run(lambda port: calibrate(Picky(set()), ALL, HttpClient(f"http://127.0.0.1:{port}"), None))


@pytest.mark.parametrize("answer", [None, http(b"{}", "404 Not Found"), http(b'{"count":7}'), http(b'{"tokens":[1]}')])
def test_without_a_tokenizer_that_counts_the_usage_does(answer: bytes | None):
    words = calibrated(answer)
    assert (words.tokens_per_word, words.origin) == (3.0, "calibrated by the server's usage")


def test_a_tokenizer_that_takes_short_texts_only_is_not_asked_on():
    def answer(request: Request) -> bytes:
        words = json.loads(request.body)["prompt"].split()
        return http(b'{"count":%d}' % len(words)) if len(words) < 9 else http(b"{}", "400 Bad Request")

    server = SocketServer(answer)
    words = server.run(lambda port: calibrate(Picky(set()), ALL, HttpClient(f"http://127.0.0.1:{port}"), None))
    assert words.origin == "calibrated by the server's usage"


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    """A token for each word but those with an s, which are unknown letter by letter: two tokens at least."""
    vocab = {word: index for index, word in enumerate(["?", *(w for w in COMMON_WORDS if "s" not in w)])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Split("s", "isolated")]
    )
    tokenizer.enable_truncation(5)  # for training; a prompt of six words must not be five tokens
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_local_tokenizer(tokenizer_file: Path):
    for path in (tokenizer_file, tokenizer_file.parent):
        count = local_tokenizer(path)
        assert count("the wind and the rain again") == 6
        assert count("cost") == 3
    words = SocketServer(lambda request: None).run(lambda port: calibrate(Picky(set()), ALL, None, count))
    assert words.tokens_per_word == 1.0
    assert not [word for word in words.words if "s" in word[:-1]]


@pytest.mark.parametrize("content", [None, "{}", "x"])
def test_what_is_no_tokenizer(tmp_path: Path, content: str | None):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match="--tokenizer"):
        local_tokenizer(path)
