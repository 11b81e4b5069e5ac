"""`Tensor`, and its forms: little-endian bytes, typed contents, JSON, numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aotllm.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray


class DataType(NamedTuple):
    """A type of elements."""

    name: str
    """In requests and responses"""
    config_name: str
    """In model configurations"""
    kind: type
    code: str
    """Of `struct`; empty for BYTES"""
    contents: str = ""
    """Field of InferTensorContents; empty = none"""

    @property
    def size(self) -> int:
        """Bytes per element; of BYTES those of the length alone."""
        return struct.calcsize(self.code or "I")


BOOL = DataType("BOOL", "TYPE_BOOL", bool, "?", "bool_contents")
INT32 = DataType("INT32", "TYPE_INT32", int, "i", "int_contents")
INT64 = DataType("INT64", "TYPE_INT64", int, "q", "int64_contents")
UINT64 = DataType("UINT64", "TYPE_UINT64", int, "Q", "uint64_contents")
FP32 = DataType("FP32", "TYPE_FP32", float, "f", "fp32_contents")
BYTES = DataType("BYTES", "TYPE_STRING", str, "", "bytes_contents")
FP16 = DataType("FP16", "TYPE_FP16", float, "e")
UINT8 = DataType("UINT8", "TYPE_UINT8", int, "B")
DATA_TYPES = {datatype.name: datatype for datatype in (BOOL, INT32, INT64, UINT64, FP32, BYTES, FP16, UINT8)}
"""By name"""

MAX_TEXTS = 2**17
"""Elements of a BYTES tensor: each one costs time on the event loop, which an empty one of four bytes is not worth"""
_MAX_DIMS = 8
_LENGTH = struct.Struct("<I")
_RANGES = {
    INT32: range(-(2**31), 2**31),
    INT64: range(-(2**63), 2**63),
    UINT64: range(2**64),
}


class InputTensor(NamedTuple):
    """A tensor of the client. Its data is decoded once its name and type are known to be right."""

    name: str
    datatype: str
    shape: Sequence[int]
    decode: Callable[[DataType], list[Any]]
    """Elements of the data, read as this type; raises InvalidRequest"""


class Tensor(NamedTuple):
    """Elements in row-major order."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    values: Any
    """A list (of BYTES: of str or bytes), or a little-endian numpy array of the same type"""

    def to_bytes(self) -> bytes:
        """The raw form."""
        if self.datatype is BYTES:
            return b"".join(map(bytes_element, self.values))
        if isinstance(self.values, list):
            return struct.pack(f"<{len(self.values)}{self.datatype.code}", *self.values)
        return bytes(self.values.tobytes())

    def to_json(self) -> list[Any]:
        """A flat list for JSON, which has neither infinity nor NaN: null stands for them."""
        values: list[Any] = self.values if isinstance(self.values, list) else self.values.ravel().tolist()
        if self.datatype is FP32:
            return [value if math.isfinite(value) else None for value in values]
        return values

    def to_numpy(self) -> NDArray[Any]:
        """An array; of BYTES one of bytes objects."""
        import numpy as np

        if self.datatype is BYTES:
            encoded = [v.encode("utf-8", "replace") if isinstance(v, str) else v for v in self.values]
            return np.array(encoded, np.object_).reshape(self.shape)
        return np.array(self.values, np.dtype(self.datatype.code)).reshape(self.shape)


