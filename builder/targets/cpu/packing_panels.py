"""Rows ↔ panels: the byte order of `docs/engine_format.md`, both ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.builder.targets.cpu.packing_blocks import U8, Blocks
from aotllm.builder.targets.cpu.packing_formats import BLOCK, LINE, PANEL_ROWS, SUPERBLOCK, BlockFormat, panel_bytes

_QUADS = BLOCK // 4


def pack_floats(rows: npt.NDArray[Any]) -> U8:
    """[16 · panels, k] of float32, float16, or bfloat16 bits as uint16 → [panels, panel_bytes].

    float32 and float16 go column by column; bfloat16 in pairs of columns.
    """
    n, k = rows.shape
    panels = n // PANEL_ROWS
    if rows.dtype != np.float32 and k % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    if rows.dtype == np.uint16:
        rows = np.ascontiguousarray(rows).view(np.uint32)
    lanes = rows.reshape(panels, PANEL_ROWS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(panels, -1)


def unpack_floats(packed: U8, fmt: str, k: int) -> npt.NDArray[np.float32]:
    """Inverse of `pack_floats`, widened: [panels, panel_bytes] → float32 [16 · panels, k]."""
    panels = packed.shape[0]
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": np.uint32}[fmt]
    lanes = np.ascontiguousarray(packed).view(dtype).reshape(panels, -1, PANEL_ROWS).transpose(0, 2, 1)
    rows = np.ascontiguousarray(lanes).reshape(panels * PANEL_ROWS, -1)
    if fmt == "bf16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)[:, :k]
    return rows[:, :k].astype(np.float32)


def pack_blocks(blocks: Blocks, fmt: BlockFormat) -> U8:
    """Blocks of 16 · panels rows → [panels, panel_bytes]."""
    rows, k = blocks.codes.shape
    panels = rows // PANEL_ROWS
    out = np.zeros((panels, panel_bytes(fmt.name, k)), np.uint8)
    code_bytes = k // BLOCK * fmt.code_lines * LINE
    out[:, :code_bytes] = _pack_codes(blocks.codes, fmt.bits)
    scales = _pack_scales(blocks, fmt)
    out[:, code_bytes : code_bytes + scales.shape[1]] = scales
    return out


def unpack_blocks(packed: U8, fmt: BlockFormat, k: int) -> Blocks:
    """Inverse of `pack_blocks`."""
    code_bytes = k // BLOCK * fmt.code_lines * LINE
    codes = _unpack_codes(packed[:, :code_bytes], fmt.bits, k)
    scales, factors = _unpack_scales(packed[:, code_bytes:], fmt, k)
    return Blocks(codes, scales, factors)


def dequantize(blocks: Blocks, fmt: BlockFormat) -> npt.NDArray[np.float32]:
    """The weights, float32 [rows, k], by the arithmetic of the kernels: one rounded product, one rounded sum."""
    rows, k = blocks.codes.shape
    if fmt.values is not None:
        values = np.asarray(fmt.values, np.float32)[blocks.codes]
    elif fmt.bits == 8:
        values = blocks.codes.view(np.int8).astype(np.float32)
    else:
        values = blocks.codes.astype(np.float32) - np.float32(fmt.zero)
    scales = blocks.scales.astype(np.float32)
    grouped = values.reshape(rows, k // BLOCK, fmt.groups, -1)
    if fmt.span > BLOCK:
        scales = np.repeat(scales, fmt.span // BLOCK, axis=1)[:, : k // BLOCK]
    with np.errstate(over="ignore", invalid="ignore"):
        if blocks.factors is not None:
            per_block = np.repeat(blocks.factors.astype(np.float32), SUPERBLOCK // BLOCK, axis=1)
            scales = scales * np.repeat(per_block, fmt.groups, axis=2)
        grouped = grouped * scales[:, :, : fmt.groups, None]
        if fmt.affine:
            grouped = grouped + scales[:, :, fmt.groups :, None]
    return grouped.reshape(rows, k)


def _lines(quads: U8) -> U8:
    """[panels, 16, units, 4] bytes → [panels, units · 64]: the four bytes of each row side by side in a line."""
    panels, _, units, _ = quads.shape
    words = np.ascontiguousarray(quads).view(np.uint32)[..., 0]
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(panels, units * LINE)


def _quads(lines: U8) -> U8:
    """Inverse of `_lines`."""
    panels = lines.shape[0]
    words = np.ascontiguousarray(lines).view(np.uint32).reshape(panels, -1, PANEL_ROWS)
    return np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(panels, PANEL_ROWS, -1, 4)


def _pack_codes(codes: U8, bits: int) -> U8:
    rows, k = codes.shape
    panels, count = rows // PANEL_ROWS, k // BLOCK
    quads = codes.reshape(panels, PANEL_ROWS, count, _QUADS, 4)
    if bits == 8:
        return _lines(quads.reshape(panels, PANEL_ROWS, -1, 4))
    line = np.empty((panels, PANEL_ROWS, count, bits, 4), np.uint8)
    low = quads if bits == 4 else quads & 0x0F
    np.bitwise_or(low[..., 0::2, :], low[..., 1::2, :] << 4, out=line[..., :4, :])
    if bits == 5:
        high = quads >> 4
        line[..., 4, :] = np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=3)
    elif bits == 6:
        high = (quads >> 4).reshape(panels, PANEL_ROWS, count, 2, 4, 4)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        line[..., 4:, :] = np.bitwise_or.reduce(high << shifts, axis=4)
    return _lines(line.reshape(panels, PANEL_ROWS, -1, 4))


def _unpack_codes(packed: U8, bits: int, k: int) -> U8:
    panels, count = packed.shape[0], k // BLOCK
    line = _quads(packed).reshape(panels, PANEL_ROWS, count, bits, 4)
    if bits == 8:
        return line.reshape(panels * PANEL_ROWS, k)
    codes = np.empty((panels, PANEL_ROWS, count, _QUADS, 4), np.uint8)
    codes[..., 0::2, :] = line[..., :4, :] & 0x0F
    codes[..., 1::2, :] = line[..., :4, :] >> 4
    if bits == 5:
        codes |= ((line[..., 4:5, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    elif bits == 6:
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        high = ((line[..., 4:, None, :] >> shifts) & 3) << 4
        codes |= high.reshape(codes.shape)
    return codes.reshape(panels * PANEL_ROWS, k)


def _lane_wise(x: npt.NDArray[Any]) -> U8:
    """[16 · panels, units, c] → [panels, units, c · 16 lanes · itemsize] bytes."""
    rows, units, c = x.shape
    lanes = x.reshape(rows // PANEL_ROWS, PANEL_ROWS, units, c).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(lanes).view(np.uint8).reshape(rows // PANEL_ROWS, units, -1)


def _row_wise(packed: U8, dtype: str, c: int) -> npt.NDArray[Any]:
    """Inverse of `_lane_wise`."""
    panels, units, _ = packed.shape
    lanes = np.ascontiguousarray(packed).view(dtype).reshape(panels, units, c, PANEL_ROWS)
    return np.ascontiguousarray(lanes.transpose(0, 3, 1, 2)).reshape(panels * PANEL_ROWS, units, c)


def _pack_scales(blocks: Blocks, fmt: BlockFormat) -> U8:
    scales = _lane_wise(blocks.scales)
    panels = scales.shape[0]
    if blocks.factors is None:
        return scales.reshape(panels, -1)
    factors = _lane_wise(blocks.factors)
    return np.concatenate([factors, scales.reshape(panels, factors.shape[1], -1)], axis=2).reshape(panels, -1)


def _unpack_scales(packed: U8, fmt: BlockFormat, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.float16] | None]:
    panels, count = packed.shape[0], -(-k // fmt.span)
    per_block = fmt.scales * PANEL_ROWS * np.dtype(fmt.scale_dtype).itemsize
    if not fmt.two_level:
        return _row_wise(packed[:, : count * per_block].reshape(panels, count, -1), fmt.scale_dtype, fmt.scales), None
    factor_bytes = fmt.factors * PANEL_ROWS * 2
    super_bytes = factor_bytes + SUPERBLOCK // BLOCK * per_block
    supers = packed[:, : k // SUPERBLOCK * super_bytes].reshape(panels, -1, super_bytes)
    scales = _row_wise(supers[..., factor_bytes:].reshape(panels, count, -1), fmt.scale_dtype, fmt.scales)
    return scales, _row_wise(supers[..., :factor_bytes], "float16", fmt.factors)
