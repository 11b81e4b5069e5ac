"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, pre_norm_layers


def qwen2(d: Decoder) -> Tensor:
    """Llama with biases on Q, K and V, always; its configs do not mention them."""
    return head(d, pre_norm_layers(d, embed(d), qkv_bias=True))
