"""`HttpClient`: requests over a pool of connections to one server."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from aotllm.bench.http_connection import HttpConnection, ResponseSink
from aotllm.bench.record import RequestFailed
from aotllm.errors import InvalidRequest

CONNECT_TIMEOUT = 10.0


class HttpClient:
    """As many connections as there are requests at a time; each is used again.

    Args:
        url: `http[s]://host[:port][/prefix]`.
        headers: sent with each request.
        insecure: take any certificate.
        clock: seconds; what the sinks get.

    Raises:
        InvalidRequest: not such a URL, or a header that cannot be sent.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        insecure: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.url = url.rstrip("/")
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequest(f"--url takes http://HOST:PORT or https://…, got {url!r}", "url")
        self._host, self._tls = parts.hostname, _tls(insecure) if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._prefix = parts.path
        self._clock = clock
        self._idle: list[HttpConnection] = []
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = f"Host: {host}:{self._port}\r\nAccept-Encoding: identity\r\nUser-Agent: aotllm-bench\r\n"
        for name, value in (headers or {}).items():
            if any(c in name + value for c in "\r\n") or not name or not (name + value).isascii():
                raise InvalidRequest(f"a header is NAME: VALUE in ASCII, got {name!r}: {value!r}", "header")
            self._head += f"{name}: {value}\r\n"

    async def send(self, method: str, path: str, body: bytes | None, sink: ResponseSink) -> None:
        """One request; returns at the end of the response. Redirects are not followed.

        Raises:
            RequestFailed: `connection` or `protocol`.
        """
        content = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        request = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{content}\r\n".encode() + (body or b"")
        while self._idle:
            connection = self._idle.pop()
            try:
                await self._exchange(connection, request, sink)
            except RequestFailed:
                if connection.answered:
                    raise
                continue  # closed by the server while it was idle, which is no failure
            return
        await self._exchange(await self._connect(), request, sink)

    async def fetch(self, method: str, path: str, body: bytes | None = None) -> HttpAnswer:
        """One request and its whole answer."""
        answer = HttpAnswer()
        await self.send(method, path, body, answer)
        return answer

    def close(self) -> None:
        """Drop the connections that are idle."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, connection: HttpConnection, request: bytes, sink: ResponseSink) -> None:
        await connection.exchange(request, sink)
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        where = f"{self._host}:{self._port}"
        try:
            opening = loop.create_connection(lambda: HttpConnection(self._clock), self._host, self._port, ssl=self._tls)
            _, connection = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            raise RequestFailed("connection", f"{where} takes no connection within {CONNECT_TIMEOUT:g} s") from None
        except ssl.SSLError as error:
            hint = "; --insecure takes any certificate" if isinstance(error, ssl.SSLCertVerificationError) else ""
            raise RequestFailed("connection", f"no TLS with {where}: {error.reason or error}{hint}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise RequestFailed("connection", f"cannot connect to {where}: {reason}") from None
        return connection


class HttpAnswer:
    """A sink that keeps the whole response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._parts: list[bytes] = []

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Part of `ResponseSink`."""
        self.status, self.headers = status, headers

    def data(self, data: bytes, now: float) -> None:
        """Part of `ResponseSink`."""
        self._parts.append(data)

    @property
    def body(self) -> bytes:
        """All of it."""
        return b"".join(self._parts)


def _tls(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()  # SSL_CERT_FILE names further authorities
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
