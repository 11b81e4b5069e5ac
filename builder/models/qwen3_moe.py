"""Qwen 3 with mixtures of experts (arXiv 2505.09388)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, pre_norm_layers


def qwen3_moe(d: Decoder) -> Tensor:
    """Qwen 3 with a mixture of experts in all layers but those that the config calls dense."""
    return head(d, pre_norm_layers(d, embed(d), qkv_bias=d.config.qkv_bias, qk_norm=True))
