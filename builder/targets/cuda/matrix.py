"""Which rows and columns of the checkpoint a matrix of a CUDA engine is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import FP8_BLOCK

INTERLEAVED_ROWS = 8
"""Rows of gate, then as many of up, in turns"""
SCALE_BLOCK = FP8_BLOCK

RowMap = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Matrix:
    """`[n, k]`, row by row from the matrices `sources` thought one under the other.

    Attributes:
        rows: for each row of the engine the row of the sources, or -1 for a row of zeros.
        row_counts: rows of each source.
        columns: of the sources; where they are fewer than `k`, zeros follow.
        is_interleaved: whether rows of two sources take turns, see `interleaved`.
    """

    sources: tuple[str, ...]
    row_counts: tuple[int, ...]
    rows: RowMap = field(repr=False)
    columns: range
    k: int
    is_interleaved: bool = False

    @property
    def n(self) -> int:
        """Rows of the engine's matrix."""
        return len(self.rows)

    def located(self) -> tuple[npt.NDArray[np.intp], RowMap]:
        """Of each row that is not of zeros: which source it is from, and which row of that."""
        firsts = np.array(_firsts(self.row_counts), np.int64)
        sources = np.searchsorted(firsts, self.rows, side="right") - 1
        return sources, self.rows - firsts[sources]

    def runs(self, rows: RowMap) -> Iterator[tuple[str, npt.NDArray[np.intp], range]]:
        """Per source that `rows` (a piece of `self.rows`) need: its name, the places of its rows among them, and which
        rows those are.

        Within a piece the rows of one source are consecutive, whatever lies between them.
        """
        first = 0
        for source, count in zip(self.sources, self.row_counts, strict=True):
            places = np.flatnonzero((rows >= first) & (rows < first + count))
            if len(places):
                begin = int(rows[places[0]]) - first
                yield source, places, range(begin, begin + len(places))
            first += count

    def scale_blocks(self) -> npt.NDArray[np.int64] | None:
        """Where the scales of `fp8_block` come from: `[blocks of rows, 2]` of source, block of rows in it.

        Block b has the scale of the engine's rows 128b … 128b + 127; where rows are interleaved, blocks 2b and 2b + 1
        have those of gate and of up in rows 256b … 256b + 255. None where rows of such a block do not share a block of
        their source. A block of zeros only is (-1, -1).
        """
        number = np.arange(self.n) // SCALE_BLOCK
        if self.is_interleaved:
            row = np.arange(self.n)
            number = row // (2 * SCALE_BLOCK) * 2 + row // INTERLEAVED_ROWS % 2
        sources, local = self.located()
        origin = np.stack([sources, local // SCALE_BLOCK], axis=1)
        blocks = np.full((int(number.max()) + 1, 2), -1, np.int64)
        real = self.rows >= 0
        blocks[number[real]] = origin[real]  # some row of each block; the others have to agree
        return blocks if (blocks[number[real]] == origin[real]).all() else None


def stacked(ranges: Sequence[range], row_counts: Sequence[int]) -> RowMap:
    """The rows `ranges[i]` of each source one under the other; rows that a source does not have are zeros."""
    pieces = []
    for taken, first, count in zip(ranges, _firsts(row_counts), row_counts, strict=True):
        rows = np.arange(taken.start, taken.stop, dtype=np.int64)
        pieces.append(np.where(rows < count, rows + first, -1))
    return np.concatenate(pieces)


def interleaved(taken: range, row_count: int, width: int) -> RowMap:
    """Rows `taken` of gate and of up, 8 and 8 in turns, each padded with zeros to `width` rows (a multiple of 8)."""
    gate = np.full(width, -1, np.int64)
    gate[: len(taken)] = taken
    up = np.where(gate < 0, -1, gate + row_count)
    return np.stack([half.reshape(-1, INTERLEAVED_ROWS) for half in (gate, up)], axis=1).reshape(-1)


def repeated(rows: RowMap, count: int, stride: int) -> RowMap:
    """`rows` `count` times, each time `stride` rows of the sources further; rows of zeros stay such."""
    firsts = stride * np.arange(count, dtype=np.int64)[:, None]
    return np.where(rows < 0, -1, rows + firsts).reshape(-1)


def _firsts(row_counts: Sequence[int]) -> list[int]:
    return [sum(row_counts[:i]) for i in range(len(row_counts))]
