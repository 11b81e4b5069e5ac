"""`HttpProtocol`: uvicorn's HTTP/1.1, with bounds on what a client may do before its request is complete."""

from __future__ import annotations

import asyncio
import json
import time
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aotllm.serving.errors import error_body
from aotllm.serving.openai.sse import WRITE

MAX_HEAD_BYTES = 64 << 10
"""Longest request line with headers"""
IDLE_SECONDS = 60.0
"""A head has to be complete within this time, and a body may not pause for longer"""


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    * A head is bounded in size and time, and a body in its pauses. uvicorn bounds none of them, and joins the parts of
      a long header in quadratic time.
    * That a client has left is told to the request that is being answered. uvicorn tells the last one of a pipeline.
    * An `Upgrade` is declined as HTTP wants it: by going on in HTTP/1.1. The parser takes what follows such a head for
      another protocol, so that the body of a POST would be lost; Java's HttpClient asks every server for h2c that way.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._has_body = False
        self._repeating = False
        """The parser reads a head again, whose request has begun already"""
        self._heard = self.loop.time()
        """When the client last did what keeps its connection open"""
        self._patience: asyncio.TimerHandle | None = None
        self._running: Any = None
        """The cycle that answers; `cycle` is the latest, which may wait for it"""

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._patience = self.loop.call_later(IDLE_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if self._patience is not None:
            self._patience.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._heard = self.loop.time()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is no valid HTTP/1.1")
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request line and the headers are longer than {MAX_HEAD_BYTES} bytes",
            )

    def on_message_begin(self) -> None:
        """See httptools."""
        if self._repeating:
            return
        self._in_head = True
        self._heard = self.loop.time()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        if not self._repeating:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if not self._repeating:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        if self._repeating:
            return
        self._in_head, self._head_bytes = False, 0
        self._heard = self.loop.time()
        self._has_body = bool(self._framing())
        self._tell_date()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See httptools."""
        if not (self.parser.should_upgrade() and self._has_body):  # else only the parser thinks so
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._heard = self.loop.time()
        super().on_response_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        cycle.scope["extensions"] = {WRITE: partial(write_part, cycle)}
        super()._start_asgi_task(cycle, app)

    def _tell_date(self) -> None:
        """Keep the `Date` of answers; uvicorn does it ten times a second, requests or not."""
        state: Any = self.server_state
        second = int(time.time())
        if getattr(state, "second", None) != second:
            state.second = second
            date = (b"date", formatdate(second, usegmt=True).encode())
            state.default_headers = [date, *self.config.encoded_headers]

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                if self._has_body:
                    self._repeating = True
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n" + self._framing() + b"\r\n\r\n")
                    self._repeating = False

    def _framing(self) -> bytes:
        """The header that says how long the body is; empty where there is none."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t")):
                return name + b": " + value
        return b""

    def _look(self) -> None:
        """Close the connection when the client has been silent for too long and it is its turn."""
        left = self._heard + IDLE_SECONDS - self.loop.time()
        running = self._running
        answering = running is not None and not running.response_complete and not running.more_body
        if answering or self.flow.read_paused:
            left = IDLE_SECONDS
        elif left <= 0:
            self.transport.close()
            return
        self._patience = self.loop.call_later(left, self._look)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        body = json.dumps(error_body(message, "BadRequestError", status.value)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        running = self._running
        if running is None or running.response_complete or not running.response_started:  # else amid an answer
            self.transport.write(head.encode() + body)
        self.transport.close()


def write_part(cycle: Any, part: bytes) -> bool:
    """Write a part of an answer in chunks, whose head has been sent; the same bytes as by the cycle's `send`. False
    where that has to wait for the client, or finds that it has gone."""
    if not cycle.chunked_encoding or cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True
