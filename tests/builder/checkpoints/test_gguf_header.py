"""GGUF headers: every value type, and every way in which a file can be wrong."""

from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm.builder.checkpoints import gguf_cursor, gguf_header, open_checkpoint
from aotllm.builder.checkpoints.mapped_file import MappedFile
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.checkpoints import raw_gguf as raw
from tests.builder.checkpoints.raw_gguf import Payload, RawGguf, RawTensor, tiny_llama


def read(data: bytes, folder: Path) -> gguf_header.GgufHeader:
    path = folder / "file.gguf"
    path.write_bytes(data)
    return gguf_header.read_header(MappedFile(path))


VALUES: dict[str, tuple[int, Any, Any]] = {
    "u8": (raw.U8, 255, 255),
    "i8": (raw.I8, -128, -128),
    "u16": (raw.U16, 65535, 65535),
    "i16": (raw.I16, -32768, -32768),
    "u32": (raw.U32, 2**32 - 1, 2**32 - 1),
    "i32": (raw.I32, -(2**31), -(2**31)),
    "u64": (raw.U64, 2**64 - 1, 2**64 - 1),
    "i64": (raw.I64, -(2**63), -(2**63)),
    "f32": (raw.F32, 0.5, 0.5),
    "f64": (raw.F64, 0.1, 0.1),
    "true": (raw.BOOL, 1, True),
    "false": (raw.BOOL, 0, False),
    "string": (raw.STRING, "héllo\0", "héllo\0"),
    "empty string": (raw.STRING, "", ""),
    "strings": (raw.ARRAY, (raw.STRING, ["a", "", "é"]), ["a", "", "é"]),
    "no strings": (raw.ARRAY, (raw.STRING, []), []),
    "arrays": (raw.ARRAY, (raw.ARRAY, [(raw.STRING, ["a"]), (raw.STRING, [])]), [["a"], []]),
}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("case", VALUES)
def test_values(case: str, version: int, tmp_path: Path) -> None:
    kind, content, expected = VALUES[case]
    metadata = read(RawGguf([("before", raw.U8, 1), ("key", kind, content)], version=version).pack(), tmp_path).metadata
    assert metadata["key"] == expected
    assert type(metadata["key"]) is type(expected)


@pytest.mark.parametrize("kind", [raw.U8, raw.I16, raw.I32, raw.U64, raw.F32, raw.F64, raw.BOOL])
def test_arrays_of_numbers(kind: int, tmp_path: Path) -> None:
    array = read(RawGguf([("key", raw.ARRAY, (kind, [1, 0, 1]))]).pack(), tmp_path).metadata["key"]
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [1, 0, 1]


def test_same_header_as_the_gguf_package(tmp_path: Path) -> None:
    header = read(tiny_llama().pack(), tmp_path)
    theirs = gguf.GGUFReader(tmp_path / "file.gguf")
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            ours = header.metadata[key]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents()
    assert [(t.name, list(t.shape), t.offset, t.nbytes) for t in header.tensors.values()] == [
        (t.name, list(reversed(t.shape.tolist())), t.data_offset, t.n_bytes) for t in theirs.tensors
    ]


def test_alignment(tmp_path: Path) -> None:
    file = tiny_llama()
    file.keys.append(("general.alignment", raw.U32, 128))
    file.alignment = 128
    header = read(file.pack(), tmp_path)
    assert all(tensor.offset % 128 == 0 for tensor in header.tensors.values())


def one_tensor(**fields: Any) -> RawGguf:
    return RawGguf(tensors=[RawTensor(**{"name": "t", "dims": (8,), "data": bytes(32), **fields})])


def two_tensors(second: str = "b", offset: int | None = None) -> RawGguf:
    return RawGguf(
        tensors=[RawTensor("a", (16,), data=bytes(64)), RawTensor(second, (8,), data=bytes(32), offset=offset)]
    )


def key(kind: int, content: Any) -> RawGguf:
    return RawGguf([("key", kind, content)])


def claim(kind: int, count: int) -> Payload:
    """An array that claims `count` items of `kind` and has none."""
    return Payload(struct.pack("<IQ", kind, count))


def deep(levels: int) -> Payload:
    return Payload(claim(raw.ARRAY, 1) * levels + claim(raw.U8, 0))


