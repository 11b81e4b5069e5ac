"""Gemma 2 (arXiv 2408.00118)."""

from __future__ import annotations

from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.models.decoder import Decoder, embed, head, sandwich_norm_layers


def gemma2(d: Decoder) -> Tensor:
    """Scaled embeddings, norms around each block, soft-capped scores and logits, every other layer with a window.

    All but the norms come from the config: `embedding_scale`, the two soft-caps, `query_scale`, `layer_windows`,
    `hidden_act` and the norms' `rms_norm_weight_offset`.
    """
    return head(d, sandwich_norm_layers(d, embed(d), qkv_bias=d.config.qkv_bias))
