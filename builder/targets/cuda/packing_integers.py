"""Matrices of a checkpoint → int8 and int4 tensors of a CUDA engine, in pieces of rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import INT_STORAGE, Checkpoint, Integers
from aotllm.builder.numerics import F32, INT4_GROUP, U8, int4_groups, int8_rows, stored_values
from aotllm.builder.targets.cuda.integers import (
    INT8_ZERO,
    ROWS,
    code_bytes,
    cut,
    group_shape,
    pack_codes,
    pack_groups,
)
from aotllm.builder.targets.cuda.matrix import Matrix
from aotllm.builder.targets.program import TensorJob
from aotllm.engines.rank_file import TensorSpec
from aotllm.errors import CheckpointError

_CHUNK_WEIGHTS: Final = 1 << 17
"""Weights quantized at a time: temporaries stay in a core's cache"""


def integer_jobs(
    checkpoint: Checkpoint, tensor: str, matrix: Matrix, fmt: str, group: int | None, part_weights: int
) -> tuple[TensorJob, ...]:
    """The jobs of tensors `tensor`, `{tensor}.scales` and, in groups, `{tensor}.zeros`.

    Integers of the checkpoint keep their values exactly; weights of other storages are quantized.

    Args:
        checkpoint: where the sources are.
        tensor: name in the engine.
        matrix: what of the sources.
        fmt: int4 | int8.
        group: columns that share scale and zero; None = int8 with a scale per row.
        part_weights: weights of a piece, about.

    Raises (when a part runs):
        CheckpointError: a weight that shall be quantized is not finite.
    """
    step = max(ROWS, part_weights // matrix.k // ROWS * ROWS)
    pieces = [slice(first, min(first + step, matrix.n)) for first in range(0, matrix.n, step)]
    spec = TensorSpec("U8", (code_bytes(fmt, matrix.n, matrix.k),))
    if group is None:
        scales = np.ones(matrix.n, np.float32)  # filled by the parts of the codes, as are those below
        parts = tuple(partial(_pack_rows, checkpoint, matrix, piece, scales[piece]) for piece in pieces)
        codes = TensorJob(tensor, spec, parts, fmt)
        return codes, TensorJob(f"{tensor}.scales", TensorSpec("F32", scales.shape), (lambda: scales,), fmt, True)
    shape = group_shape(matrix.n, matrix.k, group)
    scales, zeros = np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
    parts = tuple(
        partial(_pack_groups, checkpoint, matrix, piece, fmt, group, scales[at], zeros[at])
        for piece in pieces
        for at in (slice(piece.start // ROWS, -(-piece.stop // ROWS)),)
    )
    return (
        TensorJob(tensor, spec, parts, fmt),
        TensorJob(f"{tensor}.scales", TensorSpec("F32", shape), (lambda: scales,), fmt, in_order=True),
        TensorJob(f"{tensor}.zeros", TensorSpec("U8", shape), (lambda: zeros,), fmt, in_order=True),
    )


def _pack_groups(
    checkpoint: Checkpoint,
    matrix: Matrix,
    piece: slice,
    fmt: str,
    group: int,
    scales: F32,
    zeros: U8,
) -> U8:
    """Codes of some rows; writes `scales` and `zeros` `[strips, groups, 64]`."""
    rows = matrix.rows[piece]
    count = -(-matrix.k // group)
    codes = np.zeros((len(rows), matrix.k), np.uint8)
    row_scales, row_zeros = np.zeros((len(rows), count), np.float32), np.zeros((len(rows), count), np.uint8)
    for source, places, taken in matrix.runs(rows):
        for part in _chunks(taken, checkpoint.tensors()[source].shape[1]):
            integers = _integers(checkpoint, source, part)
            at = places[part.start - taken.start : part.stop - taken.start]
            codes[at], row_scales[at], row_zeros[at] = cut(integers, matrix.columns, matrix.k, group)
    scales[:] = pack_groups(row_scales, matrix.k, group)
    zeros[:] = pack_groups(row_zeros, matrix.k, group)
    if fmt == "int8":
        codes -= np.uint8(INT8_ZERO)  # modulo 256: as a signed number
    return pack_codes(codes, fmt)


def _integers(checkpoint: Checkpoint, source: str, rows: range) -> Integers:
    """Those of the checkpoint, or of int4 quantization. Whole rows: ranks that share a row agree on its codes."""
    if checkpoint.tensors()[source].storage in INT_STORAGE:
        return checkpoint.integers(source, rows)
    codes, scales, zeros = int4_groups(_values(checkpoint, source, rows))
    _check_finite(checkpoint, source, scales)
    return Integers(codes, scales, zeros, INT4_GROUP)


def _pack_rows(checkpoint: Checkpoint, matrix: Matrix, piece: slice, scales: F32) -> U8:
    """Codes of some rows in int8; writes `scales` `[rows]`."""
    rows = matrix.rows[piece]
    codes = np.zeros((len(rows), matrix.k), np.int8)
    for source, places, taken in matrix.runs(rows):
        for part in _chunks(taken, checkpoint.tensors()[source].shape[1]):
            whole, row_scales = int8_rows(_values(checkpoint, source, part))
            _check_finite(checkpoint, source, row_scales)
            at = places[part.start - taken.start : part.stop - taken.start]
            codes[at, : len(matrix.columns)] = whole[:, matrix.columns.start : matrix.columns.stop]
            scales[at] = row_scales
    return pack_codes(codes.view(np.uint8), "int8")


def _values(checkpoint: Checkpoint, source: str, rows: range) -> F32:
    stored = checkpoint.read_stored(source)[rows.start : rows.stop]
    return stored_values(stored, checkpoint.tensors()[source].storage)


def _check_finite(checkpoint: Checkpoint, source: str, scales: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"{checkpoint.path}: tensor '{source}' holds a value that is not finite, so it cannot be quantized"
        )


def _chunks(rows: range, k: int) -> Iterator[range]:
    step = max(1, _CHUNK_WEIGHTS // max(k, 1))
    for first in range(rows.start, rows.stop, step):
        yield range(first, min(first + step, rows.stop))