BAD: dict[str, tuple[RawGguf | bytes, str]] = {
    "three bytes": (b"GGU", "truncated: the magic number needs 4 bytes at byte 0, but the file has 3"),
    "magic": (RawGguf(magic=b"ABCD"), r"not a GGUF file: it starts with b'ABCD' instead of b'GGUF'"),
    "ggjt": (RawGguf(magic=b"tjgg"), "an old GGML file, from before GGUF"),
    "magic only": (b"GGUF", "truncated: the version"),
    "version 0": (RawGguf(version=0), "GGUF version 0; versions 2 and 3 are read"),
    "version 1": (RawGguf(version=1), "GGUF version 1; versions 2 and 3 are read"),
    "version 4": (RawGguf(version=4), "GGUF version 4"),
    "big endian": (RawGguf(version=3 << 24), "big-endian GGUF file; only little-endian"),
    "no counts": (RawGguf().pack()[:20], "truncated: the key count"),
    "tensor count": (RawGguf(num_tensors=2**60), "1152921504606846976 tensors; at most"),
    "tensors do not fit": (RawGguf(num_tensors=9), "9 tensors cannot fit the 0 bytes that follow"),
    "key count": (RawGguf(num_keys=2**63), "9223372036854775808 metadata keys; at most"),
    "keys do not fit": (RawGguf(num_keys=9), "9 metadata keys cannot fit"),
    "key length": (RawGguf([(b"k" * (1 << 17), raw.U8, 1)]), "metadata key 0 is a string of 131072 bytes; at most"),
    "key not UTF-8": (RawGguf([(b"k\xff", raw.U8, 1)]), "metadata key 0 is not valid UTF-8"),
    "key twice": (RawGguf([("k", raw.U8, 1), ("k", raw.U8, 1)]), "the metadata key 'k' appears twice"),
    "value type": (key(13, Payload(b"\0")), "'key' has the unknown value type 13"),
    "boolean": (key(raw.BOOL, 2), "'key' is a boolean of value 2; expected 0 or 1"),
    "value cut": (key(raw.U64, Payload(b"\0")), "truncated: 'key' needs 8 bytes"),
    "string not UTF-8": (key(raw.STRING, b"a\xc3"), r"'key' is not valid UTF-8 \(unexpected end of data at byte 1"),
    "string length": (key(raw.STRING, Payload(struct.pack("<Q", 2**62))), "'key' is a string of 46"),
    "string cut": (key(raw.STRING, Payload(struct.pack("<Q", 99))), "truncated: 'key' needs 99"),
    "array item type": (key(raw.ARRAY, claim(99, 0)), "'key' is an array of the unknown value type 99"),
    "array of numbers": (key(raw.ARRAY, claim(raw.F64, 2**61)), "'key' is an array of 2305843009213693952 values"),
    "array cut": (key(raw.ARRAY, claim(raw.F64, 99)), "truncated: 'key' needs 792 bytes"),
    "array of strings": (key(raw.ARRAY, claim(raw.STRING, 2**40)), "more than all arrays together may hold"),
    "strings cut": (key(raw.ARRAY, claim(raw.STRING, 99)), "truncated: the file ends in string . of 99 of 'key'"),
    "strings not UTF-8": (key(raw.ARRAY, (raw.STRING, ["a", b"\xff"])), "'key': string 1 is not valid UTF-8"),
    "array of arrays": (key(raw.ARRAY, claim(raw.ARRAY, 2**40)), "more than all arrays together may hold"),
    "nesting": (key(raw.ARRAY, deep(5)), "'key' nests arrays more than 4 deep"),
    "endless nesting": (key(raw.ARRAY, deep(100_000)), "'key' nests arrays more than 4 deep"),
    "alignment 0": (RawGguf([("general.alignment", raw.U32, 0)]), "general.alignment is 0; expected a power of two"),
    "alignment 24": (RawGguf([("general.alignment", raw.U32, 24)]), "general.alignment is 24"),
    "alignment huge": (RawGguf([("general.alignment", raw.U64, 2**40)]), "general.alignment is 1099511627776"),
    "alignment string": (RawGguf([("general.alignment", raw.STRING, "32")]), "general.alignment is '32'"),
    "tensor name": (one_tensor(name=b"t\xff"), "the name of tensor 0 is not valid UTF-8"),
    "tensor name length": (one_tensor(name="t" * 2000), "the name of tensor 0 is a string of 2000 bytes"),
    "no dimensions": (one_tensor(dims=()), "tensor 't' has 0 dimensions; expected 1 to 4"),
    "five dimensions": (one_tensor(dims=(1, 1, 1, 1, 8)), "tensor 't' has 5 dimensions"),
    "zero size": (one_tensor(dims=(8, 0)), r"tensor 't' has sizes \[8, 0\]; each must be above zero"),
    "size overflow": (one_tensor(dims=(2**47, 2**47)), "tensor 't' ends at byte .*, past the end of the file"),
    "type 99": (one_tensor(type=99), "tensor 't' has the unknown quantization type number 99$"),
    "type removed": (one_tensor(type=31), r"type number 31 \(Q4_0_4_4, removed from GGML: quantize again\)"),
    "row not whole blocks": (one_tensor(type=raw.Q4_0_TYPE), "rows of 8 values; Q4_0 needs multiples of 32"),
    "offset past the end": (one_tensor(offset=2**40), "tensor 't' ends at byte 1099511627.*, past the end of the file"),
    "offset wraps": (one_tensor(offset=2**64 - 32), "past the end of the file"),
    "misaligned": (two_tensors(offset=65), "tensor 'b' is misaligned: byte 65 of the data is no multiple of 32"),
    "overlap": (two_tensors(offset=32), "tensors 'a' and 'b' overlap"),
    "same place": (two_tensors(offset=0), "overlap"),
    "tensor twice": (two_tensors("a"), "the tensor 'a' appears twice"),
    "data cut": (one_tensor(data=bytes(31)), "tensor 't' ends at byte .*, past the end of the file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(case: str, tmp_path: Path) -> None:
    file, message = BAD[case]
    data = file if isinstance(file, bytes) else file.pack()
    with pytest.raises(CheckpointError, match=message) as caught:
        read(data, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "file.gguf") + ": ")


def test_truncations_are_refused(tmp_path: Path) -> None:
    data = tiny_llama().pack()
    for size in range(0, len(data), 5):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "cut.gguf")


