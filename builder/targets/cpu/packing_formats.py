"""The segment formats of `docs/engine_format.md` as a table; the C++ side is `plugins/cpu/formats.cc`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PANEL_ROWS: Final = 16
BLOCK: Final = 32
"""Columns of a block"""
SUPERBLOCK: Final = 256
"""Columns that share the first level of two-level scales"""
LINE: Final = 64
"""Bytes; panels are multiples of it"""

FLOAT_FORMATS: Final = ("f32", "f16", "bf16")

_IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True)
class BlockFormat:
    """How the panels of a block format store codes and scales.

    A weight is `scale * (value(code) - zero)`, plus `min` where affine; `value` is the identity or a look-up.
    """

    name: str
    bits: Literal[4, 5, 6, 8]
    """Stored bits of a code; 8-bit codes are signed"""
    scale_dtype: Literal["float16", "float32", "uint8", "int8"]
    """Integer types are the second of two levels: `scale = d * byte`, `min = dmin * byte` with float16 d, dmin"""
    groups: Literal[1, 2] = 1
    """Scale groups per block"""
    affine: bool = False
    zero: int = 0
    values: tuple[int, ...] | None = None
    span: Literal[32, 64, 128] = BLOCK
    """Columns that share scales, where they are those of one or more whole blocks"""

    @property
    def two_level(self) -> bool:
        """Whether scales are integers times a float16 factor per superblock."""
        return self.scale_dtype in ("uint8", "int8")

    @property
    def factors(self) -> int:
        """First-level factors per superblock: d, and dmin where affine."""
        return (2 if self.affine else 1) if self.two_level else 0

    @property
    def scales(self) -> int:
        """Scales and mins per row and `span` columns."""
        return self.groups * (2 if self.affine else 1)

    @property
    def code_lines(self) -> int:
        """Lines of 64 bytes that the codes of a block take."""
        return self.bits


BLOCK_FORMATS: Final = {
    f.name: f
    for f in (
        BlockFormat("q4_0", 4, "float16", zero=8),
        BlockFormat("q4_1", 4, "float16", affine=True),
        BlockFormat("q5_0", 5, "float16", zero=16),
        BlockFormat("q5_1", 5, "float16", affine=True),
        BlockFormat("q8_0", 8, "float16"),
        BlockFormat("q2_k", 4, "uint8", groups=2, affine=True),
        BlockFormat("q3_k", 4, "int8", groups=2, zero=4),
        BlockFormat("q4_k", 4, "uint8", affine=True),
        BlockFormat("q5_k", 5, "uint8", affine=True),
        BlockFormat("q6_k", 6, "int8", groups=2, zero=32),
        BlockFormat("iq4_nl", 4, "float32", values=_IQ4_NL_VALUES),
        BlockFormat("mxfp4", 4, "float32", values=_E2M1_DOUBLED),
        BlockFormat("q8_f32", 8, "float32", groups=2),
        BlockFormat("q4_0_g64", 4, "float16", zero=8, span=64),
        BlockFormat("q4_0_g128", 4, "float16", zero=8, span=128),
        BlockFormat("q4_1_g64", 4, "float16", affine=True, span=64),
        BlockFormat("q4_1_g128", 4, "float16", affine=True, span=128),
    )
}


def panel_bytes(fmt: str, k: int) -> int:
    """Bytes of one panel of `k` columns; a multiple of 64."""
    if fmt == "f32":
        return k * LINE
    if fmt in FLOAT_FORMATS:
        return -(-k // 2) * LINE
    f = BLOCK_FORMATS[fmt]
    itemsize = {"float16": 2, "float32": 4, "uint8": 1, "int8": 1}[f.scale_dtype]
    per_span = f.scales * PANEL_ROWS * itemsize
    if f.two_level:
        superblock = f.factors * PANEL_ROWS * 2 + SUPERBLOCK // BLOCK * per_span
        scale_bytes = -(-k // SUPERBLOCK) * superblock
    else:
        scale_bytes = -(-k // f.span) * per_span
    size = k // BLOCK * f.code_lines * LINE + scale_bytes
    return -(-size // LINE) * LINE
