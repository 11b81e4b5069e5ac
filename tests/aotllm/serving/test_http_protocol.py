"""Bytes on a real socket: what is no HTTP, never ends, or asks for another protocol."""

from __future__ import annotations

import itertools
import json
import re
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from aotllm import Executor
from aotllm.serving import http_protocol
from aotllm.serving.http_protocol import MAX_HEAD_BYTES, write_part
from tests.aotllm.fake_manager import FakeManager, echoes
from tests.aotllm.serving.http_server import serving

Address = tuple[str, int]
BODY = b'{"prompt":"abc","max_tokens":4}'
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
IN_CHUNKS = b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])


@pytest.fixture
def address(start: Callable[..., Executor]) -> Iterator[Address]:
    with serving({"m": start(FakeManager(echoes))}) as url:
        parts = urlsplit(url)
        yield str(parts.hostname), int(parts.port or 0)


def get(headers: bytes = b"", path: bytes = b"/health") -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path, headers)


def post(headers: bytes, body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%s\r\n%s" % (headers, body)


def exchange(address: Address, *pieces: bytes) -> bytes:
    """What the server says to these pieces, each sent by itself, until it closes the connection."""
    with socket.create_connection(address, 60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answer = b""
        try:
            for piece in pieces:
                client.sendall(piece)
            while data := client.recv(65536):
                answer += data
        except (ConnectionResetError, BrokenPipeError):
            pass  # it did not want to read the rest
        return answer


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answer)]


CLOSE = b"Connection: close\r\n"
LAST = get(CLOSE)


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize(
    ("framing", "body"), [(LENGTH, BODY), (CHUNKED, IN_CHUNKS)], ids=["of known length", "in chunks"]
)
def test_an_upgrade_is_declined_and_the_body_is_read(address: Address, upgrade: bytes, framing: bytes, body: bytes):
    request = post(upgrade + framing, body)
    whole = exchange(address, request, LAST)
    assert statuses(whole) == [200, 200]
    assert b'"text":"' in whole
    cut = len(request) - len(body)
    for at in (cut, cut + 3, len(request) - 1):
        assert statuses(exchange(address, request[:at], request[at:], LAST)) == [200, 200]
    assert statuses(exchange(address, request + LAST)) == [200, 200]


@pytest.mark.parametrize("upgrade", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
def test_an_upgrade_of_a_get_is_declined(address: Address, upgrade: bytes):
    assert statuses(exchange(address, get(upgrade) * 3 + LAST)) == [200] * 4


def test_thousands_of_upgrades_in_a_row(address: Address):
    assert set(statuses(exchange(address, get(H2C) * 2_000, LAST))) == {200}


LONG = b"a" * MAX_HEAD_BYTES
ENDLESS = {
    "header": [b"GET / HTTP/1.1\r\nX: ", *[LONG] * 100],
    "name of a header": [b"GET / HTTP/1.1\r\n", *[LONG] * 100],
    "request line": [b"GET /", *[LONG] * 100],
    "headers": [b"GET / HTTP/1.1\r\n", *[b"X: y\r\n" * 10_000] * 100],
    "headers of a later request": [get(), b"GET / HTTP/1.1\r\n", *[b"X: y\r\n" * 10_000] * 100],
}


@pytest.mark.parametrize("part", ENDLESS)
def test_a_head_without_end_is_refused(address: Address, part: str):
    first, *rest = ENDLESS[part]
    with socket.create_connection(address, 60) as client, pytest.raises((ConnectionResetError, BrokenPipeError)):
        client.sendall(first)
        for piece in rest * 10:  # more than sockets hold
            client.sendall(piece)
        client.recv(1)
        client.recv(1 << 20)
        client.sendall(b"x")
    assert statuses(exchange(address, LAST)) == [200]


def test_a_head_that_is_too_long_is_told_so(address: Address):
    answer = exchange(address, b"GET / HTTP/1.1\r\nX: ", LONG)
    assert statuses(answer) == [431]
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["type"]) == (431, "BadRequestError")
    assert str(MAX_HEAD_BYTES) in error["message"]


