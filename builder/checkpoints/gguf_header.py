"""`GgufHeader`: a strict reader of the header of one GGUF file (versions 2 and 3).

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, tensor count, key count, the keys
with typed values, one record per tensor, then the tensor data at the next multiple of the alignment. Only the header
is read; tensor data stays in the mapped file.

Nothing that the file claims is believed before it is checked: counts and lengths are bounded by the bytes that are
left and by the limits below, so that a damaged or hostile file costs time and memory in proportion to its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from aotllm.builder.checkpoints.gguf_cursor import GgufCursor
from aotllm.builder.checkpoints.mapped_file import MappedFile

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_KEY_BYTES = 1 << 16
MAX_NAME_BYTES = 1 << 10
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_MAGIC = b"GGUF"
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""GGML, GGMF, GGJT and GGLA, the formats before GGUF, as they lie in the file."""
_DEFAULT_ALIGNMENT = 32
_MIN_KEY_RECORD = 8 + 4 + 1
_MIN_TENSOR_RECORD = 8 + 4 + 4 + 8
_REMOVED_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensor:
    """One tensor record, checked against the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first (GGUF itself writes the fastest dimension first)"""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file, in bytes"""
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Values of `metadata` are int, float, bool, str, a NumPy array (numbers, booleans) or a list (strings, arrays).
    """

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    """In file order"""


def read_header(file: MappedFile) -> GgufHeader:
    """Reads and checks the header of a mapped GGUF file.

    Raises:
        CheckpointError: the file is no GGUF file, of another version or byte order, truncated or malformed.
    """
    cursor = GgufCursor(file)
    version = _read_version(cursor)
    num_tensors = cursor.u64("the tensor count")
    num_keys = cursor.u64("the key count")
    _check_count(cursor, "tensors", num_tensors, MAX_TENSORS, _MIN_TENSOR_RECORD)
    _check_count(cursor, "metadata keys", num_keys, MAX_KEYS, _MIN_KEY_RECORD)

    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"the metadata key '{key}' appears twice")
        metadata[key] = cursor.value(key)

    alignment = _alignment(cursor, metadata)
    records = [_read_tensor(cursor, index) for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for record in records:
        if record.name in tensors:
            raise cursor.error(f"the tensor '{record.name}' appears twice")
        tensors[record.name] = _place(cursor, record, data_start, alignment)
    _check_overlaps(cursor, tensors)
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].offset))
    return GgufHeader(version, metadata, ordered)


def _read_version(cursor: GgufCursor) -> int:
    magic = cursor.take(4, "the magic number")
    if magic in _OLD_MAGICS:
        raise cursor.error("an old GGML file, from before GGUF; convert the model again with a current converter")
    if magic != _MAGIC:
        raise cursor.error(f"not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version != 0:
        raise cursor.error("a big-endian GGUF file; only little-endian ones are read (gguf-convert-endian converts)")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version}; versions 2 and 3 are read (convert the model again)")
    return version


def _check_count(cursor: GgufCursor, what: str, count: int, limit: int, record_bytes: int) -> None:
    if count > limit:
        raise cursor.error(f"{count} {what}; at most {limit} are read")
    if count * record_bytes > cursor.left:
        raise cursor.error(f"{count} {what} cannot fit the {cursor.left} bytes that follow; is the file truncated?")


def _alignment(cursor: GgufCursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    good = isinstance(alignment, int) and not isinstance(alignment, bool) and 0 < alignment <= MAX_ALIGNMENT
    if not good or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}; expected a power of two up to {MAX_ALIGNMENT}")
    return int(alignment)


def _read_tensor(cursor: GgufCursor, index: int) -> GgufTensor:
    """The record as written: `offset` still counts from the start of the data."""
    name = cursor.string(f"the name of tensor {index}", MAX_NAME_BYTES)
    num_dims = cursor.u32(f"tensor '{name}'")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"tensor '{name}' has {num_dims} dimensions; expected 1 to {MAX_DIMS}")
    dims = [cursor.u64(f"tensor '{name}'") for _ in range(num_dims)]
    if not all(0 < dim < 2**48 for dim in dims):
        raise cursor.error(f"tensor '{name}' has sizes {dims}; each must be above zero and below 2**48")
    number = cursor.u32(f"tensor '{name}'")
    offset = cursor.u64(f"tensor '{name}'")
    try:
        type_ = GGMLQuantizationType(number)
        block_elements, block_bytes = GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError):
        removed = f" ({_REMOVED_TYPES[number]}, removed from GGML: quantize again)" if number in _REMOVED_TYPES else ""
        raise cursor.error(f"tensor '{name}' has the unknown quantization type number {number}{removed}") from None
    if dims[0] % block_elements:
        raise cursor.error(
            f"tensor '{name}' has rows of {dims[0]} values; {type_.name} needs multiples of {block_elements}"
        )
    nbytes = math.prod(dims) // block_elements * block_bytes
    return GgufTensor(name, tuple(reversed(dims)), type_, offset, nbytes)


def _place(cursor: GgufCursor, record: GgufTensor, data_start: int, alignment: int) -> GgufTensor:
    if record.offset % alignment:
        raise cursor.error(
            f"tensor '{record.name}' is misaligned: byte {record.offset} of the data is no multiple of {alignment}"
        )
    begin = data_start + record.offset
    if begin + record.nbytes > cursor.size:
        raise cursor.error(
            f"tensor '{record.name}' ends at byte {begin + record.nbytes}, past the end of the file "
            f"({cursor.size} bytes); is the file truncated?"
        )
    return GgufTensor(record.name, record.shape, record.type, begin, record.nbytes)


def _check_overlaps(cursor: GgufCursor, tensors: Mapping[str, GgufTensor]) -> None:
    position, previous = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < position:
            raise cursor.error(f"tensors '{previous}' and '{tensor.name}' overlap")
        position, previous = tensor.offset + tensor.nbytes, tensor.name
