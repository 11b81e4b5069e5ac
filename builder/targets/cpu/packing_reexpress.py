"""Block types with codebooks of their own, re-expressed as `q8_f32`: 16 int8 codes and a float32 scale a group.

A group is kept exactly where its values are products of one float32 with integers of at most 127. The codebooks are
built that way, so the magnitudes that each can produce give the few divisors worth trying.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import gguf
import numpy as np
import numpy.typing as npt

from aotllm.builder.targets.cpu.packing_blocks import Blocks

GROUP: Final = 16
"""Weights per scale"""


@dataclass(frozen=True)
class Reexpressed:
    """A GGUF block type that becomes `q8_f32`."""

    block: int
    type_size: int
    magnitudes: tuple[int, ...]
    """What the largest weight of a group can be, in units of the group's scale"""


_MAGNITUDES: Final = {
    "iq1_s": (9, 7, 1),  # 8 · ({-1, 0, 1} ± 1/8)
    "iq1_m": (9, 7, 1),
    "iq2_xxs": (43, 25, 1),  # {8, 25, 43}; a group of only 8s has scale 8
    "iq2_xs": (43, 25, 1),
    "iq2_s": (43, 25, 1),
    "iq3_xxs": (62, 52, 44, 36, 28, 20, 12, 1),  # {4, 12, …, 52, 62}
    "iq3_s": (15, 13, 11, 9, 7, 5, 3, 1),
    "tq1_0": (1,),
    "tq2_0": (2, 1),  # {-1, 0, 1}; the fourth code is 2
    "nvfp4": (12, 8, 6, 4, 3, 2, 1),  # E2M1, doubled
}


def _reexpressed() -> dict[str, Reexpressed]:
    """Those that the installed gguf package knows."""
    found = {}
    for name, magnitudes in _MAGNITUDES.items():
        qtype = getattr(gguf.GGMLQuantizationType, name.upper(), None)
        if qtype is not None:
            block, type_size = gguf.GGML_QUANT_SIZES[qtype]
            found[name] = Reexpressed(block, type_size, magnitudes)
    return found


REEXPRESSED: Final = _reexpressed()


def reexpress(values: npt.NDArray[np.float32], storage: str) -> Blocks:
    """float32 [rows, k], k a multiple of 32 → `q8_f32`.

    Exact (`==`) for groups that are integer multiples of one float32; the others are rounded to 1/127 of their largest
    magnitude. A group with a NaN or infinity becomes NaN.
    """
    rows, k = values.shape
    groups = values.reshape(-1, GROUP)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        largest = np.abs(groups).max(axis=1)
        scales = (largest / np.float32(127)).astype(np.float32)
        codes = _codes(groups, scales)
        magnitudes = REEXPRESSED[storage].magnitudes if storage in REEXPRESSED else ()
        open_groups = np.flatnonzero(np.isfinite(largest) & (largest > 0))
        for magnitude in magnitudes:
            if open_groups.size == 0:
                break
            subset = groups[open_groups]
            trial = largest[open_groups] / np.float32(magnitude)
            trial_codes = _codes(subset, trial)
            exact = (trial_codes * trial[:, None] == subset).all(axis=1)
            scales[open_groups[exact]] = trial[exact]
            codes[open_groups[exact]] = trial_codes[exact]
            open_groups = open_groups[~exact]
        scales[~np.isfinite(largest)] = np.nan
    return Blocks(codes.astype(np.int8).view(np.uint8).reshape(rows, k), scales.reshape(rows, k // 32, 2))


def _codes(groups: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Nearest integers in [-127, 127], as float32; 0 where the scale is 0 or not finite."""
    codes = np.rint(groups / scales[:, None])
    usable = (scales > 0) & np.isfinite(scales)
    return np.where(usable[:, None], np.clip(codes, -127, 127), np.float32(0))