NO_HTTP = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "an unknown method": b"FOO / HTTP/1.1\r\n\r\n",
    "CONNECT": b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n",
    "two lengths": post(b"Content-Length: 2\r\nContent-Length: 3\r\n", b"{}"),
    "a length and chunks": post(LENGTH + CHUNKED, IN_CHUNKS),
    "a negative length": post(b"Content-Length: -1\r\n", b"{}"),
    "a length of 30 digits": post(b"Content-Length: %d\r\n" % 10**30, b"{}"),
    "a chunk of no length": post(CHUNKED, b"ZZ\r\n"),
    "a chunk of 30 digits": post(CHUNKED, b"F" * 30 + b"\r\n"),
    "a chunk of no length after an upgrade": post(H2C + CHUNKED, b"ZZ\r\n"),
    "a blank before the colon": get(b"A : b\r\n"),
    "a folded header": get(b"A: b\r\n c\r\n"),
    "a null byte": get(b"A: \0\r\n"),
}


@pytest.mark.parametrize("case", NO_HTTP)
def test_what_is_no_http_is_refused(address: Address, case: str):
    answer = exchange(address, NO_HTTP[case])
    assert statuses(answer) == [400]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 400


SILENT = {
    "nothing": b"",
    "half a head": b"GET /health HTT",
    "half a body": post(LENGTH, BODY[:5]),
    "half a body after an upgrade": post(H2C + LENGTH, BODY[:5]),
    "half a chunk": post(CHUNKED, IN_CHUNKS[:6]),
}


@pytest.mark.parametrize("case", SILENT)
def test_who_falls_silent_is_given_up(address: Address, monkeypatch: pytest.MonkeyPatch, case: str):
    monkeypatch.setattr(http_protocol, "IDLE_SECONDS", 0.05)
    assert statuses(exchange(address, SILENT[case])) in ([], [200])


def test_who_leaves_with_requests_in_the_pipeline_frees_the_running_one(start: Callable[..., Executor]):
    manager = FakeManager(lambda request: itertools.cycle(b"x"), stepping="by hand")
    endless = b'{"prompt":"a","max_tokens":4000,"stream":true,"ignore_eos":true}'
    with serving({"m": start(manager)}) as url:
        parts = urlsplit(url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), 60) as client:
            client.sendall(post(b"Content-Length: %d\r\n" % len(endless), endless) + LAST * 3)
            manager.wait_until(lambda m: m.running)
            manager.step()
            assert client.recv(1)
        manager.wait_until(lambda m: not m.running)


def test_who_waits_for_an_answer_is_not(start: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_protocol, "IDLE_SECONDS", 0.01)
    looks: list[float] = []
    look = http_protocol.HttpProtocol._look
    monkeypatch.setattr(http_protocol.HttpProtocol, "_look", lambda self: (looks.append(0), look(self)))
    manager = FakeManager(echoes, stepping="by hand")
    with serving({"m": start(manager)}) as url:
        parts = urlsplit(url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), 60) as client:
            client.sendall(post(LENGTH + CLOSE, BODY))
            manager.wait_until(lambda m: m.running)
            seen = len(looks)
            while len(looks) < seen + 5:
                pass
            while manager.running:
                manager.step_and_wait()
            answer = b""
            while data := client.recv(65536):
                answer += data
    assert statuses(answer) == [200]


class Writer:
    """In place of a transport."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


def cycle(**changes: Any) -> Any:
    """A request that is being answered in chunks."""
    state = {"chunked_encoding": True, "disconnected": False, "response_complete": False, "transport": Writer()}
    return SimpleNamespace(**{**state, "flow": SimpleNamespace(write_paused=False), **changes})


def test_a_part_of_an_answer_is_a_chunk():
    answered = cycle()
    assert write_part(answered, b"data: 0123456789abcdef\n\n")
    assert answered.transport.written == b"18\r\ndata: 0123456789abcdef\n\n\r\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"chunked_encoding": None},
        {"disconnected": True},
        {"response_complete": True},
        {"flow": SimpleNamespace(write_paused=True)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_part_that_has_to_wait_or_comes_too_late_is_not_written(changes: dict[str, Any]):
    answered = cycle(**changes)
    assert not write_part(answered, b"x")
    assert answered.transport.written == b""
