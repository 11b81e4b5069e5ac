"""HTTP/1.1 byte by byte, with the time of each piece."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import pytest

from aotllm.bench.http_connection import HttpConnection
from aotllm.bench.record import RequestFailed
from aotllm.bench.sse import EventDecoder

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True


class Sink:
    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, dict(headers)

    def data(self, data: bytes, now: float) -> None:
        self.pieces.append((now, data))


def exchange(pieces: Sequence[bytes], end: Callable[[HttpConnection], None] = lambda _: None):
    """The answer to a request in pieces that come at times 1, 2, …"""
    now = 0.0
    connection, transport, sink = HttpConnection(lambda: now), Transport(), Sink()

    async def work() -> None:
        nonlocal now
        connection.connection_made(transport)
        asking = asyncio.ensure_future(connection.exchange(b"GET / HTTP/1.1\r\n\r\n", sink))
        await asyncio.sleep(0)
        assert transport.written == b"GET / HTTP/1.1\r\n\r\n"
        for piece in pieces:
            now += 1
            connection.data_received(piece)
        end(connection)
        await asyncio.wait_for(asking, 10)

    asyncio.run(work())
    return connection, transport, sink


def test_each_piece_has_the_time_of_its_arrival():
    connection, transport, sink = exchange([STREAM, b"3\r\nabc\r\n", b"2\r\nde\r\n1\r\nf\r\n", b"0\r\n\r\n"])
    assert sink.status == 200
    assert sink.headers["content-type"] == "text/event-stream"
    assert sink.pieces == [(2.0, b"abc"), (3.0, b"de"), (3.0, b"f")]
    assert connection.reusable
    assert not transport.closed


@pytest.mark.parametrize(
    ("answer", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", True),
        (STREAM + b"3;x=y\r\nabc\r\n0\r\nTrailer: t\r\n\r\n", True),
    ],
)
@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_bodies_of_all_kinds_however_they_are_cut(answer: bytes, reusable: bool, cut: int):
    connection, _, sink = exchange([answer[i : i + cut] for i in range(0, len(answer), cut)])
    assert (sink.status, b"".join(data for _, data in sink.pieces)) == (200, b"abc")
    assert connection.reusable == reusable


def test_a_body_without_length_ends_with_the_connection():
    _, _, sink = exchange([b"HTTP/1.1 200 OK\r\n\r\nab", b"c"], lambda connection: connection.connection_lost(None))
    assert b"".join(data for _, data in sink.pieces) == b"abc"


@pytest.mark.parametrize(
    ("pieces", "error", "kind", "message"),
    [
        ([], None, "connection", "without an answer"),
        ([STREAM, b"5\r\nab"], None, "connection", "before the answer was complete"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab"], None, "connection", "before the answer was complete"),
        ([STREAM], ConnectionResetError("reset"), "connection", "reset"),
        ([b"SSH-2.0-OpenSSH\r\n"], None, "protocol", "not HTTP/1.1"),
    ],
)
def test_what_breaks_an_answer(pieces: Sequence[bytes], error: Exception | None, kind: str, message: str):
    with pytest.raises(RequestFailed, match=message) as failure:
        exchange(pieces, lambda connection: connection.connection_lost(error))
    assert failure.value.error_kind == kind


def test_a_request_that_is_given_up_takes_its_connection_with_it():
    connection, transport = HttpConnection(lambda: 0.0), Transport()

    async def work() -> None:
        connection.connection_made(transport)
        asking = asyncio.ensure_future(connection.exchange(b"x", Sink()))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})

    asyncio.run(work())
    assert transport.closed
    assert not connection.reusable


@pytest.mark.parametrize("end", ["closed", "unasked data"])
def test_a_connection_that_ended_while_idle_has_not_answered_the_next_request(end: str):
    connection, _, _ = exchange([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
    assert (connection.reusable, connection.answered) == (True, True)
    if end == "closed":
        connection.connection_lost(None)
    else:
        connection.data_received(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    with pytest.raises(RequestFailed, match="has closed the connection"):
        asyncio.run(connection.exchange(b"x", Sink()))
    assert not connection.answered  # so that it is tried again on another one


EVENTS = b': hi\n\ndata: {"a": 1}\n\ndata:b\r\n\r\nevent: x\ndata: one\ndata: two\nid: 3\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 1000])
def test_events_however_they_are_cut(cut: int):
    decoder, events = EventDecoder(), []
    for start in range(0, len(EVENTS), cut):
        events += decoder.feed(EVENTS[start : start + cut])
    assert events == [b'{"a": 1}', b"b", b"one\ntwo", b"[DONE]"]
    assert decoder.close() == []


def test_a_last_event_without_its_empty_line():
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\n\ndata: b") == [b"a"]
    assert decoder.close() == [b"b"]
    assert decoder.close() == []
