"""Gemma 3, text (arXiv 2503.19786)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, sandwich_norm_layers


def gemma3(d: Decoder) -> Tensor:
    """Gemma 2 with normed heads of Q and K in place of soft-capping, and a RoPE base of its own for windowed layers."""
    return head(d, sandwich_norm_layers(d, embed(d), qkv_bias=d.config.qkv_bias, qk_norm=True))
