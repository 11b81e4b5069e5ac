"""Tensors of a CUDA engine byte by byte: which rows go where, and in which format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aotllm.builder.checkpoints.base import TensorInfo
from aotllm.builder.numerics import bf16_bits, bf16_values
from aotllm.builder.targets.cuda import packing
from aotllm.builder.targets.cuda.matrix import Matrix, interleaved, stacked
from aotllm.builder.targets.cuda.packing import pack_jobs
from aotllm.errors import CheckpointError
from tests.builder.e4m3_definition import e4m3_codes, e4m3_row_scales, e4m3_searched_scales
from tests.builder.fakes import TINY, MemoryCheckpoint

K = 32


class StoredCheckpoint(MemoryCheckpoint):
    """Arrays in one storage."""

    def __init__(self, storage, **arrays):
        super().__init__(TINY, arrays)
        self.storage = storage

    def tensors(self):
        return {name: TensorInfo(name, a.shape, self.storage, a.nbytes) for name, a in self.arrays.items()}

    def read_stored(self, name):
        return {"f32": np.asarray, "f16": np.float16, "bf16": bf16_bits}[self.storage](self.arrays[name])


@pytest.fixture(params=[1, 40, 1 << 23], autouse=True)
def piece_size(request, monkeypatch):
    """Pieces of one row, of few, and of everything."""
    monkeypatch.setattr(packing, "_PART_WEIGHTS", request.param)
    monkeypatch.setattr(packing, "_CHUNK_WEIGHTS", request.param // 2)


def run(jobs):
    """Tensor → array; the jobs' parts backwards, as threads may run them, those in order last."""
    results = {}
    for job in jobs:
        pieces = [part() for part in reversed(job.parts)][::-1]
        results[job.tensor] = np.concatenate([piece.reshape(-1) for piece in pieces])
        assert results[job.tensor].nbytes == job.spec.nbytes
    return results


def random(n, k=K):
    return np.random.default_rng().normal(size=(n, k)).astype(np.float32)


@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
def test_rows_one_under_the_other(storage):
    checkpoint = StoredCheckpoint(storage, q=random(5), k=random(3))
    matrix = Matrix(("q", "k"), (5, 3), stacked([range(1, 5), range(0, 4)], (5, 3)), range(K), K)
    result = run(pack_jobs(checkpoint, "qk", matrix, "bf16"))["qk"].view(np.uint16).reshape(8, K)
    q, k = (
        bf16_bits(checkpoint.read(name).astype(np.float16).astype(np.float32))
        if storage == "f16"
        else bf16_bits(checkpoint.read(name))
        for name in "qk"
    )
    np.testing.assert_array_equal(result, np.concatenate([q[1:], k, np.zeros((1, K), np.uint16)]))


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_gate_and_up_take_turns_of_eight(fmt):
    gate, up = random(20), random(20)
    matrix = Matrix(("gate", "up"), (20, 20), interleaved(range(3, 17), 20, 16), range(K), K)
    tensors = run(pack_jobs(StoredCheckpoint("bf16", gate=gate, up=up), "g", matrix, fmt))
    expected = np.zeros((32, K), np.float32)
    expected[0:8], expected[8:16] = gate[3:11], up[3:11]
    expected[16:22], expected[24:30] = gate[11:17], up[11:17]
    if fmt == "bf16":
        np.testing.assert_array_equal(tensors["g"].view(np.uint16).reshape(32, K), bf16_bits(expected))
    else:
        assert_quantized(tensors["g"].reshape(32, K), tensors["g.scales"], bf16_values(bf16_bits(expected)))


def assert_quantized(codes, scales, values):
    """As torch quantizes: scale = max|w| / 448, w / scale to nearest even."""
    values = torch.from_numpy(values)
    expected = values.abs().amax(dim=1) / 448
    expected[expected == 0] = 1
    np.testing.assert_array_equal(scales, expected.numpy())
    ratios = (values / expected[:, None]).clamp(-448, 448)
    np.testing.assert_array_equal(codes, ratios.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


@pytest.mark.parametrize("storage", ["f32", "bf16"])
def test_fp8_with_a_scale_per_row(storage):
    values = random(24, 96) * np.logspace(-6, 6, 24, dtype=np.float32)[:, None]
    values[7] = 0
    checkpoint = StoredCheckpoint(storage, w=values)
    matrix = Matrix(("w",), (24,), stacked([range(24)], (24,)), range(96), 96)
    tensors = run(pack_jobs(checkpoint, "w", matrix, "fp8"))
    stored = bf16_values(checkpoint.read_stored("w")) if storage == "bf16" else values
    assert_quantized(tensors["w"].reshape(24, 96), tensors["w.scales"], stored)


@pytest.mark.parametrize("storage", ["f32", "f16", "bf16"])
def test_fp8_with_searched_scales(storage):
    """Whatever the pieces, which the rows of two sources are cut to."""
    up, down = random(24, 96), random(9, 96) * np.float32(0.01)
    checkpoint = StoredCheckpoint(storage, up=up, down=down)
    rows = stacked([range(2, 24), range(0, 9)], (24, 9))
    tensors = run(pack_jobs(checkpoint, "w", Matrix(("up", "down"), (24, 9), rows, range(96), 96), "fp8", None, True))
    read = bf16_values if storage == "bf16" else np.float32
    stored = np.concatenate([read(checkpoint.read_stored("up"))[2:], read(checkpoint.read_stored("down"))])
    expected = e4m3_searched_scales(stored)
    np.testing.assert_array_equal(tensors["w.scales"][:31], expected)
    np.testing.assert_array_equal(tensors["w"].reshape(-1, 96)[:31], e4m3_codes(stored / expected[:, None]))
    assert (expected != e4m3_row_scales(stored)).any()


@pytest.mark.parametrize(("fmt", "search"), [("bf16", False), ("fp8", False), ("fp8", True)])
def test_columns_of_ranks_are_those_of_the_whole(fmt, search):
    """Codes and scales too: a rank's scale is that of the whole row. Columns beyond the share are zeros."""
    checkpoint = StoredCheckpoint("bf16", w=random(16, 80))
    rows = stacked([range(16)], (16,))
    size = {"bf16": 2, "fp8": 1}[fmt]
    whole = run(pack_jobs(checkpoint, "w", Matrix(("w",), (16,), rows, range(80), 80), fmt, None, search))
    for columns in (range(0, 40), range(40, 80)):
        part = run(pack_jobs(checkpoint, "w", Matrix(("w",), (16,), rows, columns, 64), fmt, None, search))
        codes = part["w"].reshape(16, 64 * size)
        all_codes = whole["w"].reshape(16, 80 * size)
        np.testing.assert_array_equal(codes[:, : 40 * size], all_codes[:, columns.start * size : columns.stop * size])
        assert not codes[:, 40 * size :].any()
        if fmt == "fp8":
            np.testing.assert_array_equal(part["w.scales"], whole["w.scales"])


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_have_no_scale_are_refused(bad, search):
    values = random(4)
    values[2, 5] = bad
    matrix = Matrix(("w",), (4,), stacked([range(4)], (4,)), range(K), K)
    with pytest.raises(CheckpointError, match="memory: tensor 'w' holds a value that is not finite"):
        run(pack_jobs(StoredCheckpoint("f32", w=values), "w", matrix, "fp8", None, search))
