"""An HTTP request as plain data, and its way through an ASGI application that runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST_AHEAD = 64
"""Messages that an application may be ahead of who reads them"""


@dataclass(frozen=True)
class HttpCall:
    """What an application is told of a request. Can be pickled."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None = None
    http_version: str = "1.1"
    scheme: str = "http"

    @classmethod
    def of(cls, scope: Scope, body: bytes) -> HttpCall:
        """Of a request whose body has been read."""
        return cls(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope.get("query_string", b""),
            tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            body,
            tuple(scope["client"]) if scope.get("client") else None,
            scope.get("http_version", "1.1"),
            scope.get("scheme", "http"),
        )

    def scope(self) -> Scope:
        """For the application."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.http_version,
            "method": self.method,
            "scheme": self.scheme,
            "path": self.path,
            "raw_path": self.raw_path,
            "root_path": "",
            "query_string": self.query_string,
            "headers": [list(header) for header in self.headers],
            "client": list(self.client) if self.client else None,
            "server": None,
            "state": {},
        }


async def messages(app: ASGIApp, call: HttpCall) -> AsyncIterator[Message]:
    """What an application sends: `http.response.start`, then bodies. Who stops reading is a client that has gone."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_AHEAD)
    gone = asyncio.Event()
    task = asyncio.create_task(_run(app, call.scope(), _receiver(call.body, gone), sent, gone))
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        while not sent.empty():
            sent.get_nowait()  # an application that waits to send sees that nobody reads
        if not task.done():
            await asyncio.wait([task], timeout=1.0)
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # was told above, or is of no interest to somebody who has gone


async def _run(
    app: ASGIApp, scope: Scope, receive: Receive, sent: asyncio.Queue[Message | None], gone: asyncio.Event
) -> None:
    send: Send = sent.put
    try:
        await app(scope, receive, send)
    finally:
        if not gone.is_set():  # else nobody takes it out, and a full queue would hold this up for ever
            await sent.put(None)


def _receiver(body: bytes, gone: asyncio.Event) -> Receive:
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    return receive


def response_parts(start: Message) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Status and headers of `http.response.start`."""
    headers: Any = start.get("headers", [])
    return int(start["status"]), [(bytes(name), bytes(value)) for name, value in headers]
