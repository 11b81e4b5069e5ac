"""A server on loopback whose answers are bytes of the test's choice."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass
class Request:
    head: bytes
    body: bytes

    @property
    def line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()


@dataclass
class SocketServer:
    """`answer`: request → the bytes of the response; None closes the connection."""

    answer: Callable[[Request], bytes | None]
    tls: ssl.SSLContext | None = None
    keep_alive: bool = True
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def run(self, client: Callable[[int], Awaitable[T]]) -> T:
        """What the client, which gets the port, returns."""

        async def work() -> T:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
            try:
                return await asyncio.wait_for(client(server.sockets[0].getsockname()[1]), 60)
            finally:
                server.close()

        return asyncio.run(work())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                self.requests.append(Request(head, body))
                answer = self.answer(self.requests[-1])
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if not self.keep_alive:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


def http(body: bytes, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def event_stream(*events: str | bytes) -> bytes:
    """Each event in a chunk of its own."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    datas = [b"data: " + (e.encode() if isinstance(e, str) else e) + b"\n\n" for e in events]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in datas) + b"0\r\n\r\n"
