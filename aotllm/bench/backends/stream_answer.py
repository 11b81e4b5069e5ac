"""`StreamAnswer`: a response of server-sent events, or the error in place of one."""

from __future__ import annotations

from collections.abc import Mapping

from aotllm.bench.backends.base import http_failure
from aotllm.bench.record import RequestFailed
from aotllm.bench.sse import EventDecoder


class StreamAnswer:
    """A `ResponseSink`; what a server's events mean is the subclass's."""

    def __init__(self) -> None:
        self._status = 0
        self._is_stream = False
        self._events = EventDecoder()
        self._body: list[bytes] = []
        self._failure: RequestFailed | None = None

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Part of `ResponseSink`."""
        self._status = status
        self._is_stream = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def data(self, data: bytes, now: float) -> None:
        """Part of `ResponseSink`."""
        if not self._is_stream:
            self._body.append(data)
            return
        for event in self._events.feed(data):
            self._take(event, now)

    def finish(self) -> None:
        """Call after the end of the response.

        Raises:
            RequestFailed: what was wrong with it.
        """
        if self._status != 200:
            body = b"".join(self._body)
            raise http_failure(self._status, body, self.error_message(body))
        if not self._is_stream:
            body = b"".join(self._body)
            text = body[:200].decode("utf-8", "replace")
            raise RequestFailed("protocol", f"the answer is not a stream of events: {text}")
        if self._failure is not None:
            raise self._failure
        if not self.complete:
            raise RequestFailed("incomplete", "the stream ended before the answer was complete")

    def fail(self, kind: str, message: str) -> None:
        """The first failure counts."""
        self._failure = self._failure or RequestFailed(kind, message)

    def _take(self, event: bytes, now: float) -> None:
        try:
            self.event(event, now)
        except ValueError as error:  # of msgspec, too
            self.fail("protocol", f"cannot read the event {event[:200]!r}: {error}")

    @property
    def complete(self) -> bool:
        """The answer has its end."""
        raise NotImplementedError

    def event(self, data: bytes, now: float) -> None:
        """One event. A ValueError says that it cannot be read."""
        raise NotImplementedError

    def error_message(self, body: bytes) -> str | None:
        """What the body of an error says."""
        raise NotImplementedError
