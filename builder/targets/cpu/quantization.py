"""Weights → the codes and float16 scales of `--quantize` on target cpu, with the least error that is found.

An error is the sum of squares over a group of columns, each value counting by its magnitude plus the group's root mean
square: an error of a large weight meets an input that the model uses. (It takes a few per cent off the perplexity of
small models in 4 bits; docs/benchmarks.md.)

For each group a few ranges are tried. Each gives codes, the codes give the scale (and min) of least squares, and these,
rounded to float16, give the codes that count: whichever trial is nearest to the weights is kept. The first trial is
plain rounding of the whole range, so that nothing is ever further off than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from aotllm.builder.numerics import F32
from aotllm.builder.targets.cpu.packing_blocks import U8, Blocks
from aotllm.builder.targets.cpu.packing_formats import BlockFormat

_CHUNK: Final = 1 << 16
"""Weights quantized at a time: temporaries stay in a core's cache"""
_AFFINE_PARTS: Final = (0.97, 0.92, 0.87, 0.8, 0.72)
"""Parts that a range is cut to, about its middle, besides the whole"""
_SYMMETRIC_PARTS: Final = (1.0, 8 / 7, 1.07, 0.93, 0.86, 0.79)
"""Of the scale with which the largest magnitude has the code -8; with 8/7 it has -7"""


