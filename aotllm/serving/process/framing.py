"""`FrameReader`: cuts a stream of bytes into messages."""

from __future__ import annotations

from collections.abc import Iterator

from aotllm.serving.process.messages import LENGTH_BYTES, MAX_MESSAGE_BYTES


class FrameReader:
    """Raises ValueError for a length beyond MAX_MESSAGE_BYTES, after which the stream is useless."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with `data`."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= LENGTH_BYTES:
                length = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "little")
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
                end = start + LENGTH_BYTES + length
                if len(self._buffer) < end:
                    break
                yield bytes(self._buffer[start + LENGTH_BYTES : end])
                start = end
        finally:
            del self._buffer[:start]
