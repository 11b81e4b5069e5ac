"""`GgufCursor`: bounds-checked reading of GGUF scalars, strings and arrays from a mapped file."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from aotllm.builder.checkpoints.mapped_file import MappedFile
from aotllm.errors import CheckpointError

MAX_STRING_BYTES = 16 << 20
"""One string; chat templates reach some 100 kB."""
MAX_ARRAY_BYTES = 64 << 20
"""One array of numbers."""
MAX_STRINGS = 4 << 20
"""Strings in all arrays of a file together; vocabularies and merges reach a million."""
MAX_NESTED_ARRAYS = 1 << 16
"""Arrays in all arrays of a file together; real files have none."""
MAX_DEPTH = 4
"""Arrays of arrays of …"""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""GGUF value type → `struct` format, which NumPy reads too."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U64 = struct.Struct("<Q")


class GgufCursor:
    """A position in a file. Every reader names what it reads, for the error of a file that ends too early."""

    def __init__(self, file: MappedFile) -> None:
        self._path = file.path
        self._buffer = file.buffer
        self.size = file.size
        self.position = 0
        self._left_of = {_STRING: MAX_STRINGS, _ARRAY: MAX_NESTED_ARRAYS}

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self.size - self.position

    def error(self, reason: str) -> CheckpointError:
        """The error to raise, with the file's path."""
        return CheckpointError(f"{self._path}: {reason}")

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if count > self.left:
            raise self.error(
                f"truncated: {what} needs {count} bytes at byte {self.position}, but the file has {self.size} bytes"
            )
        self.position += count
        return self._buffer[self.position - count : self.position]

    def u32(self, what: str) -> int:
        """A little-endian unsigned 32-bit integer."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """A little-endian unsigned 64-bit integer."""
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.u64(what)
        if length > limit:
            raise self.error(f"{what} is a string of {length} bytes; at most {limit} are read")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not valid UTF-8 ({error.reason} at byte {error.start} of it)") from None

    def value(self, key: str) -> Any:
        """The type and value of a metadata key."""
        return self._value(self.u32(f"'{key}'"), key, MAX_DEPTH)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        what = f"'{key}'"
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            if depth == 0:
                raise self.error(f"{what} nests arrays more than {MAX_DEPTH} deep")
            return self._array(key, depth - 1)
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown value type {kind}")
        raw = self.take(struct.calcsize(_SCALARS[kind]), what)
        if kind == _BOOL and raw not in (b"\0", b"\1"):
            raise self.error(f"{what} is a boolean of value {raw[0]}; expected 0 or 1")
        return struct.unpack(_SCALARS[kind], raw)[0]

    def _array(self, key: str, depth: int) -> Any:
        what = f"'{key}'"
        kind = self.u32(what)
        count = self.u64(what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            if count * dtype.itemsize > MAX_ARRAY_BYTES:
                raise self.error(f"{what} is an array of {count} values; at most {MAX_ARRAY_BYTES} bytes are read")
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind not in self._left_of:
            raise self.error(f"{what} is an array of the unknown value type {kind}")
        if count > self._left_of[kind]:
            raise self.error(f"{what} is an array of {count} values; that is more than all arrays together may hold")
        self._left_of[kind] -= count
        if kind == _STRING:
            return self._strings(what, count)
        return [self._value(kind, key, depth) for _ in range(count)]

    def _strings(self, what: str, count: int) -> list[str]:
        """What `string` does, `count` times: vocabularies are large enough to feel each call."""
        buffer, position, size = self._buffer, self.position, self.size
        strings = []
        for index in range(count):
            begin = position + 8
            end = begin + _U64.unpack_from(buffer, position)[0] if begin <= size else size + 1
            if end > size:
                raise self.error(f"truncated: the file ends in string {index} of {count} of {what}")
            if end - begin > MAX_STRING_BYTES:
                raise self.error(f"{what}: string {index} has {end - begin} bytes; at most {MAX_STRING_BYTES} are read")
            try:
                strings.append(buffer[begin:end].decode("utf-8"))
            except UnicodeDecodeError:
                raise self.error(f"{what}: string {index} is not valid UTF-8") from None
            position = end
        self.position = position
        return strings
