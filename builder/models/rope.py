"""Rotary frequencies of every RoPE variant, decided at build time.

`dynamic` and `longrope` depend on the length of a sequence in their original form. A key in the cache keeps the
rotation it was written with, so frequencies that change while a sequence grows would make answers depend on chunks and
caching. Here they depend on the engine's `max_seq_len` alone: an engine for sequences within the pretraining length
uses the original frequencies, a longer one those for `max_seq_len`.

Sources: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); NTK-aware scaling; YaRN (2309.00071);
LongRoPE (2402.13753); Llama 3.1's wavelength-dependent scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.builder.config import RopeConfig
from aotllm.errors import UnsupportedModel

Frequencies = npt.NDArray[np.float64]


def rotary_frequencies(
    rope: RopeConfig, head_dim: int, max_seq_len: int, max_position_embeddings: int
) -> tuple[npt.NDArray[np.float32], float]:
    """Inverse frequencies, float32 `[rotary_dim / 2]`, and the factor on cos and sin.

    Args:
        rope: the variant and its parameters.
        head_dim: size of a head; `rope.rotary_dim` of it rotate.
        max_seq_len: longest sequence of the engine, in tokens.
        max_position_embeddings: longest sequence that the checkpoint claims, in tokens.

    Raises:
        UnsupportedModel: an unknown `rope_type`, or a parameter that it needs is missing or of the wrong length.
    """
    variant = _VARIANTS.get(rope.rope_type)
    if variant is None:
        raise UnsupportedModel(f"RoPE type {rope.rope_type!r} is unknown; known ones: {', '.join(sorted(_VARIANTS))}")
    dim = rope.rotary_dim or head_dim
    frequencies, attention_factor = variant(rope, dim, max_seq_len, max_position_embeddings)
    if rope.freq_factors is not None:
        frequencies = frequencies / _per_frequency(rope.freq_factors, dim, "freq_factors")
    return frequencies.astype(np.float32), attention_factor


def _base_frequencies(theta: float, dim: int) -> Frequencies:
    return theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)


def _default(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    return _base_frequencies(rope.theta, dim), 1.0


def _linear(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    return _base_frequencies(rope.theta, dim) / rope.factor, 1.0


def _dynamic(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    original = rope.original_max_position_embeddings or max_position
    length = max(max_seq_len, original)
    stretch = rope.factor * length / original - (rope.factor - 1)
    return _base_frequencies(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    original = _required(rope, "original_max_position_embeddings")
    low, high = _required(rope, "low_freq_factor"), _required(rope, "high_freq_factor")
    frequencies = _base_frequencies(rope.theta, dim)
    turns = original * frequencies / (2 * math.pi)  # full rotations within the pretraining length
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (smooth + (1 - smooth) / rope.factor), 1.0


def _yarn(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    original = rope.original_max_position_embeddings or max_position

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast or 32.0), dimension_of(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    interpolate = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    frequencies = _base_frequencies(rope.theta, dim)
    return frequencies * (1 - interpolate + interpolate / rope.factor), _yarn_attention_factor(rope)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeConfig, dim: int, max_seq_len: int, max_position: int) -> tuple[Frequencies, float]:
    original = rope.original_max_position_embeddings or max_position
    name = "long_factor" if max_seq_len > original else "short_factor"
    factors = _per_frequency(_required(rope, name), dim, name)
    attention_factor = rope.attention_factor
    if attention_factor is None:
        # Checkpoints state the stretch as `factor` or leave it to the ratio of the two lengths.
        stretch = rope.factor if rope.factor != 1.0 else max_position / original
        attention_factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return _base_frequencies(rope.theta, dim) / factors, attention_factor


def _required(rope: RopeConfig, name: str) -> Any:
    value = getattr(rope, name)
    if value is None:
        raise UnsupportedModel(f"RoPE type {rope.rope_type!r} needs {name!r}, which the checkpoint does not state")
    return value


def _per_frequency(values: tuple[float, ...], dim: int, name: str) -> Frequencies:
    if len(values) != dim // 2:
        raise UnsupportedModel(f"RoPE {name!r} has {len(values)} values, expected {dim // 2} (rotary_dim / 2)")
    return np.asarray(values, dtype=np.float64)


_VARIANTS: dict[str, Callable[[RopeConfig, int, int, int], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
