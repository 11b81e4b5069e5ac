"""The rank file: readable by the safetensors library, aligned, complete."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from aotllm.engines.rank_file import PAD_PREFIX, RankFileWriter, TensorSpec, read_header
from aotllm.errors import EngineError, Internal


def write(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    specs = {n: TensorSpec("U8" if a.dtype == np.uint8 else "F32", a.shape) for n, a in arrays.items()}
    with RankFileWriter(path, specs, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
        return writer.close()


@given(sizes=st.lists(st.integers(0, 200), max_size=8), text=st.text(max_size=100))
def test_any_tensors_are_read_back_and_aligned(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], text: str
) -> None:
    path = tmp_path_factory.mktemp("rank") / "rank0.engine"
    arrays = {
        f"t{i}": np.arange(n).astype(np.uint8) if i % 2 else np.arange(n).astype(np.float32)
        for i, n in enumerate(sizes)
    }
    digest = write(path, arrays, {"plan": text})

    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    loaded = {n: a for n, a in load_file(path).items() if not n.startswith(PAD_PREFIX)}
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
    header = read_header(path)
    assert header.pop("__metadata__")["plan"] == text
    data_start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert data_start % 64 == 0
    assert all(r["data_offsets"][0] % 64 == 0 for n, r in header.items() if not n.startswith(PAD_PREFIX))


def test_a_file_of_many_chunks_is_the_tensors_one_after_the_other(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    sizes = [(3 << 20) + 64, 0, 1, (2 << 20) - 64, 2 << 20, 17, 5 << 20]
    arrays = {f"t{i}": random.integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)}
    path = tmp_path / "rank0.engine"
    digest = write(path, arrays, {})

    content = path.read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    start = 8 + int.from_bytes(content[:8], "little")
    header = read_header(path)
    for name, array in arrays.items():
        begin, end = header[name]["data_offsets"]
        assert content[start + begin : start + end] == array.tobytes(), name
    assert len(content) == start + max(record["data_offsets"][1] for n, record in header.items() if n != "__metadata__")


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    specs = {"a": TensorSpec("F32", (4,)), "b": TensorSpec("U8", (3,))}
    with RankFileWriter(tmp_path / "x", specs, {}) as writer:
        with pytest.raises(Internal, match="expected a"):
            writer.write("b", np.zeros(3, np.uint8))
        with pytest.raises(Internal, match="expected a"):
            writer.write("a", np.zeros(5, np.float32))
        writer.write("a", np.zeros(4, np.float32))
        with pytest.raises(Internal, match="tensor b was announced"):
            writer.close()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "header length"),
        (b"\xff" * 8, "header length"),
        ((100).to_bytes(8, "little") + b"{}", "header length"),
        ((2).to_bytes(8, "little") + b"{]", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "expected an object"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "not valid JSON"),
    ],
)
def test_damaged_headers_are_named(tmp_path: Path, data: bytes, word: str) -> None:
    path = tmp_path / "rank0.engine"
    path.write_bytes(data)
    with pytest.raises(EngineError, match=word) as error:
        read_header(path)
    assert str(path) in str(error.value)
