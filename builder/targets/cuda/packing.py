"""Matrices of a checkpoint → tensors of a CUDA engine, in pieces of rows (`docs/engine_format.md`)."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import FLOAT_STORAGE, FP8_BLOCK, FP8_STORAGE, INT_STORAGE, Checkpoint
from aotllm.builder.numerics import F32, U8, bf16_bits, dequantize_fp8, quantize_e4m3, stored_values
from aotllm.builder.targets.cuda.integers import INT_FORMATS
from aotllm.builder.targets.cuda.matrix import Matrix
from aotllm.builder.targets.cuda.packing_integers import integer_jobs
from aotllm.builder.targets.program import TensorJob
from aotllm.engines.rank_file import TensorSpec
from aotllm.errors import CheckpointError

BITS: Final = {"bf16": 16, "fp8": 8, "fp8_block": 8, "int8": 8, "int4": 4}
"""Of a weight, by format"""

_PART_WEIGHTS: Final = 1 << 23
"""Weights of a piece: the unit that threads share out"""
_CHUNK_WEIGHTS: Final = 1 << 17
"""Weights converted at a time: temporaries stay in a core's cache"""


def pack_jobs(
    checkpoint: Checkpoint,
    tensor: str,
    matrix: Matrix,
    fmt: str,
    group: int | None = None,
    search_scales: bool = False,
) -> tuple[TensorJob, ...]:
    """The jobs that make `matrix` in format `fmt`: `tensor`, and `{tensor}.scales`, `{tensor}.zeros` where it has some.

    Args:
        checkpoint: where its rows are read.
        tensor: its name in the rank's file.
        matrix: which rows and columns.
        fmt: of BITS.
        group: columns that share a scale, of integers.
        search_scales: how scales of fp8 are found where the checkpoint has none, see `quantize_e4m3`.

    Raises (when a part runs):
        CheckpointError: a weight that shall be quantized is not finite.
    """
    if fmt in INT_FORMATS:
        return integer_jobs(checkpoint, tensor, matrix, fmt, group, _PART_WEIGHTS)
    spec = TensorSpec("U8", (matrix.n * matrix.k * BITS[fmt] // 8,))
    step = max(1, _PART_WEIGHTS // matrix.k)
    pieces = [slice(first, min(first + step, matrix.n)) for first in range(0, matrix.n, step)]
    if fmt == "bf16":
        return (TensorJob(tensor, spec, tuple(partial(_pack_bf16, checkpoint, matrix, p) for p in pieces), fmt),)
    if fmt == "fp8_block":
        codes = TensorJob(tensor, spec, tuple(partial(_pack_codes, checkpoint, matrix, p) for p in pieces), fmt)
        blocks = _block_scales(checkpoint, matrix)
        return codes, TensorJob(f"{tensor}.scales", TensorSpec("F32", blocks.shape), (lambda: blocks,), fmt, True)
    scales = np.ones(matrix.n, np.float32)  # filled by the parts of the codes
    parts = tuple(partial(_pack_fp8, checkpoint, matrix, p, scales[p], search_scales) for p in pieces)
    codes = TensorJob(tensor, spec, parts, fmt)
    scale_spec = TensorSpec("F32", scales.shape)
    return codes, TensorJob(f"{tensor}.scales", scale_spec, (lambda: scales,), fmt, in_order=True)


def _pack_bf16(checkpoint: Checkpoint, matrix: Matrix, piece: slice) -> U8:
    """uint8 `[rows · k · 2]`; a view of the checkpoint where that holds these very bytes."""
    rows = matrix.rows[piece]
    out = np.zeros((len(rows), matrix.k), np.uint16)
    for source, places, taken in matrix.runs(rows):
        if checkpoint.tensors()[source].storage in INT_STORAGE:
            values = checkpoint.integers(source, taken).values()
            out[places, : len(matrix.columns)] = bf16_bits(_columns(values, matrix))
            continue
        storage, stored = _stored_rows(checkpoint, source, taken)
        if storage == "bf16" and len(taken) == len(rows) and matrix.k == stored.shape[1] == len(matrix.columns):
            view = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
            view[:: mmap.PAGESIZE].max()  # have the pages read here, on one of many threads, not where they are written
            return view
        if storage == "bf16":
            out[places, : len(matrix.columns)] = _columns(stored, matrix)
        else:
            for part in _chunks(len(taken), stored.shape[1]):
                if storage in FP8_STORAGE:
                    values = dequantize_fp8(stored[part], _scales_of_rows(checkpoint, source, taken[part]))
                else:
                    values = stored_values(stored[part], storage)
                out[places[part], : len(matrix.columns)] = bf16_bits(_columns(values, matrix))
    return out.view(np.uint8).reshape(-1)


def _pack_fp8(checkpoint: Checkpoint, matrix: Matrix, piece: slice, scales: F32, search: bool) -> U8:
    """Codes, uint8 `[rows · k]`; writes `scales` `[rows]`."""
    rows = matrix.rows[piece]
    out = np.zeros((len(rows), matrix.k), np.uint8)
    for source, places, taken in matrix.runs(rows):
        storage, stored = _stored_rows(checkpoint, source, taken)
        if storage == "fp8":
            out[places, : len(matrix.columns)] = _columns(stored, matrix)
            scales[places] = checkpoint.scales(source)[taken.start : taken.stop]
            continue
        columns = slice(matrix.columns.start, matrix.columns.stop)
        for part in _chunks(len(taken), stored.shape[1]):
            values = stored[part] if storage in FLOAT_STORAGE else stored_values(stored[part], storage)
            codes, row_scales = quantize_e4m3(values, columns, search)
            if not np.isfinite(row_scales).all():
                raise CheckpointError(
                    f"{checkpoint.path}: tensor '{source}' holds a value that is not finite, so it has no FP8 scale"
                )
            out[places[part], : len(matrix.columns)] = codes
            scales[places[part]] = row_scales
    return out.reshape(-1)


def _pack_codes(checkpoint: Checkpoint, matrix: Matrix, piece: slice) -> U8:
    """Codes of a checkpoint as they are, uint8 `[rows · k]`."""
    rows = matrix.rows[piece]
    out = np.zeros((len(rows), matrix.k), np.uint8)
    for source, places, taken in matrix.runs(rows):
        out[places, : len(matrix.columns)] = _columns(_stored_rows(checkpoint, source, taken)[1], matrix)
    return out.reshape(-1)


def _block_scales(checkpoint: Checkpoint, matrix: Matrix) -> F32:
    """`[blocks of rows, blocks of columns]`; 1 for blocks that are padding."""
    origins = matrix.scale_blocks()
    assert origins is not None, f"lowering lets no matrix of {matrix.sources} through whose blocks are torn"
    first = matrix.columns.start // FP8_BLOCK
    width = -(-matrix.columns.stop // FP8_BLOCK) - first
    out = np.ones((len(origins), -(-matrix.k // FP8_BLOCK)), np.float32)
    for i, source in enumerate(matrix.sources):
        mine = origins[:, 0] == i
        out[mine, :width] = checkpoint.scales(source)[origins[mine, 1], first : first + width]
    return out


def _stored_rows(checkpoint: Checkpoint, source: str, taken: range) -> tuple[str, npt.NDArray[Any]]:
    """Storage and rows of a matrix, as `Checkpoint.read_stored` has them."""
    return checkpoint.tensors()[source].storage, checkpoint.read_stored(source)[taken.start : taken.stop]


def _scales_of_rows(checkpoint: Checkpoint, source: str, taken: range) -> F32:
    """Scales of some rows of an fp8 matrix: `[rows]`, or `[rows, blocks of columns]`."""
    scales = checkpoint.scales(source)
    if scales.ndim == 1:
        return scales[taken.start : taken.stop]
    return scales[np.arange(taken.start, taken.stop) // FP8_BLOCK]


def _columns(rows: npt.NDArray[Any], matrix: Matrix) -> npt.NDArray[Any]:
    return rows[:, matrix.columns.start : matrix.columns.stop]


def _chunks(rows: int, k: int) -> Iterator[slice]:
    step = max(1, _CHUNK_WEIGHTS // max(k, 1))
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