def test_limits_hold_for_all_arrays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_cursor, "MAX_STRINGS", 5)
    three = (raw.STRING, ["a", "b", "c"])
    assert read(RawGguf([("one", raw.ARRAY, three)]).pack(), tmp_path).metadata["one"] == ["a", "b", "c"]
    with pytest.raises(CheckpointError, match="'two' is an array of 3 values; that is more than all arrays together"):
        read(RawGguf([("one", raw.ARRAY, three), ("two", raw.ARRAY, three)]).pack(), tmp_path)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty strings": lambda: key(raw.ARRAY, Payload(claim(raw.STRING, 10**5) + bytes(8 * 10**5))).pack(),
    "a million empty arrays": lambda: key(
        raw.ARRAY, Payload(claim(raw.ARRAY, 10**4) + claim(raw.U8, 0) * 10**4)
    ).pack(),
    "claims without content": lambda: key(raw.ARRAY, claim(raw.U8, gguf_cursor.MAX_ARRAY_BYTES)).pack(),
    "many keys": lambda: RawGguf([(f"{i}", raw.U8, 1) for i in range(10**4)]).pack(),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_memory_is_bounded_by_the_size_of_the_file(case: str, tmp_path: Path) -> None:
    data = HOSTILE[case]()
    tracemalloc.start()
    with contextlib.suppress(CheckpointError):
        read(data, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(data) + 100_000


VALID = tiny_llama().pack()


def open_quickly(data: bytes, folder: Path) -> None:
    """Opens and reads everything; only the two errors of bad checkpoints may come out."""
    path = folder / "fuzzed.gguf"
    path.write_bytes(data)
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(CheckpointError, UnsupportedModel), open_checkpoint(path) as checkpoint:
            for name, info in checkpoint.tensors().items():
                assert checkpoint.read(name).shape == info.shape
    assert time.process_time() - begin < 5


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_changed_bytes_give_an_error_or_a_model(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(VALID)
    for position, byte in changes:
        data[position] = byte
    open_quickly(bytes(data), tmp_path_factory.getbasetemp())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 900), st.integers(0, 900), st.binary(max_size=16))
def test_cut_and_spliced_headers_give_an_error_or_a_model(
    tmp_path_factory: pytest.TempPathFactory, begin: int, end: int, middle: bytes
) -> None:
    open_quickly(VALID[:begin] + middle + VALID[end:], tmp_path_factory.getbasetemp())
