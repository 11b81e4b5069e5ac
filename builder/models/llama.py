"""Llama (arXiv 2302.13971, 2407.21783) and Mistral (2310.06825), which adds a sliding window."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, pre_norm_layers


def llama(d: Decoder) -> Tensor:
    """Pre-norm layers; biases on Q, K, V where the config has them."""
    return head(d, pre_norm_layers(d, embed(d), qkv_bias=d.config.qkv_bias))
