"""Matrices of integers as the kernels want them (`docs/engine_format.md`, "Integer formats").

Codes lie in blocks of 64 rows x 128 columns, in each block in the order in which the threads of a warpgroup multiply
them; scales and zeros of groups of columns lie with the 64 rows side by side. The kernels' own view of this is
`plugins/cuda/gemm/int_layout.h`.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import Integers
from aotllm.builder.numerics import F32, U8

ROWS: Final = 64
COLUMNS: Final = 128
SMALL_GROUP: Final = 32
"""Columns of the smallest groups that there are kernels for"""

INT_FORMATS: Final = ("int4", "int8")
INT8_ZERO: Final = 128
"""What unsigned codes of 8 bits are stored less"""


def strips(n: int) -> int:
    """Blocks that stand one under the other."""
    return -(-n // ROWS)


def blocks(k: int) -> int:
    """Blocks that stand side by side."""
    return -(-k // COLUMNS)


def code_bytes(fmt: str, n: int, k: int) -> int:
    """Of the codes of a matrix, padding included."""
    return strips(n) * blocks(k) * ROWS * COLUMNS // (2 if fmt == "int4" else 1)


def group_shape(n: int, k: int, group: int) -> tuple[int, int, int]:
    """Of scales and of zeros: strips, groups, rows of a strip."""
    return strips(n), blocks(k) * COLUMNS // group, ROWS


def pack_codes(codes: U8, fmt: str) -> U8:
    """Codes `[rows, k]`, rows from a multiple of 64 on → uint8 `[code_bytes]`. Padding has code 0."""
    rows, k = codes.shape
    padded = np.zeros((strips(rows) * ROWS, blocks(k) * COLUMNS), np.uint8)
    padded[:rows, :k] = codes
    tiles = padded.reshape(strips(rows), ROWS, blocks(k), COLUMNS).transpose(0, 2, 1, 3).reshape(-1, ROWS * COLUMNS)
    low, high = _order(fmt)
    packed = tiles[:, low]
    if fmt == "int4":
        packed |= tiles[:, high] << 4
    return packed.reshape(-1)


def unpack_codes(packed: U8, fmt: str, n: int, k: int) -> U8:
    """The inverse of `pack_codes`: codes `[n, k]`."""
    low, high = _order(fmt)
    tiles = np.empty((strips(n) * blocks(k), ROWS * COLUMNS), np.uint8)
    data = packed.reshape(len(tiles), -1)
    tiles[:, low] = data & 15 if fmt == "int4" else data
    if fmt == "int4":
        tiles[:, high] = data >> 4
    whole = tiles.reshape(strips(n), blocks(k), ROWS, COLUMNS).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(whole.reshape(strips(n) * ROWS, -1)[:n, :k])


@cache
def _order(fmt: str) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """For each byte of a block which of its codes it holds (int4: in the low half, in the high half).

    A thread t of 128 has rows r = 16 · (t // 32) + t % 32 // 4 and r + 8, and of each step of 16 columns c, c + 1,
    c + 8 and c + 9, where c = 2 · (t % 4). Its bytes of 64 (int4) or 32 columns (int8) stand together, 16 of them.
    """
    byte = np.arange(ROWS * COLUMNS // (2 if fmt == "int4" else 1))
    chunk, thread, inside = byte // 2048, byte // 16 % 128, byte % 16
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    if fmt == "int4":  # a word a step: c of r | r + 8, c + 8 of r | r + 8, then the same of c + 1 and c + 9
        step, right, odd = chunk * 4 + inside // 4, inside % 2, inside // 2 % 2
        low = row * COLUMNS + step * 16 + column + 8 * right + odd
        return low, low + 8 * COLUMNS
    # Two words a step, of r and of r + 8: columns c, c + 8, c + 1, c + 9.
    step, lower, right, odd = chunk * 2 + inside // 8, inside // 4 % 2, inside % 2, inside // 2 % 2
    low = (row + 8 * lower) * COLUMNS + step * 16 + column + 8 * right + odd
    return low, low


def pack_groups(values: npt.NDArray[np.generic], k: int, group: int) -> npt.NDArray[np.generic]:
    """Scales or zeros `[rows, groups]` → `[strips, groups padded, 64]`; padding is 0."""
    out = np.zeros(group_shape(len(values), k, group), values.dtype)
    padded = np.zeros((len(out) * ROWS, out.shape[1]), values.dtype)
    padded[: len(values), : values.shape[1]] = values
    out[:] = padded.reshape(len(out), ROWS, -1).transpose(0, 2, 1)
    return out


def cut(integers: Integers, columns: range, k: int, group: int) -> tuple[U8, F32, U8]:
    """Codes `[rows, k]`, scales and zeros `[rows, ceil(k / group)]` of some columns, re-grouped; zeros follow.

    Each new group lies in one group of `integers`.
    """
    firsts = np.minimum(columns.start + np.arange(-(-k // group)) * group, columns.stop - 1)
    origin = firsts // integers.group
    scales, zeros = integers.scales[:, origin], integers.zeros[:, origin]
    codes = np.empty((len(scales), k), np.uint8)
    codes[:, : len(columns)] = integers.codes[:, columns.start : columns.stop]
    codes[:, len(columns) :] = np.repeat(zeros, group, axis=1)[:, len(columns) : k]  # a weight of 0
    return codes, scales, zeros


def common_group(source_group: int, k: int, columns: range, allowed: tuple[int, ...]) -> int | None:
    """The largest of `allowed` whose groups, counted from the first of `columns`, lie in groups of the source each.

    None where there is none.
    """
    for group in allowed:
        if source_group >= k or (source_group % group == 0 and columns.start % group == 0):
            return group
    return None
