"""Number formats of 16 and 8 bits as numpy knows them not: bfloat16 and E4M3 as integers, rounded to nearest even."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

E4M3_NAN: Final = 0x7F


def bf16_bits(values: F32) -> U16:
    """float32 → bfloat16 bits, rounded half to even; a NaN stays one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)


def bf16_values(bits: U16) -> F32:
    """bfloat16 bits → float32."""
    wide = np.empty(bits.shape, np.uint32)
    np.left_shift(bits, 16, out=wide, dtype=np.uint32)
    return wide.view(np.float32)


def stored_values(rows: npt.NDArray[Any], storage: str) -> F32:
    """Rows as `Checkpoint.read_stored` gives them → float32 `[rows, k]`."""
    if storage == "bf16":
        return bf16_values(rows)
    if storage in ("f32", "f16"):
        return np.ascontiguousarray(rows, np.float32)
    import gguf
    from gguf import quants

    with np.errstate(over="ignore", invalid="ignore"):
        values = quants.dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[storage.upper()])
    return np.ascontiguousarray(values, np.float32)


@cache
def e4m3_values() -> F32:
    """What each of the 256 codes stands for."""
    codes = np.arange(256, dtype=np.int64)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[codes & 0x7F == E4M3_NAN] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def dequantize_fp8(codes: U8, scales: F32) -> F32:
    """`code · scale`, float32 `[n, k]`.

    Args:
        codes: E4M3, `[n, k]`.
        scales: one per row, `[n]`, or one per row and block of 128 columns, `[n, ceil(k / 128)]`.
    """
    values: F32 = e4m3_values()[codes]
    if scales.ndim == 1:
        return values * scales[:, None]
    return values * np.repeat(scales, 128, axis=1)[:, : codes.shape[1]]


E4M3_SCALE_FACTORS: Final = np.exp2(np.arange(16) / 16).astype(np.float32)
"""What `max|w| / 448` is multiplied by to search a row's scale. They span an octave: twice a scale rounds as the scale
does, but for the smallest values"""


def quantize_e4m3(rows: npt.NDArray[Any], columns: slice, search: bool) -> tuple[U8, F32]:
    """Codes `[n, columns]` of some columns, and scales `[n]`, which are those of whole rows: `w ≈ scale · code`.

    Compiled (`plugins/cpu/kernels/e4m3.cc`); `tests/builder/e4m3_definition.py` says the same in numpy, bit for bit.

    Args:
        rows: `[n, k]`, float32, float16, or uint16 for the bits of bfloat16.
        columns: of the codes, from `start` to `stop`.
        search: take the scale, of `max|w| / 448` times each of E4M3_SCALE_FACTORS, that has the least squared error
            over the row, rather than `max|w| / 448` itself. A row of zeros has the scale 1, one with a value that is
            not finite a scale that is not either, and codes without a meaning.
    """
    from aotllm import _runtime

    factors = E4M3_SCALE_FACTORS if search else E4M3_SCALE_FACTORS[:1]
    return _runtime.quantize_e4m3(np.ascontiguousarray(rows), columns.start, columns.stop, factors.tolist())


INT4_GROUP: Final = 128
"""Columns of a group of `int4_groups`"""
_CLIPS: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def int8_rows(rows: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Codes -127 … 127 `[n, k]` and a scale `max|w| / 127` per row `[n]`, 1 for a row of zeros.

    A scale is not finite where a value of the row is not.
    """
    with np.errstate(all="ignore"):
        largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
        scales = np.maximum(largest / np.float32(127), np.finfo(np.float32).tiny).astype(np.float32)
        scales = np.where(largest == 0, np.float32(1), scales)
        codes = np.rint(rows / scales[:, None])
        codes = np.clip(np.nan_to_num(codes), -127, 127).astype(np.int8)
    return codes, scales


def int4_groups(rows: F32) -> tuple[U8, F32, U8]:
    """Codes 0 … 15 `[n, k]`, and scales and zeros `[n, ceil(k / 128)]`: `w = scale · (code - zero)`.

    A group's range reaches from its least value (or 0) to its greatest (or 0), or is cut to a part of it, whichever of
    a few parts has the least squared error. A scale is not finite where a value of the group is not.
    """
    n, k = rows.shape
    groups = np.zeros((n, -(-k // INT4_GROUP) * INT4_GROUP), np.float32)
    groups[:, :k] = rows
    groups = groups.reshape(n, -1, INT4_GROUP)
    with np.errstate(all="ignore"):
        low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
        codes, scales, zeros, errors = _int4_clipped(groups, low, high, _CLIPS[0])
        for clip in _CLIPS[1:]:
            trial = _int4_clipped(groups, low, high, clip)
            better = trial[3] < errors
            codes[better], scales[better] = trial[0][better], trial[1][better]
            zeros[better], errors[better] = trial[2][better], trial[3][better]
        scales[~np.isfinite(high - low)] = np.nan
    return np.ascontiguousarray(codes.reshape(n, -1)[:, :k]), scales, zeros


def _int4_clipped(groups: F32, low: F32, high: F32, clip: float) -> tuple[U8, F32, U8, F32]:
    """Codes, scales, zeros and squared errors of groups `[n, groups, 128]` whose ranges are cut to a part `clip`."""
    scales = (high - low) * np.float32(clip / 15)
    scales = np.where(high > low, np.maximum(scales, np.finfo(np.float32).tiny), np.float32(1)).astype(np.float32)
    zeros = np.clip(np.rint(-low * np.float32(clip) / scales), 0, 15)
    work = groups / scales[..., None]
    np.rint(work, out=work)
    work += zeros[..., None]
    np.clip(work, 0, 15, out=work)
    codes = work.astype(np.uint8)
    work -= zeros[..., None]
    work *= scales[..., None]
    work -= groups
    errors = np.einsum("ngk,ngk->ng", work, work)
    return codes, scales, np.nan_to_num(zeros).astype(np.uint8), errors
