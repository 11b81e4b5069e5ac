"""The pool of connections against a server on loopback."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest

from aotllm.bench.http_client import HttpAnswer, HttpClient
from aotllm.bench.record import RequestFailed
from aotllm.errors import InvalidRequest
from tests.aotllm.bench.socket_server import SocketServer, http


def test_requests_one_after_the_other_share_a_connection():
    server = SocketServer(lambda request: http(request.body.upper()))

    async def client(port: int) -> list[bytes]:
        client = HttpClient(f"http://127.0.0.1:{port}/prefix/", {"X-Key": "k"})
        answers = [await client.fetch("POST", "/path?q=1", body) for body in (b"a", b"b", b"c")]
        client.close()
        return [answer.body for answer in answers]

    assert server.run(client) == [b"A", b"B", b"C"]
    assert server.connections == 1
    assert server.requests[0].line == "POST /prefix/path?q=1 HTTP/1.1"
    assert b"\r\nX-Key: k\r\n" in server.requests[0].head
    assert b"\r\nHost: 127.0.0.1:" in server.requests[0].head


def test_requests_at_the_same_time_have_connections_of_their_own():
    server = SocketServer(lambda request: http(request.body))

    async def client(port: int) -> list[HttpAnswer]:
        client = HttpClient(f"http://127.0.0.1:{port}")
        return list(await asyncio.gather(*(client.fetch("POST", "/", b"%d" % i) for i in range(5))))

    assert [answer.body for answer in server.run(client)] == [b"0", b"1", b"2", b"3", b"4"]
    assert server.connections == 5


@pytest.mark.parametrize("steps", [0, 1, 2, 100])
def test_a_connection_that_the_server_has_closed_meanwhile_is_no_failure(steps: int):
    server = SocketServer(lambda request: http(b"ok"), keep_alive=False)

    async def client(port: int) -> list[bytes]:
        client = HttpClient(f"http://127.0.0.1:{port}")
        answers = []
        for _ in range(3):
            answers.append((await client.fetch("GET", "/")).body)
            for _ in range(steps):  # of the loop, in which the end of the connection is seen, or is not yet
                await asyncio.sleep(0)
        return answers

    assert server.run(client) == [b"ok"] * 3
    assert server.connections == 3


def test_a_new_connection_that_closes_without_an_answer_is_one():
    server = SocketServer(lambda request: None)

    async def client(port: int) -> None:
        await HttpClient(f"http://127.0.0.1:{port}").fetch("GET", "/")

    with pytest.raises(RequestFailed, match="without an answer"):
        server.run(client)
    assert len(server.requests) == 1


def test_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RequestFailed, match="cannot connect to 127.0.0.1") as failure:
        asyncio.run(HttpClient(url).fetch("GET", "/"))
    assert failure.value.error_kind == "connection"


def test_a_name_that_does_not_exist():
    with pytest.raises(RequestFailed, match="cannot connect to nowhere.invalid:80"):
        asyncio.run(HttpClient("http://nowhere.invalid").fetch("GET", "/"))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port", "http://h:99999"])
def test_urls_that_are_none(url: str):
    with pytest.raises(InvalidRequest, match="--url takes"):
        HttpClient(url)


@pytest.mark.parametrize("header", [("a", "b\r\nc: d"), ("", "x"), ("n", "ä")])
def test_headers_that_cannot_be_sent(header: tuple[str, str]):
    with pytest.raises(InvalidRequest, match="a header is"):
        HttpClient("http://host", dict([header]))


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key -out cert -days 1"
    subprocess.run(
        [*command.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=60,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    return context


def test_tls(tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = SocketServer(lambda request: http(b"secret"), tls)

    async def client(port: int, insecure: bool) -> bytes:
        return (await HttpClient(f"https://localhost:{port}", insecure=insecure).fetch("GET", "/")).body

    with pytest.raises(RequestFailed, match="--insecure takes any certificate") as failure:
        server.run(lambda port: client(port, insecure=False))
    assert failure.value.error_kind == "connection"
    assert server.run(lambda port: client(port, insecure=True)) == b"secret"
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert"))
    assert server.run(lambda port: client(port, insecure=False)) == b"secret"
