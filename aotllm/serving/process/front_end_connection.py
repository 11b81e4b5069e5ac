"""`FrontEndConnection`: one front end, as the engine process sees it."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from aotllm.serving.process import messages as wire
from aotllm.serving.process.framing import FrameReader

MAX_UNSENT_BYTES = 256 << 20
"""A front end that takes nothing for so long is given up"""


class Taker(Protocol):
    """What takes the messages of front ends: `EngineServer`."""

    def connected(self, connection: FrontEndConnection) -> None:
        """A front end is there."""

    def disconnected(self, connection: FrontEndConnection) -> None:
        """A front end has gone."""

    def take(self, connection: FrontEndConnection, message: wire.ToEngine) -> None:
        """A message of a front end."""


class FrontEndConnection(asyncio.Protocol):
    """Sends without ever waiting, and passes messages on to the server."""

    def __init__(self, server: Taker) -> None:
        self._server = server
        self._reader = FrameReader()
        self._seen = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.requests: dict[int, tuple[str, int]] = {}
        """Its request id → (model, the runtime's id), of those in flight"""
        self.compiling: set[int] = set()
        """Its request ids whose grammars are being compiled"""

    def connection_made(self, transport: Any) -> None:
        """See asyncio.Protocol."""
        self._transport = transport
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            for frame in self._reader.feed(data):
                self._server.take(self, wire.to_engine.decode(frame))
        except (ValueError, msgspec.DecodeError):
            self._transport.abort()  # not one of ours; whatever it is, it is not to be served

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._server.disconnected(self)
        self.has_seen(2**62)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)

    def send(self, message: Any) -> None:
        """Never blocks: a front end that does not read must not hold up the others."""
        if self._transport.is_closing():
            return
        self._transport.write(wire.frame(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._transport.abort()

    def fail(self, ids: list[int], failure: wire.Failure) -> None:
        """End requests with an error."""
        self.send(
            wire.Responses(
                [
                    wire.FullResponse(
                        i, 0, [], [], [], [], None, None, failure.kind, failure.message, 0, 0, 0, 0, 0, None, None
                    )
                    for i in ids
                ]
            )
        )
        for i in ids:
            self.requests.pop(i, None)

    async def ask(self, number: int, topic: str) -> Any:
        """What this front end says to a topic; None where it has gone or knows nothing of it."""
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(wire.Gather(number, topic))
        try:
            return await answer
        finally:
            del self._asked[number]

    def has_answered(self, number: int, value: Any) -> None:
        """It has said something to `ask`."""
        answer = self._asked.get(number)
        if answer is not None and not answer.done():
            answer.set_result(value)

    def has_seen(self, version: int) -> None:
        """It serves state number `version`, or will never."""
        self._seen = max(self._seen, version)
        due = [future for wanted, future in self._waiting if wanted <= self._seen]
        self._waiting = [entry for entry in self._waiting if entry[0] > self._seen]
        for future in due:
            if not future.done():
                future.set_result(None)

    async def until_seen(self, version: int) -> None:
        """Wait for `has_seen`."""
        if self._seen < version:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((version, future))
            await future
