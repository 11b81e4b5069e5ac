"""GGUF blocks taken apart: codes and scales of rows, as the checkpoint has them.

Block layouts: ggml's `ggml-common.h`. Nothing is rounded here; the functions move bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """Rows of a block format, not yet in panels."""

    codes: U8
    """[rows, k]; signed codes as their bytes"""
    scales: npt.NDArray[Any]
    """[rows, ceil(k / span), scales]: the scales of each group, then the mins likewise, of the format's type"""
    factors: npt.NDArray[np.float16] | None = None
    """[rows, k / 256, factors]: d, then dmin (negated, so that min is added), of two-level formats"""


@dataclass(frozen=True)
class GgufType:
    """One GGUF block type: its size and the segment format that holds it without loss."""

    block: int
    type_size: int
    fmt: str
    parse: Callable[[U8], Blocks]
    """[rows, blocks, type_size] → Blocks"""


def _nibbles(q: U8, run: int) -> U8:
    """Each run of `run` bytes holds 2 · `run` codes: low nibbles first. [rows, blocks, b] → [rows, codes]."""
    rows = q.shape[0]
    runs = q.reshape(rows, -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(rows, -1)


def _bit_planes(q: U8, run: int, bits: int) -> U8:
    """Each run of `run` bytes holds 8 / `bits` times as many codes, plane by plane from the low bits."""
    rows = q.shape[0]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return ((q.reshape(rows, -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)).reshape(rows, -1)


def _f16(b: U8) -> npt.NDArray[np.float16]:
    """[..., 2 · n] bytes → [..., n] float16."""
    return np.ascontiguousarray(b).view(np.float16)


def _negated(x: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    return (x.view(np.uint16) ^ np.uint16(0x8000)).view(np.float16)


def _fifth_bits(qh: U8) -> U8:
    """[rows, blocks, 4]: bit i of the 32 belongs to code i. Returns it as 0 or 16, [rows, codes]."""
    rows = qh.shape[0]
    bits = np.unpackbits(np.ascontiguousarray(qh), axis=-1, bitorder="little")
    return (bits << np.uint8(4)).reshape(rows, -1)


def _q4_0(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 2:], 16), _f16(b[..., :2]))


def _q4_1(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 4:], 16), _f16(b[..., :4]))


def _q5_0(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 6:], 16) | _fifth_bits(b[..., 2:6]), _f16(b[..., :2]))


def _q5_1(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 8:], 16) | _fifth_bits(b[..., 4:8]), _f16(b[..., :4]))


def _q8_0(b: U8) -> Blocks:
    return Blocks(b[..., 2:].reshape(b.shape[0], -1), _f16(b[..., :2]))


def _q2_k(b: U8) -> Blocks:
    rows, supers = b.shape[:2]
    pairs = b[..., :16].reshape(rows, supers * 8, 2)
    factors = _f16(b[..., 80:84])
    return Blocks(
        _bit_planes(b[..., 16:80], 32, 2),
        np.concatenate([pairs & 0x0F, pairs >> 4], axis=-1),
        np.concatenate([factors[..., :1], _negated(factors[..., 1:])], axis=-1),
    )


def _q3_k(b: U8) -> Blocks:
    rows, supers = b.shape[:2]
    high = _bit_planes(b[..., :32], 32, 1)
    low = _bit_planes(b[..., 32:96], 32, 2)
    packed = b[..., 96:108]
    low4 = np.concatenate([packed[..., :8] & 0x0F, packed[..., :8] >> 4], axis=-1)
    high2 = np.concatenate([(packed[..., 8:] >> s) & 3 for s in (0, 2, 4, 6)], axis=-1)
    scales = (low4 | (high2 << 4)).view(np.int8) - np.int8(32)
    return Blocks(low | (high << np.uint8(2)), scales.reshape(rows, supers * 8, 2), _f16(b[..., 108:110]))


def _six_bit_pairs(packed: U8) -> U8:
    """The 8 scales and 8 mins of 6 bits in the 12 bytes of Q4_K and Q5_K: [rows, supers · 8, 2]."""
    rows, supers = packed.shape[:2]
    d, m, top = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([d & 0x3F, (top & 0x0F) | ((d >> 2) & 0x30)], axis=-1)
    mins = np.concatenate([m & 0x3F, (top >> 4) | ((m >> 2) & 0x30)], axis=-1)
    return np.stack([scales, mins], axis=-1).reshape(rows, supers * 8, 2)


def _affine_factors(b: U8) -> npt.NDArray[np.float16]:
    factors = _f16(b[..., :4])
    return np.concatenate([factors[..., :1], _negated(factors[..., 1:])], axis=-1)


def _q4_k(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 16:], 32), _six_bit_pairs(b[..., 4:16]), _affine_factors(b))


def _q5_k(b: U8) -> Blocks:
    codes = _nibbles(b[..., 48:], 32) | (_bit_planes(b[..., 16:48], 32, 1) << np.uint8(4))
    return Blocks(codes, _six_bit_pairs(b[..., 4:16]), _affine_factors(b))


def _q6_k(b: U8) -> Blocks:
    rows, supers = b.shape[:2]
    codes = _nibbles(b[..., :128], 64) | (_bit_planes(b[..., 128:192], 32, 2) << np.uint8(4))
    scales = b[..., 192:208].reshape(rows, supers * 8, 2).view(np.int8)
    return Blocks(codes, scales, _f16(b[..., 208:210]))


def _iq4_nl(b: U8) -> Blocks:
    return Blocks(_nibbles(b[..., 2:], 16), _f16(b[..., :2]).astype(np.float32))


def _iq4_xs(b: U8) -> Blocks:
    rows, supers = b.shape[:2]
    high = np.ascontiguousarray(b[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    low = np.stack([b[..., 4:8] & 0x0F, b[..., 4:8] >> 4], axis=-1).reshape(rows, supers, 8)
    sub = (low | ((high.astype(np.uint8) & 3) << 4)).view(np.int8) - np.int8(32)
    with np.errstate(invalid="ignore"):
        scales = _f16(b[..., :2]).astype(np.float32) * sub.astype(np.float32)
    return Blocks(_nibbles(b[..., 8:], 16), scales.reshape(rows, supers * 8, 1))


def _mxfp4(b: U8) -> Blocks:
    # Half of 2^(e - 127), since the looked-up values are doubled; the lowest two are subnormal.
    e = b[..., :1].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.minimum(e, 1)) << np.uint32(23))
    return Blocks(_nibbles(b[..., 1:], 16), bits.astype(np.uint32).view(np.float32))


GGUF_TYPES: Final = {
    "q4_0": GgufType(32, 18, "q4_0", _q4_0),
    "q4_1": GgufType(32, 20, "q4_1", _q4_1),
    "q5_0": GgufType(32, 22, "q5_0", _q5_0),
    "q5_1": GgufType(32, 24, "q5_1", _q5_1),
    "q8_0": GgufType(32, 34, "q8_0", _q8_0),
    "q2_k": GgufType(256, 84, "q2_k", _q2_k),
    "q3_k": GgufType(256, 110, "q3_k", _q3_k),
    "q4_k": GgufType(256, 144, "q4_k", _q4_k),
    "q5_k": GgufType(256, 176, "q5_k", _q5_k),
    "q6_k": GgufType(256, 210, "q6_k", _q6_k),
    "iq4_nl": GgufType(32, 18, "iq4_nl", _iq4_nl),
    "iq4_xs": GgufType(256, 136, "iq4_nl", _iq4_xs),
    "mxfp4": GgufType(32, 17, "mxfp4", _mxfp4),
}
"""Block types that a segment format holds exactly, by storage name."""
