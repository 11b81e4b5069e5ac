"""`rank{N}.engine`: a safetensors file whose tensors lie on 64-byte boundaries, so that it is mapped, not read.

Format: https://huggingface.co/docs/safetensors. The format allows no holes between tensors, so alignment is made with
named filler tensors (`__pad.N`), and the header is padded with spaces.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.errors import EngineError, Internal

ALIGNMENT = 64
PAD_PREFIX = "__pad."
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype(np.uint8), "F32": np.dtype("<f4")}
_MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 2 << 20
"""Bytes of a write: those of a huge page. File systems that know such keep what is written so in as large pages, and an
engine that was just built is mapped in them."""


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of a tensor to be written; `dtype` is a safetensors name: U8 or F32."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


class _ChunkedFile:
    """A new file, written in whole chunks at their multiples."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._chunk = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        """Appends `data`."""
        view = memoryview(data)
        while len(view):
            taken = min(len(view), _CHUNK_BYTES - len(self._chunk))
            self._chunk += view[:taken]
            view = view[taken:]
            if len(self._chunk) == _CHUNK_BYTES:
                self._flush()

    def close(self) -> None:
        """Writes what is left; no-op the second time."""
        if not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self) -> None:
        with memoryview(self._chunk) as chunk:
            written = 0
            while written < len(chunk):
                written += self._file.write(chunk[written:])
        self._chunk.clear()


class RankFileWriter:
    """Writes tensors in the order announced, one at a time, and hashes what it writes.

    The header comes first in the file, so all specs must be known before the first weight is packed; no tensor is kept.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.bytes_written = 0
        self._digest = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1)  # hashing and writing take about as long: they run side by side
        self._hashing: Future[None] | None = None
        self._order: list[tuple[str, TensorSpec]] = []
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name, spec in _with_padding(specs):
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
            self._order.append((name, spec))
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        self._next = 0
        self._file = _ChunkedFile(path)
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Appends the next announced tensor. Raises Internal where name, type or shape differ from the announcement."""
        expected, spec = self._order[self._next]
        if name != expected or array.dtype != _DTYPES[spec.dtype] or array.shape != spec.shape:
            raise Internal(f"engine writer: got {name} {array.dtype} {array.shape}, expected {expected} {spec}")
        self.write_parts(name, (array,))

    def write_parts(self, name: str, parts: Iterable[npt.NDArray[Any]]) -> None:
        """Appends the next announced tensor, given as consecutive pieces of any shape. Raises Internal likewise."""
        expected, spec = self._order[self._next]
        end = self.bytes_written + spec.nbytes
        for part in parts:
            if name != expected or part.dtype != _DTYPES[spec.dtype] or self.bytes_written + part.nbytes > end:
                raise Internal(f"engine writer: got {name} {part.dtype} {part.shape}, expected {expected} {spec}")
            self._put(np.ascontiguousarray(part).reshape(-1).data.cast("B"))
        if self.bytes_written != end:
            raise Internal(f"engine writer: {name} is {end - self.bytes_written} bytes short of {spec}")
        self._next += 1
        while self._next < len(self._order) and self._order[self._next][0].startswith(PAD_PREFIX):
            self._put(bytes(self._order[self._next][1].nbytes))
            self._next += 1

    def close(self) -> str:
        """Flushes; returns the file's SHA-256. Raises Internal where tensors are missing."""
        self._file.close()
        if self._next != len(self._order):
            raise Internal(f"engine writer: tensor {self._order[self._next][0]} was announced and not written")
        self._await_hash()
        return self._digest.hexdigest()

    def __enter__(self) -> RankFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._hasher.shutdown()

    def _put(self, data: bytes | memoryview) -> None:
        self._await_hash()
        self._hashing = self._hasher.submit(self._digest.update, data)
        self._file.write(data)
        self.bytes_written += len(data)

    def _await_hash(self) -> None:
        if self._hashing is not None:
            self._hashing.result()


def _with_padding(specs: Mapping[str, TensorSpec]) -> list[tuple[str, TensorSpec]]:
    padded: list[tuple[str, TensorSpec]] = []
    for name, spec in specs.items():
        padded.append((name, spec))
        if rest := -spec.nbytes % ALIGNMENT:
            padded.append((f"{PAD_PREFIX}{len(padded)}", TensorSpec("U8", (rest,))))
    return padded


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a rank file (`__metadata__` and a record per tensor). Raises EngineError if damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise EngineError(f"{path}: header length {length} does not fit the file; the file is damaged")
            header = json.loads(file.read(length))
    except OSError as error:
        raise EngineError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{path}: the header is not valid JSON ({error}); the file is damaged") from None
    if not isinstance(header, dict):
        raise EngineError(f"{path}: the header is a JSON {type(header).__name__}, expected an object")
    return header
