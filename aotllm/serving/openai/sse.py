"""Server-sent events as OpenAI's clients read them: `data: {json}`, an empty line, and `data: [DONE]` at the end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aotllm.errors import AotllmError, Internal
from aotllm.serving.errors import body_of

_log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams, also after an error"""

Chunk = dict[str, Any] | bytes
"""The value of an event, or an event that is ready to be sent"""


def to_json(value: Any) -> bytes:
    """Compact JSON in UTF-8. Half surrogate pairs, which UTF-8 has no bytes for, become question marks."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; `name` is its type, for streams that have several."""
    head = b"data: " if name is None else b"event: %s\ndata: " % name.encode()
    return head + to_json(value) + b"\n\n"


TEXT = "\0text\0"
"""Stands for the text in the value that a `TextEvent` is made from"""


class TextEvent:
    """Events that differ in one text only, as nearly all of a stream do: the rest is encoded once.

    Args:
        value: of such an event, with `TEXT` in the place of the text.
        name: type of the event, or None.
    """

    def __init__(self, value: Mapping[str, Any], name: str | None = None) -> None:
        self._before, self._after = event(value, name).split(_encode(TEXT))

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + _encode(text) + self._after


WRITE = "aotllm.write"
"""Key among the extensions of a request's scope: `(part) -> bool`, which writes a part of the answer's body at once, as
far as the client keeps up (`HttpProtocol`)"""


class Shortcut:
    """Takes an event to its client in the call that brings its text. The way through the stream's task and the layers
    of the application takes longer than all the rest that is done for a token."""

    def __init__(self) -> None:
        self._write: Callable[[bytes], bool] | None = None

    def open(self, scope: Scope) -> None:
        """The head of the answer has been sent; from now on events can be taken, if the server offers it."""
        self._write = scope.get("extensions", {}).get(WRITE)

    def __call__(self, ready_event: bytes) -> bool:
        """False where the event has to take the long way."""
        return self._write is not None and self._write(ready_event)


def event_stream(chunks: AsyncIterator[Chunk], shortcut: Shortcut | None = None) -> Response:
    """A response that sends each chunk as an event. A failure becomes an event of its own: the status is sent long
    since. [DONE] comes in any case, unless the client has left.

    Args:
        chunks: as of `EventStreamResponse`.
        shortcut: by which other events come, while the chunks wait for something to send.
    """
    return EventStreamResponse(chunks, lambda error: event(body_of(error)), DONE, shortcut)


class EventStreamResponse(Response):
    """Sends events until the chunks end or the client leaves; then the chunks' iterator is closed at once.

    Args:
        chunks: values of events, or events.
        on_error: failure -> the event that tells of it.
        end: sent at the end, also after a failure.
        shortcut: see `event_stream`.
    """

    def __init__(
        self,
        chunks: AsyncIterator[Chunk],
        on_error: Callable[[AotllmError], bytes],
        end: bytes = b"",
        shortcut: Shortcut | None = None,
    ) -> None:
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._chunks = chunks
        self._on_error = on_error
        self._end = end
        self._shortcut = shortcut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        sending = asyncio.ensure_future(self._send_all(scope, send))
        watching = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            watching.cancel()
            sending.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await sending

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if self._shortcut is not None:
            self._shortcut.open(scope)
        try:
            async for chunk in self._chunks:
                body = chunk if isinstance(chunk, bytes) else event(chunk)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            last = b""
        except AotllmError as error:
            last = self._on_error(error)
        except Exception:
            _log.exception("a stream failed")
            last = self._on_error(Internal("a fault of the server; its log has the details"))
        finally:
            await self._close_chunks()
        await send({"type": "http.response.body", "body": last + self._end, "more_body": False})

    async def _close_chunks(self) -> None:
        # An iterator that was left in the middle would go on until it is garbage collected.
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
