"""A light client of streamed completions, for benchmarks and soaks: many streams on a loop, no parsing per token.

It speaks just enough HTTP/1.1 for our own server, and looks into the last bytes of a stream only.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

_TAIL_BYTES = 1024
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class Outcome:
    """What became of a stream."""

    status: int = 0
    """Of HTTP; 0 = the connection ended before one came"""
    tokens: int = 0
    """Generated, as the usage in its last event says"""
    complete: bool = False
    """[DONE] came, and no error before it"""
    headers: bytes = b""
    tail: bytes = b""
    """Last bytes of the body"""
    first_byte_seconds: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    events: int = 0
    """Of the body; one that falls into two reads may be missed"""
    reads: list[float] = field(default_factory=list)
    """When bytes came, where asked for"""


class Stream(asyncio.Protocol):
    """One request on a connection of its own.

    Args:
        request: bytes to send.
        leave_after: close the connection when so many bytes of the body have come.
        slow: read a byte at a time, this many a second.
        keep_times: fill `Outcome.reads`.
    """

    def __init__(
        self, request: bytes, leave_after: int | None = None, slow: float | None = None, keep_times: bool = False
    ) -> None:
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.outcome = Outcome()
        self._request = request
        self._leave_after = leave_after
        self._slow = slow
        self._keep_times = keep_times
        self._head = b""
        self._start = time.perf_counter()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)
        if self._slow:
            transport.pause_reading()
            self._sip()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._start
        outcome = self.outcome
        if not outcome.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            outcome.status = int(head.split(b" ", 2)[1])
            outcome.headers, outcome.first_byte_seconds = head, now
        outcome.bytes += len(data)
        outcome.events += data.count(b"data: {")
        outcome.tail = (outcome.tail + data)[-_TAIL_BYTES:]
        if self._keep_times:
            outcome.reads.append(now)
        if outcome.tail.endswith(b"0\r\n\r\n") or (self._leave_after and outcome.bytes > self._leave_after):
            self._transport.abort() if self._leave_after else self._transport.close()
        elif self._slow:
            self._transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        outcome = self.outcome
        outcome.seconds = time.perf_counter() - self._start
        outcome.complete = b"data: [DONE]" in outcome.tail and b'"error"' not in outcome.tail
        if found := _USAGE.findall(outcome.tail):
            outcome.tokens = int(found[-1])
        if not self.done.done():
            self.done.set_result(outcome)

    def _sip(self) -> None:
        if not self.done.done():
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(1 / (self._slow or 1), self._sip)


def post(path: str, body: dict[str, Any], api_key: str = "") -> bytes:
    """The bytes of a POST that ends its connection."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    if api_key:
        head += f"Authorization: Bearer {api_key}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(host: str, port: int, request: bytes, **options: Any) -> Outcome:
    """Run one stream to its end. A connection that is refused gives an outcome of status 0."""
    loop = asyncio.get_running_loop()
    try:
        _, protocol = await loop.create_connection(lambda: Stream(request, **options), host, port)
    except OSError:
        return Outcome()
    try:
        return await protocol.done
    except asyncio.CancelledError:
        protocol._transport.abort()
        raise