def quantize_rows(rows: F32, fmt: BlockFormat) -> Blocks:
    """Quantizes rows to a format with float16 scales, one for each group of `fmt.span` columns.

    Args:
        rows: float32 `[n, k]`, k a multiple of 32; the last group may be shorter than the others.
        fmt: q4_0, q4_1 or q8_0, or one of those with wider groups.

    Returns:
        Codes and scales. A scale is not finite where a value of its group is not, or is beyond what float16 scales
        reach.
    """
    n, k = rows.shape
    codes = np.empty((n, k), np.uint8)
    scales = np.empty((n, -(-k // fmt.span), fmt.scales), np.float16)
    whole = k // fmt.span * fmt.span
    for part in _chunks(n, k):
        if whole:
            groups = rows[part, :whole].reshape(-1, fmt.span)
            found = _quantize(groups, fmt)
            codes[part, :whole] = found.codes.reshape(-1, whole)
            scales[part, : whole // fmt.span] = found.scales.reshape(-1, whole // fmt.span, fmt.scales)
        if whole < k:
            found = _quantize(rows[part, whole:], fmt)
            codes[part, whole:], scales[part, -1] = found.codes, found.scales
    return Blocks(codes, scales)


def _chunks(n: int, k: int) -> Iterator[slice]:
    step = max(1, _CHUNK // k)
    for first in range(0, n, step):
        yield slice(first, min(first + step, n))


@dataclass
class _Trial:
    """Codes of groups with certain scales, and how far off they are."""

    codes: U8
    """[groups, columns]"""
    scales: npt.NDArray[np.float16]
    """[groups, scales]"""
    errors: F32
    """[groups]"""

    def take(self, other: _Trial) -> None:
        """The better of both for each group."""
        better = other.errors < self.errors
        self.codes[better], self.scales[better], self.errors[better] = (
            other.codes[better],
            other.scales[better],
            other.errors[better],
        )


class _Groups:
    """Groups to quantize, and how much an error of each value counts."""

    def __init__(self, values: F32) -> None:
        self.values = np.ascontiguousarray(values)
        """[groups, columns]"""
        rms = np.sqrt(np.einsum("gk,gk->g", self.values, self.values) / np.float32(values.shape[1]))
        self.importance = np.abs(self.values)
        self.importance += rms[:, None]
        self.weighted = self.importance * self.values
        self.per_total = _inverse(self.importance.sum(axis=1))

    def trial(self, values: F32, codes: U8, scales: npt.NDArray[np.float16]) -> _Trial:
        """`values` [groups, columns] are what codes and scales stand for; they are overwritten."""
        values -= self.values
        values *= values
        errors: F32 = np.einsum("gk,gk->g", values, self.importance)
        return _Trial(codes, scales, np.where(np.isfinite(errors), errors, np.float32(np.inf)))


def _quantize(values: F32, fmt: BlockFormat) -> _Trial:
    with np.errstate(all="ignore"):
        groups = _Groups(values)
        trials = _affine_trials(groups) if fmt.affine else _symmetric_trials(groups, fmt)
        best = next(trials)
        for trial in trials:
            best.take(trial)
        best.scales[~np.isfinite(values).all(axis=1)] = np.nan
    return best


def _affine_trials(groups: _Groups) -> Iterator[_Trial]:
    """`w = scale · u + min`, u in 0 … 15."""
    low, high = groups.values.min(axis=1), groups.values.max(axis=1)
    first = _affine(groups, (high - low) / np.float32(15), low)
    yield first
    yield _affine(groups, *_least_squares(groups, first.codes))
    for part in _AFFINE_PARTS:
        cut = (high - low) * np.float32((1 - part) / 2)
        trial = _affine(groups, (high - low) * np.float32(part / 15), low + cut)
        yield _affine(groups, *_least_squares(groups, trial.codes))


def _affine(groups: _Groups, scales: F32, mins: F32) -> _Trial:
    rounded = np.stack([scales, mins], axis=1).astype(np.float16)
    scale, low = rounded[:, :1].astype(np.float32), rounded[:, 1:].astype(np.float32)
    work = groups.values - low
    work *= _inverse(scale)
    np.rint(work, out=work)
    np.clip(work, 0, 15, out=work)
    codes = work.astype(np.uint8)
    work *= scale
    work += low
    return groups.trial(work, codes, rounded)


def _least_squares(groups: _Groups, codes: U8) -> tuple[F32, F32]:
    """Scale and min with which `codes` are nearest to the values; of equal codes scale 0 and the mean."""
    u = codes.astype(np.float32)
    mean_u = np.einsum("gk,gk->g", u, groups.importance) * groups.per_total
    mean_w = groups.weighted.sum(axis=1) * groups.per_total
    u -= mean_u[:, None]
    weighted_u = u * groups.importance
    spread = np.einsum("gk,gk->g", weighted_u, u)
    scales = np.einsum("gk,gk->g", weighted_u, groups.values) * _inverse(spread)
    return scales, mean_w - scales * mean_u


def _symmetric_trials(groups: _Groups, fmt: BlockFormat) -> Iterator[_Trial]:
    """`w = scale · v`: v in -8 … 7 with a scale of either sign (4 bits), or in -127 … 127."""
    magnitudes = np.abs(groups.values)
    if fmt.bits == 8:
        scales = magnitudes.max(axis=1) / np.float32(127)
        nearest = scales.astype(np.float16)
        above = np.where(nearest < scales, np.nextafter(nearest, np.float16(np.inf)), nearest)
        starts = [above.astype(np.float32), scales]
    else:
        extreme = np.take_along_axis(groups.values, magnitudes.argmax(axis=1)[:, None], axis=1)[:, 0]
        starts = [extreme * np.float32(-part / 8) for part in _SYMMETRIC_PARTS]
    for start in starts:
        trial = _symmetric(groups, start, fmt)
        yield trial
        v = trial.codes.view(np.int8).astype(np.float32)
        v -= np.float32(fmt.zero)
        product = np.einsum("gk,gk->g", v, groups.weighted)
        v *= v
        yield _symmetric(groups, product * _inverse(np.einsum("gk,gk->g", v, groups.importance)), fmt)


def _symmetric(groups: _Groups, scales: F32, fmt: BlockFormat) -> _Trial:
    rounded = scales.astype(np.float16)[:, None]
    scale = rounded.astype(np.float32)
    work = groups.values * _inverse(scale)
    np.rint(work, out=work)
    np.clip(work, *((-8, 7) if fmt.bits == 4 else (-127, 127)), out=work)
    codes = (work + np.float32(fmt.zero)).astype(np.int8).view(np.uint8)
    work *= scale
    return groups.trial(work, codes, rounded)


def _inverse(values: F32) -> F32:
    """1 / value, 0 for 0."""
    return np.where(values != 0, np.float32(1) / values, np.float32(0)).astype(np.float32)
