"""Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, pre_norm_layers


def mixtral(d: Decoder) -> Tensor:
    """Llama with a mixture of experts in each layer."""
    return head(d, pre_norm_layers(d, embed(d)))
