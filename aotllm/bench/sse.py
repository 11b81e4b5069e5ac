"""Server-sent events, as they arrive."""

from __future__ import annotations


class EventDecoder:
    """Puts the `data` of events together from pieces of a stream, wherever they are cut. Comments and other fields are
    skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now."""
        if data.startswith(b"data: ") and data.endswith(b"\n\n") and data.count(b"\n") == 2 and self._idle:
            return [data[6:-2]]  # one event and nothing else, as nearly all pieces are
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(self._take())
        return events

    def close(self) -> list[bytes]:
        """What is left at the end of the stream: some servers leave out the last empty line."""
        events = self.feed(b"\n") if self._rest else []
        return [*events, self._take()] if self._data else events

    @property
    def _idle(self) -> bool:
        return not self._rest and not self._data

    def _take(self) -> bytes:
        data, self._data = self._data, []
        return data[0] if len(data) == 1 else b"\n".join(data)
