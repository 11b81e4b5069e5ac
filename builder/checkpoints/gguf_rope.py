"""GGUF's `rope.*` keys → `RopeConfig`."""

from __future__ import annotations

import math
from dataclasses import replace

from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.config import RopeConfig
from aotllm.errors import UnsupportedModel

_DEFAULT_THETA = 10_000.0


def read_rope(
    model: Fields,
    architecture: str,
    head_dim: int,
    freq_factors: tuple[float, ...] | None,
    has_windows: bool,
) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of the full-attention layers, and that of the sliding-window layers where it is another one (Gemma 3).

    `rope.scaling.type` is `none`, `linear` or `yarn`; llama3 scaling comes as `freq_factors` instead.

    Raises:
        CheckpointError: a key is ill-typed or out of range.
        UnsupportedModel: another scaling type.
    """
    theta = model.number("rope.freq_base", _DEFAULT_THETA)
    rotary_dim = model.integer("rope.dimension_count", head_dim)
    if architecture == "llama" and rotary_dim != head_dim:
        # The rows of Q and K are interleaved over whole heads; part of a head cannot be taken apart.
        raise UnsupportedModel(
            f"{model.source}: rope.dimension_count is {rotary_dim} with heads of {head_dim}; a llama model must rotate "
            "whole heads"
        )
    scaled = _read_scaling(model, RopeConfig(theta=theta, rotary_dim=rotary_dim if rotary_dim != head_dim else None))
    rope = replace(scaled, freq_factors=freq_factors)
    if architecture == "gemma3" and has_windows:
        local_theta = model.number("rope.freq_base_swa", _DEFAULT_THETA)
        return rope, RopeConfig(theta=local_theta, rotary_dim=rope.rotary_dim)
    return rope, None


def _read_scaling(model: Fields, rope: RopeConfig) -> RopeConfig:
    kind = model.string("rope.scaling.type", "linear")
    factor = model.number("rope.scaling.factor", 0.0, positive=False)
    factor = factor or model.number("rope.scale_linear", 0.0, positive=False) or 1.0  # 0 = unscaled; an older key
    attn_factor = model.number("rope.scaling.attn_factor", 1.0)
    if kind == "yarn":
        return _read_yarn(model, rope, factor, attn_factor)
    if kind not in ("none", "linear"):
        raise UnsupportedModel(
            f"{model.source}: RoPE scaling '{kind}' is not implemented; known are none, linear, yarn"
        )
    if attn_factor != 1.0:
        raise UnsupportedModel(f"{model.source}: rope.scaling.attn_factor is implemented for yarn only")
    if kind == "none" or factor == 1.0:
        return rope
    return replace(rope, rope_type="linear", factor=factor)


def _read_yarn(model: Fields, rope: RopeConfig, factor: float, attn_factor: float) -> RopeConfig:
    for name, plain in (("rope.scaling.yarn_log_multiplier", 0.0), ("rope.scaling.yarn_ext_factor", 1.0)):
        stated = model.number(name, plain, positive=False)
        if stated != plain:
            raise UnsupportedModel(f"{model.source}: {name} is {stated:g}; only {plain:g} is implemented")
    attn_factor *= model.number("rope.scaling.yarn_attn_factor", 1.0)
    return replace(
        rope,
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=model.integer(
            "rope.scaling.original_context_length", model.integer("context_length")
        ),
        beta_fast=model.number("rope.scaling.yarn_beta_fast", None),
        beta_slow=model.number("rope.scaling.yarn_beta_slow", None),
        # The factor of the YaRN paper, times the file's own; None = the former alone, derived by the reader.
        attention_factor=None if attn_factor == 1.0 else attn_factor * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )
