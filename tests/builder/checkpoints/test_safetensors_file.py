"""safetensors files: what the library writes is read, and everything the format forbids is refused."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from aotllm.builder.checkpoints.json_file import MAX_JSON_BYTES
from aotllm.builder.checkpoints.safetensors_file import SafetensorsFile
from aotllm.errors import CheckpointError

ARRAYS = {
    "f32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "f16": np.ones(3, np.float16),
    "i8": np.arange(5, dtype=np.int8),
    "i64": np.array([[-1]], np.int64),
    "scalar": np.array(3, np.uint8),
    "empty": np.zeros((0, 4), np.float32),
}


def file_of(data: bytes, folder: Path) -> SafetensorsFile:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    return SafetensorsFile(path)


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors", {"format": "np"})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert set(file.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        tensor = file.tensors[name]
        assert (tensor.shape, tensor.nbytes) == (array.shape, array.nbytes)
        np.testing.assert_array_equal(file.file.array(tensor.offset, array.shape, array.dtype), array)
    offsets = [tensor.offset for tensor in file.tensors.values()]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("padding", range(8))
def test_arrays_are_aligned_wherever_the_data_lies(padding: int, tmp_path: Path) -> None:
    header = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b" " * padding
    file = file_of(pack(header, struct.pack("<2f", 1, 2)), tmp_path)
    array = file.file.array(file.tensors["t"].offset, (2,), "<f4")
    assert array.tolist() == [1, 2]
    assert array.flags.aligned
    assert not array.flags.writeable


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert file_of(pack({"__metadata__": {"a": "b"}}), tmp_path).tensors == {}


def entry(**fields: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


def pair(a: list[int], b: list[int]) -> dict[str, Any]:
    return {name: {"dtype": "U8", "shape": [r[1] - r[0]], "data_offsets": r} for name, r in (("a", a), ("b", b))}


EIGHT = bytes(8)
BAD: dict[str, tuple[bytes, str]] = {
    "seven bytes": (bytes(7), "7 bytes; at least the 8 bytes of the header length are needed"),
    "length past the end": (pack({}, length=99), "a header of 99 bytes in a file of 10 bytes; is the file truncated"),
    "length beyond reason": (pack({}, length=2**63), f"9223372036854775808 bytes; at most {MAX_JSON_BYTES}"),
    "no header": (pack(b""), "header: not valid JSON"),
    "not JSON": (pack(b"{oops"), "header: not valid JSON"),
    "not UTF-8": (pack(b'{"\xff":0}'), "header: not valid JSON"),
    "not an object": (pack([]), "header: expected a JSON object, got list"),
    "nested": (pack(b'{"a":' * 100_000), "header: not valid JSON"),
    "long number": (pack(b'{"a":' + b"9" * 5000 + b"}"), "header: not valid JSON|needs exactly"),
    "twice": (pack(b'{"a":1,"a":2}'), "the key 'a' appears twice"),
    "entry a list": (pack({"t": []}), "tensor 't' needs exactly dtype, shape and data_offsets"),
    "entry with more": (pack(entry(more=1), EIGHT), "tensor 't' needs exactly"),
    "entry with less": (pack({"t": {"dtype": "F32"}}), "tensor 't' needs exactly"),
    "dtype": (pack(entry(dtype="F7"), EIGHT), "tensor 't' has dtype 'F7'; known are BOOL, .*F32"),
    "dtype a list": (pack(entry(dtype=["F32"]), EIGHT), r"tensor 't' has dtype \['F32'\]"),
    "shape a number": (pack(entry(shape=2), EIGHT), "tensor 't' has shape 2; expected a list of sizes"),
    "shape negative": (pack(entry(shape=[-1, -2]), EIGHT), r"tensor 't' has shape \[-1, -2\]"),
    "shape of booleans": (pack(entry(shape=[True, 2]), EIGHT), r"tensor 't' has shape \[True, 2\]"),
    "shape of fractions": (pack(entry(shape=[2.0]), EIGHT), r"tensor 't' has shape \[2.0\]"),
    "shape of many": (pack(entry(shape=[1] * 99), EIGHT), "tensor 't' has shape"),
    "shape overflows": (pack(entry(shape=[2**62, 2**62]), EIGHT), r"tensor 't' takes 8 bytes, but F32 \["),
    "offsets one": (pack(entry(data_offsets=[0]), EIGHT), r"data_offsets \[0\]; expected \[begin, end\]"),
    "offsets reversed": (pack(entry(data_offsets=[8, 0]), EIGHT), r"data_offsets \[8, 0\]"),
    "offsets negative": (pack(entry(data_offsets=[-8, 0]), EIGHT), r"data_offsets \[-8, 0\]"),
    "size differs": (pack(entry(shape=[3]), EIGHT), r"takes 8 bytes, but F32 \[3\] takes 12 bytes"),
    "part of a byte": (
        pack({"t": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"\0"),
        r"takes 1 bytes, but F4 \[3\] takes 1.5 bytes",
    ),
    "data past the end": (pack(entry(data_offsets=[2**40, 2**40 + 8]), EIGHT), "ends at byte 1099511627784 of the da"),
    "data cut": (pack(entry(), bytes(7)), "ends at byte 8 of the data, of which there are 7; is the file truncated"),
    "overlap": (pack(pair([0, 5], [4, 8]), EIGHT), "tensors 'a' and 'b' overlap"),
    "same place": (pack(pair([0, 8], [0, 8]), EIGHT), "overlap"),
    "hole": (pack(pair([0, 3], [4, 8]), EIGHT), "1 bytes before tensor 'b' belong to no tensor"),
    "hole at the start": (pack(pair([1, 4], [4, 8]), EIGHT), "1 bytes before tensor 'a' belong to no tensor"),
    "bytes at the end": (pack(entry(), bytes(9)), "1 bytes at the end belong to no tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        file_of(data, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors") + ": ")


@pytest.mark.parametrize("what", ["a folder", "nothing", "an empty file"])
def test_what_is_no_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    if what == "a folder":
        path.mkdir()
    elif what == "an empty file":
        path.touch()
    with pytest.raises(CheckpointError, match="x: cannot be read"):
        SafetensorsFile(path)


VALID = save(ARRAYS)
HEADER_END = 8 + struct.unpack("<Q", VALID[:8])[0]


def read_quickly(data: bytes, folder: Path) -> None:
    begin = time.process_time()
    with contextlib.suppress(CheckpointError):
        file = file_of(data, folder)
        for tensor in file.tensors.values():
            assert file.file.array(tensor.offset, (tensor.nbytes,), np.uint8).nbytes == tensor.nbytes
    assert time.process_time() - begin < 5


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_give_an_error_or_a_file(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(VALID)
    for position, byte in changes:
        data[position] = byte
    read_quickly(bytes(data), tmp_path_factory.getbasetemp())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=16))
def test_cut_and_spliced_files_give_an_error_or_a_file(
    tmp_path_factory: pytest.TempPathFactory, begin: int, end: int, middle: bytes
) -> None:
    read_quickly(VALID[:begin] + middle + VALID[end:], tmp_path_factory.getbasetemp())


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), JSON_VALUES, max_size=4))
def test_any_json_gives_an_error_or_a_file(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    read_quickly(pack(entry(**changes), EIGHT), tmp_path_factory.getbasetemp())