def bytes_element(text: str | bytes) -> bytes:
    """One element of a BYTES tensor: length and bytes."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return _LENGTH.pack(len(data)) + data


def element_count(name: str, shape: Sequence[Any]) -> int:
    """Number of elements. Raises InvalidRequest for what is no shape."""
    if len(shape) > _MAX_DIMS:
        raise InvalidRequest(f"{name}: a shape has at most {_MAX_DIMS} sizes, got {len(shape)}", name)
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidRequest(f"{name}: the shape {list(shape)!r:.80} has sizes that are no integers ≥ 0", name)
    return math.prod(shape)


def decode_raw(name: str, datatype: DataType, shape: Sequence[int], data: bytes | memoryview) -> list[Any]:
    """Elements out of their raw form; those of BYTES as text.

    Raises:
        InvalidRequest: the shape is wrong, or the data is not of its size, or no UTF-8.
    """
    count = element_count(name, shape)
    if datatype is BYTES:
        return _decode_bytes(name, count, data)
    if len(data) != count * datatype.size:
        raise InvalidRequest(
            f"{name}: a tensor {datatype.name}{list(shape)!r:.80} has {count * datatype.size} bytes, got {len(data)}",
            name,
        )
    return list(struct.unpack(f"<{count}{datatype.code}", data))


def decode_contents(name: str, datatype: DataType, shape: Sequence[int], contents: Any) -> list[Any]:
    """Elements out of an InferTensorContents. Raises InvalidRequest, as `decode_raw`."""
    _check_count(name, datatype, shape, len(getattr(contents, datatype.contents)))
    values = list(getattr(contents, datatype.contents))
    return [text_of(name, value) for value in values] if datatype is BYTES else values


def decode_json(name: str, datatype: DataType, shape: Sequence[Any], data: Any) -> list[Any]:
    """Elements out of a JSON array, nested or flat. Raises InvalidRequest, as `decode_raw`."""
    values = flat(data)
    _check_count(name, datatype, shape, len(values))
    return [checked_element(name, datatype, value) for value in values]


def flat(data: Any) -> list[Any]:
    """The elements of nested lists, in order; a single value as a list of one."""
    values: list[Any] = []
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending.extend(reversed(value))
        else:
            values.append(value)
    return values


def checked_element(name: str, datatype: DataType, value: Any) -> Any:
    """A JSON value, or that of a parameter, as an element. Raises InvalidRequest for a wrong type or range."""
    if datatype is BYTES and isinstance(value, (str, bytes)):
        return text_of(name, value)
    kind = (int, float) if datatype is FP32 else datatype.kind
    if not isinstance(value, kind) or isinstance(value, bool) != (datatype is BOOL):
        raise InvalidRequest(f"{name} takes elements of type {datatype.name}, got {value!r:.80}", name)
    if datatype in _RANGES and value not in _RANGES[datatype]:
        raise InvalidRequest(f"{name} has {value!r:.80}, which is out of the range of {datatype.name}", name)
    return value


def _decode_bytes(name: str, count: int, data: bytes | memoryview) -> list[str]:
    if count > len(data) // _LENGTH.size:
        raise InvalidRequest(f"{name}: {count} elements of BYTES do not fit in {len(data)} bytes", name)
    if count > MAX_TEXTS:
        raise InvalidRequest(f"{name}: a tensor of BYTES has at most {MAX_TEXTS} elements, got {count}", name)
    values, position = [], 0
    for _ in range(count):
        if position + _LENGTH.size > len(data):
            raise InvalidRequest(f"{name}: the data ends inside of the length of a BYTES element", name)
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if length > len(data) - position:
            raise InvalidRequest(
                f"{name}: a BYTES element is said to be {length} bytes long, but {len(data) - position} are left", name
            )
        values.append(text_of(name, bytes(data[position : position + length])))
        position += length
    if position != len(data):
        raise InvalidRequest(f"{name}: {len(data) - position} bytes are left after {count} elements of BYTES", name)
    return values


def text_of(name: str, value: str | bytes) -> str:
    """An element of a BYTES tensor as text. Raises InvalidRequest."""
    try:
        return value.encode("utf-8").decode("utf-8") if isinstance(value, str) else value.decode("utf-8")
    except UnicodeError:
        raise InvalidRequest(f"{name} is not valid UTF-8", name) from None


def _check_count(name: str, datatype: DataType, shape: Sequence[Any], got: int) -> None:
    count = element_count(name, shape)
    if got != count:
        raise InvalidRequest(
            f"{name}: a tensor {datatype.name}{list(shape)!r:.80} has {count} elements, got {got}", name
        )
