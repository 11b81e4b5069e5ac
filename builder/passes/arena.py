"""Placing buffers in one arena: offsets such that buffers which live at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector load"""


@dataclass(frozen=True)
class Lifetime:
    """A buffer's size and the steps it must survive, both ends included."""

    size: int
    """Bytes, positive"""
    first: int
    """Step that writes it"""
    last: int
    """Last step that reads it; at least `first`"""

    def overlaps(self, other: Lifetime) -> bool:
        """Whether there is a step at which both are alive. A step's inputs and outputs all are."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Placement:
    """Where buffers go."""

    offsets: tuple[int, ...]
    """Bytes from the start of the arena, multiples of the alignment, in the order of the buffers given"""
    size: int
    """Bytes of the arena, a multiple of the alignment"""


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def place(lifetimes: Sequence[Lifetime], alignment: int = ALIGNMENT) -> Placement:
    """Greedy by size: the largest buffer first, each into the tightest gap that its living neighbours leave.

    The same heuristic as TFLite's "greedy by size" (arXiv 2001.03288), which is near optimal for chains of layers. The
    result depends on the arguments only; equal sizes are placed in the order given.
    """
    offsets: dict[int, int] = {}
    for index in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].size):
        buffer = lifetimes[index]
        neighbours = sorted(
            (offsets[other], offsets[other] + round_up(lifetimes[other].size, alignment))
            for other in offsets
            if lifetimes[other].overlaps(buffer)
        )
        offsets[index] = _tightest_gap(neighbours, round_up(buffer.size, alignment))
    size = max((offsets[i] + round_up(buffer.size, alignment) for i, buffer in enumerate(lifetimes)), default=0)
    return Placement(tuple(offsets[i] for i in range(len(lifetimes))), size)


def _tightest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Offset of the smallest gap of at least `size` between `taken` `(begin, end)` ranges, sorted; else their end."""
    best: tuple[int, int] | None = None  # (gap, offset)
    end = 0
    for begin, stop in taken:
        gap = begin - end
        if gap >= size and (best is None or gap < best[0]):
            best = (gap, end)
        end = max(end, stop)
    return end if best is None else best[1]
