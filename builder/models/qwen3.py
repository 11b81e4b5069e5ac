"""Qwen 3, dense (arXiv 2505.09388)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, pre_norm_layers


def qwen3(d: Decoder) -> Tensor:
    """Llama with normed heads of Q and K."""
    return head(d, pre_norm_layers(d, embed(d), qkv_bias=d.config.qkv_bias, qk_norm=True))
