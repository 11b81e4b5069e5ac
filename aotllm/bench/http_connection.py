"""`HttpConnection`: one keep-alive connection of HTTP/1.1, which hands each piece of a body on the moment it arrives.

A load generator shares its machine, and often one core, with the server that it measures. So there is no task switch,
copy or object per piece here: the event loop calls `data_received`, the parser (httptools, the one of Node.js) calls
`on_body`, and that calls the sink.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, cast

import httptools

from aotllm.bench.record import RequestFailed


class ResponseSink(Protocol):
    """Who takes a response. It must not raise: what is wrong with an answer is told after its end."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers; names are in lower case."""

    def data(self, data: bytes, now: float) -> None:
        """A piece of the body, and when it arrived."""


class HttpConnection(asyncio.Protocol):
    """Made by `loop.create_connection`. One request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._done: asyncio.Future[None] | None = None
        self._lost = False
        self.reusable = False
        """The last response is complete, and the server keeps the connection"""
        self.answered = False
        """Something of the response to the last request has come"""

    async def exchange(self, request: bytes, sink: ResponseSink) -> None:
        """Send a request, head and body; returns at the end of the response.

        Raises:
            RequestFailed: `connection`: it was lost; `protocol`: what came is not HTTP.
        """
        self.reusable = self.answered = False
        if self._transport is None or self._lost or self._transport.is_closing():
            raise RequestFailed("connection", "the server has closed the connection")
        self._sink = sink
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._status_line_seen = False
        self._headers: dict[str, str] = {}
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()  # the rest of the response must not be taken for the next one's
            raise
        finally:
            self._sink = self._done = None

    def close(self) -> None:
        """Drop the connection."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # noqa: D102
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._sink is None:
            self.close()  # nobody has asked
            return
        self.answered = True
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(RequestFailed("protocol", f"the answer is not HTTP/1.1: {error}"))

    def connection_lost(self, error: Exception | None) -> None:  # noqa: D102
        self._lost, self.reusable = True, False
        if self._done is None or self._done.done():
            return
        if error is None and self._until_closed:
            self._done.set_result(None)
            return
        reason = f": {error}" if error else ""
        part = "before the answer was complete" if self.answered else "without an answer"
        self._fail(RequestFailed("connection", f"the connection ended {part}{reason}"))

    # httptools -------------------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: D102
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:  # noqa: D102
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and the like: the response is still to come
            self._headers = {}
            return
        assert self._sink is not None
        self._status_line_seen = True
        self._sink.head(status, self._headers)

    def on_body(self, data: bytes) -> None:  # noqa: D102
        assert self._sink is not None
        self._sink.data(data, self._now)

    def on_message_complete(self) -> None:  # noqa: D102
        if not self._status_line_seen:
            return
        self.reusable = self._parser.should_keep_alive() and not self._lost
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    @property
    def _until_closed(self) -> bool:
        """The end of the connection is the end of the body."""
        framed = "content-length" in self._headers or "transfer-encoding" in self._headers
        return self._status_line_seen and not framed

    def _fail(self, error: RequestFailed) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()
