"""Weights of a checkpoint → packed segments of the CPU target (`docs/engine_format.md`).

Block formats are packed without loss: `unpack_segment(pack_segment(x))` equals gguf's dequantization of `x` bit for
bit. Block types with codebooks of their own go through `q8_f32`; see `packing_reexpress`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import Integers
from aotllm.builder.numerics import F32, bf16_bits, stored_values
from aotllm.builder.targets.cpu import packing_panels as panels
from aotllm.builder.targets.cpu.packing_blocks import GGUF_TYPES, U8, Blocks
from aotllm.builder.targets.cpu.packing_formats import (
    BLOCK,
    BLOCK_FORMATS,
    FLOAT_FORMATS,
    PANEL_ROWS,
    panel_bytes,
)
from aotllm.builder.targets.cpu.packing_reexpress import GROUP, REEXPRESSED, reexpress
from aotllm.builder.targets.cpu.quantization import quantize_rows
from aotllm.errors import CheckpointError, UnsupportedModel

__all__ = [
    "column_step",
    "integer_format",
    "pack_integers",
    "pack_quantized",
    "pack_segment",
    "panel_bytes",
    "quantized_format",
    "segment_format",
    "segment_nbytes",
    "stored_columns",
    "unpack_segment",
]

_CHUNK: Final = 1 << 20
"""Weights packed at a time: temporaries stay in the cache and far below the size of a tensor"""


def segment_format(storage: str, dtype: str = "auto") -> str:
    """The segment format for a tensor of the given storage.

    Args:
        storage: as in `TensorInfo.storage`: `f32`, `f16`, `bf16`, or a GGUF block type in lower case.
        dtype: `f32`, `f16` or `bf16` converts float storages to that type; `auto` keeps them. Block types keep their
            values in any case.

    Raises:
        UnsupportedModel: a storage that no segment format can hold.
    """
    if dtype != "auto" and dtype not in FLOAT_FORMATS:
        raise ValueError(f"dtype is '{dtype}'; use auto, {', '.join(FLOAT_FORMATS[:-1])} or {FLOAT_FORMATS[-1]}")
    if storage in FLOAT_FORMATS:
        return storage if dtype == "auto" else dtype
    if storage in GGUF_TYPES:
        return GGUF_TYPES[storage].fmt
    if storage in REEXPRESSED:
        return "q8_f32"
    known = ", ".join([*FLOAT_FORMATS, *GGUF_TYPES, *REEXPRESSED])
    raise UnsupportedModel(
        f"Tensors stored as '{storage}' cannot be packed for the cpu target; it takes {known}. "
        "Convert the checkpoint to one of these types."
    )


def column_step(storage: str) -> int:
    """Columns that are stored together: a matrix in `storage` can be cut at multiples of this."""
    block_type = GGUF_TYPES.get(storage) or REEXPRESSED.get(storage)
    return 1 if block_type is None else block_type.block


def stored_columns(stored: npt.NDArray[Any], storage: str, columns: range) -> npt.NDArray[Any]:
    """`columns` (ends: multiples of `column_step`) of rows as `Checkpoint.read_stored` returns them; a view."""
    block_type = GGUF_TYPES.get(storage) or REEXPRESSED.get(storage)
    if block_type is None:
        return stored[:, columns.start : columns.stop]
    blocks = (columns.start // block_type.block, columns.stop // block_type.block)
    return stored[:, blocks[0] * block_type.type_size : blocks[1] * block_type.type_size]


def segment_nbytes(fmt: str, n: int, k: int) -> int:
    """Bytes of a packed segment of `n` rows and `k` columns."""
    return -(-n // PANEL_ROWS) * panel_bytes(fmt, k)


def pack_segment(stored: npt.NDArray[Any], storage: str, n: int, k: int, fmt: str) -> U8:
    """Packs `n` rows of `k` weights.

    Args:
        stored: as `Checkpoint.read_stored` returns it: float32, float16 or bfloat16 bits (uint16) `[n, k]`, or uint8
            `[n, bytes per row]` of a block type.
        storage: what `stored` is.
        n: rows, any positive number; the last panel is padded with zero rows.
        k: columns; a multiple of 32 where `fmt` is a block format.
        fmt: from `segment_format`. A block format of the table takes its own storage; float formats and `q8_f32` take
            any storage.

    Returns:
        uint8 `[segment_nbytes(fmt, n, k)]`.

    Raises:
        CheckpointError: the array does not have the shape that `storage`, `n` and `k` ask for.
        ValueError: `fmt` cannot hold `storage`.
    """
    _check(stored, storage, n, k, fmt)
    out = np.empty((-(-n // PANEL_ROWS), panel_bytes(fmt, k)), np.uint8)
    for first, last in _chunks(n, k):
        rows = stored[first:last]
        if (missing := -(last - first) % PANEL_ROWS) > 0:
            rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)])
        out[first // PANEL_ROWS : -(-last // PANEL_ROWS)] = _pack_rows(rows, storage, fmt)
    return out.reshape(-1)


def integer_format(groups: Integers, storage: str) -> str:
    """The segment format for an int4 or int8 matrix of a checkpoint, whose scales and zeros are in `groups`.

    `q4_0` holds 4 bits with a zero of 8 and scales that float16 holds (symmetric GPTQ), `q8_f32` everything.
    """
    with np.errstate(over="ignore"):
        narrow = (groups.scales.astype(np.float16) == groups.scales).all()
    return "q4_0" if storage == "int4" and narrow and (groups.zeros == 8).all() else "q8_f32"


def pack_integers(integers: Integers, name: str, fmt: str) -> U8:
    """Packs rows of an int4 or int8 matrix of a checkpoint without loss, in the format of `integer_format`.

    In `q8_f32` the difference `code - zero` is the code.

    Raises:
        UnsupportedModel: a group does not consist of whole 16 columns, or a difference does not fit 8 bits with a sign.
    """
    rows, k = integers.codes.shape
    if k % BLOCK or (integers.group % BLOCK and integers.group < k):
        raise UnsupportedModel(
            f"Matrix {name} has {k} columns in groups of {integers.group}; target cpu takes multiples of {BLOCK}."
        )
    missing = -rows % PANEL_ROWS
    of_column = np.arange(k) // integers.group
    if fmt == "q4_0":
        padded4 = np.pad(integers.codes, ((0, missing), (0, 0)), constant_values=8)
        scales4 = np.pad(integers.scales[:, of_column[::BLOCK]].astype(np.float16), ((0, missing), (0, 0)))
        return panels.pack_blocks(Blocks(padded4, scales4[..., None]), BLOCK_FORMATS[fmt]).reshape(-1)
    codes = integers.codes.astype(np.int16) - integers.zeros.astype(np.int16)[:, of_column]
    if codes.min(initial=0) < -128 or codes.max(initial=0) > 127:
        raise UnsupportedModel(
            f"Matrix {name} has weights of {codes.min()} to {codes.max()} times their scale; target cpu holds -128 to "
            "127. Use a checkpoint quantized with sym: true, or target cuda."
        )
    padded = np.pad(codes.astype(np.int8), ((0, missing), (0, 0)))
    scales = np.pad(integers.scales[:, of_column[::GROUP]], ((0, missing), (0, 0)))
    blocks = Blocks(padded.view(np.uint8), np.ascontiguousarray(scales).reshape(len(padded), k // BLOCK, -1))
    return panels.pack_blocks(blocks, BLOCK_FORMATS[fmt]).reshape(-1)


def quantized_format(method: str, group: int, symmetric: bool) -> str:
    """The segment format of `--quantize`: int8 or int4, of int4 with groups of 32, 64 or 128 columns."""
    if method == "int8":
        return "q8_0"
    return f"{'q4_0' if symmetric else 'q4_1'}{'' if group == BLOCK else f'_g{group}'}"


def pack_quantized(values: F32, name: str, fmt: str) -> U8:
    """Quantizes rows `[n, k]` of matrix `name` to `fmt`, of `quantized_format`, and packs them.

    Raises:
        CheckpointError: a value is not finite, or larger than float16 scales reach.
    """
    blocks = quantize_rows(values, BLOCK_FORMATS[fmt])
    if not np.isfinite(blocks.scales).all():
        raise CheckpointError(
            f"Tensor {name} holds a value that is not finite or too large for {fmt}, so it cannot be quantized; "
            "leave --quantize out."
        )
    missing = ((0, -len(values) % PANEL_ROWS), (0, 0))
    padded = Blocks(np.pad(blocks.codes, missing), np.pad(blocks.scales, (*missing, (0, 0))))
    return panels.pack_blocks(padded, BLOCK_FORMATS[fmt]).reshape(-1)


def unpack_segment(packed: U8, fmt: str, n: int, k: int) -> npt.NDArray[np.float32]:
    """The weights that a packed segment stands for, float32 `[n, k]`: what the kernels compute with."""
    if fmt not in FLOAT_FORMATS and fmt not in BLOCK_FORMATS:
        raise ValueError(f"'{fmt}' is not a segment format; use one of {', '.join([*FLOAT_FORMATS, *BLOCK_FORMATS])}")
    if packed.size != segment_nbytes(fmt, n, k):
        raise ValueError(f"a {fmt} segment of {n} x {k} has {segment_nbytes(fmt, n, k)} bytes, got {packed.size}")
    rows = packed.reshape(-1, panel_bytes(fmt, k))
    out = np.empty((n, k), np.float32)
    for first, last in _chunks(n, k):
        part = rows[first // PANEL_ROWS : -(-last // PANEL_ROWS)]
        if fmt in FLOAT_FORMATS:
            values = panels.unpack_floats(part, fmt, k)
        else:
            values = panels.dequantize(panels.unpack_blocks(part, BLOCK_FORMATS[fmt], k), BLOCK_FORMATS[fmt])
        out[first:last] = values[: last - first]
    return out


def _chunks(n: int, k: int) -> Iterator[tuple[int, int]]:
    step = max(PANEL_ROWS, _CHUNK // k // PANEL_ROWS * PANEL_ROWS)
    for first in range(0, n, step):
        yield first, min(n, first + step)


def _check(stored: npt.NDArray[Any], storage: str, n: int, k: int, fmt: str) -> None:
    block_type = GGUF_TYPES.get(storage) or REEXPRESSED.get(storage)
    if fmt in BLOCK_FORMATS and k % BLOCK:
        raise CheckpointError(f"A {fmt} segment needs a multiple of {BLOCK} columns, got {k}; use a float format.")
    if fmt not in FLOAT_FORMATS and fmt != "q8_f32" and (storage not in GGUF_TYPES or GGUF_TYPES[storage].fmt != fmt):
        raise ValueError(f"format '{fmt}' cannot hold storage '{storage}'; segment_format() names the one that can")
    if block_type is None:
        dtype, columns = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[storage], k
    elif k % block_type.block:
        raise CheckpointError(f"{storage} rows hold a multiple of {block_type.block} weights, got {k}.")
    else:
        dtype, columns = np.uint8, k // block_type.block * block_type.type_size
    if stored.shape != (n, columns) or stored.dtype != dtype:
        raise CheckpointError(
            f"A {storage} tensor of {n} x {k} weights is {np.dtype(dtype)} {(n, columns)} as stored, "
            f"got {stored.dtype} {stored.shape}; the checkpoint contradicts itself."
        )


def _pack_rows(rows: npt.NDArray[Any], storage: str, fmt: str) -> U8:
    if fmt in FLOAT_FORMATS:
        if storage != fmt:
            rows = _narrow(stored_values(rows, storage), fmt)
        return panels.pack_floats(rows)
    if storage in GGUF_TYPES and GGUF_TYPES[storage].fmt == fmt:
        block_type = GGUF_TYPES[storage]
        blocks = block_type.parse(np.ascontiguousarray(rows).reshape(rows.shape[0], -1, block_type.type_size))
    else:
        blocks = reexpress(stored_values(rows, storage), storage)
    return panels.pack_blocks(blocks, BLOCK_FORMATS[fmt])


def _narrow(values: npt.NDArray[np.float32], fmt: str) -> npt.NDArray[Any]:
    """float32 → the stored form of a float format, rounded half to even."""
    if fmt == "f32":
        return values
    if fmt == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    return bf16_bits(values)
