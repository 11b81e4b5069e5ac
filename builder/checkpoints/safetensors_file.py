"""`SafetensorsFile`: a strict, lazy reader of the safetensors format.

Layout (https://huggingface.co/docs/safetensors): a little-endian u64 header length, a JSON header that gives each
tensor's dtype, shape and byte range, then the data. Everything that the header claims is checked against the file
before any tensor is read, so that a damaged or hostile file is refused with its reason.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.builder.checkpoints.json_file import MAX_JSON_BYTES, parse_json_object
from aotllm.builder.checkpoints.mapped_file import MappedFile
from aotllm.errors import CheckpointError

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every dtype that the format defines."""

_MAX_DIMS = 16


@dataclass(frozen=True)
class StoredTensor:
    """One entry of the header, checked against the file."""

    dtype: str
    """As the file spells it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes"""
    nbytes: int


class SafetensorsFile:
    """The tensors of one file by name, in file order.

    Raises:
        CheckpointError: the header is malformed or contradicts the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.file.close()
            raise

    def close(self) -> None:
        """Unmap the file."""
        self.file.close()

    def _fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a valid safetensors file: {reason}")

    def _read_header(self) -> dict[str, StoredTensor]:
        size = self.file.size
        if size < 8:
            raise self._fail(f"{size} bytes; at least the 8 bytes of the header length are needed")
        (length,) = struct.unpack_from("<Q", self.file.buffer, 0)
        if length > MAX_JSON_BYTES:
            raise self._fail(f"a header of {length} bytes; at most {MAX_JSON_BYTES} are allowed")
        if 8 + length > size:
            raise self._fail(f"a header of {length} bytes in a file of {size} bytes; is the file truncated?")
        header = parse_json_object(self.file.buffer[8 : 8 + length], f"{self.path}: header")
        header.pop("__metadata__", None)
        data_start = 8 + length
        tensors = {name: self._entry(name, entry, data_start) for name, entry in header.items()}
        self._check_ranges(tensors, data_start)
        return dict(sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)))

    def _entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise self._fail(f"tensor '{name}' needs exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            raise self._fail(f"tensor '{name}' has dtype {dtype!r}; known are {', '.join(DTYPE_BITS)}")
        if not _is_size_list(shape) or len(shape) > _MAX_DIMS:
            raise self._fail(f"tensor '{name}' has shape {_brief(shape)}; expected a list of sizes")
        if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fail(f"tensor '{name}' has data_offsets {_brief(offsets)}; expected [begin, end]")
        begin, end = offsets
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        if bits != (end - begin) * 8:
            raise self._fail(
                f"tensor '{name}' takes {end - begin} bytes, but {dtype} {list(shape)} takes {bits / 8:g} bytes"
            )
        available = self.file.size - data_start
        if end > available:
            raise self._fail(
                f"tensor '{name}' ends at byte {end} of the data, of which there are {available}; "
                "is the file truncated?"
            )
        return StoredTensor(dtype, tuple(shape), data_start + begin, end - begin)

    def _check_ranges(self, tensors: dict[str, StoredTensor], data_start: int) -> None:
        """The format wants the data covered without overlap or hole."""
        position, previous = data_start, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if tensor.offset < position:
                raise self._fail(f"tensors '{previous}' and '{name}' overlap")
            if tensor.offset > position:
                raise self._fail(f"{tensor.offset - position} bytes before tensor '{name}' belong to no tensor")
            position, previous = tensor.offset + tensor.nbytes, name
        if position != self.file.size:
            raise self._fail(f"{self.file.size - position} bytes at the end belong to no tensor")


def _is_size_list(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
