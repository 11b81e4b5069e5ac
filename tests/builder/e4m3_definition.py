"""E4M3 in numpy: what `plugins/cpu/kernels/e4m3.cc` computes, bit for bit."""

from __future__ import annotations

from functools import cache

import numpy as np

from aotllm.builder.numerics import E4M3_NAN, E4M3_SCALE_FACTORS, F32, U8, bf16_values, e4m3_values

E4M3_MAX = 448.0
LANES = 16


def e4m3_codes(values: F32) -> U8:
    """float32 → E4M3 (the finite kind: ±448 at most), rounded half to even, larger magnitudes saturated; NaN → NaN.

    A float32 is first cut to 16 bits with its last bit set where anything was lost (rounding to odd). Those 16 bits
    round to E4M3's 4 as the float32 itself does, so that a table of 65,536 entries gives the code.
    """
    halves = np.ascontiguousarray(values).view(np.uint16).reshape(*values.shape, 2)  # [..., low half, high half]
    odd = halves[..., 1] | (halves[..., 0] != 0)
    codes: U8 = np.take(_e4m3_of_bf16(), odd)
    return codes


@cache
def _e4m3_of_bf16() -> U8:
    """The code of every bfloat16."""
    values = bf16_values(np.arange(1 << 16, dtype=np.uint16))
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitude = np.abs(values).astype(np.float64)
    finite = e4m3_values()[:E4M3_NAN].astype(np.float64)  # ascending; the index is the code
    middles = (finite[:-1] + finite[1:]) / 2
    codes = np.searchsorted(middles, magnitude)  # a middle itself goes to the code below …
    tie = middles[np.minimum(codes, len(middles) - 1)] == magnitude
    codes += tie & (codes % 2 == 1)  # … unless the one above is even
    codes[np.isnan(values)] = E4M3_NAN
    return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def e4m3_row_scales(rows: F32) -> F32:
    """`max|w| / 448` of each row, 1 for a row of zeros; not finite where a value of the row is not.

    Args:
        rows: `[n, k]`, k positive.
    """
    with np.errstate(all="ignore"):
        largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        scales = np.maximum(largest / np.float32(E4M3_MAX), np.finfo(np.float32).tiny)
    return np.where(largest == 0, np.float32(1), scales).astype(np.float32, copy=False)


def e4m3_searched_scales(rows: F32) -> F32:
    """Of `e4m3_row_scales` times each of E4M3_SCALE_FACTORS, the one with the least squared error, the first of equals.

    Args:
        rows: `[n, k]`, finite.
    """
    candidates = e4m3_row_scales(rows) * E4M3_SCALE_FACTORS[:, None]
    errors = np.stack([squared_errors(rows, scales) for scales in candidates])
    best: F32 = candidates[errors.argmin(axis=0), np.arange(len(rows))]
    return best


def squared_errors(rows: F32, scales: F32) -> np.ndarray:
    """What E4M3 with these scales adds to rows, squared and summed: float64 `[n]`, but for the last bits.

    A row's sum over values divided by the scale is float32: of sixteen sums, column by column, halves are added.
    """
    ratios = rows * (np.float32(1) / scales)[:, None]
    errors = e4m3_values()[e4m3_codes(ratios)] - ratios
    n, k = rows.shape
    squares = np.zeros((n, -(-k // LANES), LANES), np.float32)
    squares.reshape(n, -1)[:, :k] = errors * errors
    sums = np.zeros((n, LANES), np.float32)
    for column in range(squares.shape[1]):
        sums += squares[:, column]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    wide = scales.astype(np.float64)
    return wide * wide * sums[:, 0]
