"""The pieces that decoder-only models are composed of.

A definition reads as its paper: `embed`, then layers made of `self_attention` and `feed_forward`, then `head`. What
differs between members of a family (sizes, windows, scales, biases, experts) comes from `ModelConfig`; what differs
between families is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.config import ModelConfig, RopeConfig
from aotllm.builder.graph import ops
from aotllm.builder.graph.tracer import Tensor
from aotllm.builder.graph.weights import Weights
from aotllm.builder.models.rope import rotary_frequencies
from aotllm.errors import UnsupportedModel


@dataclass(frozen=True)
class Decoder:
    """What every piece needs: the config, the weights, the graph's inputs, and what all layers share."""

    config: ModelConfig
    weights: Weights
    token_ids: Tensor
    positions: Tensor
    rope: Mapping[RopeConfig, tuple[Tensor, Tensor]]
    """cos and sin per RoPE variant in use"""
    masks: Mapping[int, Tensor]
    """Attention mask per sliding window in use"""

    @classmethod
    def create(
        cls, config: ModelConfig, weights: Weights, token_ids: Tensor, positions: Tensor, max_seq_len: int
    ) -> Decoder:
        """Traces the rotary tables and masks that the layers of `config` use. Raises UnsupportedModel."""
        layers = range(config.num_layers)
        variants = list(dict.fromkeys(config.layer_rope(layer) for layer in layers))
        windows = list(dict.fromkeys(config.window(layer) for layer in layers))
        tables = {}
        for i, variant in enumerate(variants):
            frequencies, factor = rotary_frequencies(
                variant, config.head_dim, max_seq_len, config.max_position_embeddings
            )
            inv_freq = positions.tracer.initializer(ir.Tensor(frequencies, name=f"rope.{i}.inv_freq"))
            tables[variant] = ops.rotary_tables(positions, inv_freq, factor)
        masks = {window: ops.attention_mask(positions, window) for window in windows}
        return cls(config, weights, token_ids, positions, tables, masks)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm of the residual stream with the weight of module `name`."""
        return ops.rms_norm(x, self.weights.norm(f"{name}.weight", x.width), self.config.rms_norm_eps)

    def linear(self, x: Tensor, name: str, n: int, bias: bool = False) -> Tensor:
        """Module `name`: `[tokens, k]` → `[tokens, n]`."""
        weight = self.weights.matrix(f"{name}.weight", n, x.width)
        return ops.linear(x, weight, self.weights.vector(f"{name}.bias", n) if bias else None)


def embed(d: Decoder) -> Tensor:
    """Token embeddings `[tokens, hidden_size]`, scaled where the config says so."""
    table = d.weights.matrix("model.embed_tokens.weight", d.config.vocab_size, d.config.hidden_size)
    return ops.embedding(d.token_ids, table, d.config.embedding_scale)


def self_attention(d: Decoder, x: Tensor, layer: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> Tensor:
    """Attention of `layer` over the normed `x` and its output projection: `[tokens, hidden_size]` → same.

    Args:
        d: the decoder.
        x: the input, normed.
        layer: index; decides window and RoPE variant.
        qkv_bias: biases on Q, K and V.
        qk_norm: RMSNorm of each head of Q and K before RoPE, with weights `[head_dim]`.
    """
    config, prefix = d.config, f"model.layers.{layer}.self_attn"
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q = d.linear(x, f"{prefix}.q_proj", q_width, qkv_bias)
    k = d.linear(x, f"{prefix}.k_proj", kv_width, qkv_bias)
    v = d.linear(x, f"{prefix}.v_proj", kv_width, qkv_bias)
    if qk_norm:
        q_weight = d.weights.norm(f"{prefix}.q_norm.weight", config.head_dim)
        k_weight = d.weights.norm(f"{prefix}.k_norm.weight", config.head_dim)
        q = ops.head_rms_norm(q, q_weight, config.rms_norm_eps)
        k = ops.head_rms_norm(k, k_weight, config.rms_norm_eps)
    tables = d.rope[config.layer_rope(layer)]
    attended = ops.attention(
        ops.rotary(q, tables, config.num_heads),
        ops.rotary(k, tables, config.num_kv_heads),
        v,
        d.masks[config.window(layer)],
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        scale=config.query_scale if config.query_scale is not None else config.head_dim**-0.5,
        softcap=config.attn_logit_softcap,
    )
    return d.linear(attended, f"{prefix}.o_proj", config.hidden_size, config.attention_out_bias)


def mlp(d: Decoder, x: Tensor, layer: int) -> Tensor:
    """Gated feed-forward block of `layer` over the normed `x`: `[tokens, hidden_size]` → same.

    Raises:
        UnsupportedModel: an unknown activation.
    """
    config, prefix = d.config, f"model.layers.{layer}.mlp"
    _check_activation(config)
    gate = d.linear(x, f"{prefix}.gate_proj", config.intermediate_size, config.mlp_bias)
    up = d.linear(x, f"{prefix}.up_proj", config.intermediate_size, config.mlp_bias)
    h = ops.gated(gate, up, config.hidden_act)
    return d.linear(h, f"{prefix}.down_proj", config.hidden_size, config.mlp_bias)


def mixture_of_experts(d: Decoder, x: Tensor, layer: int) -> Tensor:
    """The experts of `layer` over the normed `x`: `[tokens, hidden_size]` → same.

    Raises:
        UnsupportedModel: an unknown activation.
    """
    config, prefix = d.config, f"model.layers.{layer}.mlp"
    _check_activation(config)

    def experts(part: str, n: int, k: int) -> Tensor:
        sources = [f"{prefix}.experts.{i}.{part}.weight" for i in range(config.num_experts)]
        return d.weights.matrices(f"{prefix}.experts.{part}.weight", sources, n, k)

    neurons, hidden = config.moe_intermediate_size, config.hidden_size
    return ops.mixture_of_experts(
        x,
        d.weights.matrix(f"{prefix}.gate.weight", config.num_experts, hidden),
        experts("gate_proj", neurons, hidden),
        experts("up_proj", neurons, hidden),
        experts("down_proj", hidden, neurons),
        top_k=config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
        activation=config.hidden_act,
    )


def feed_forward(d: Decoder, x: Tensor, layer: int) -> Tensor:
    """What the config says that `layer` has: a mixture of experts, or an MLP. Raises UnsupportedModel likewise."""
    return mixture_of_experts(d, x, layer) if d.config.has_experts(layer) else mlp(d, x, layer)


def _check_activation(config: ModelConfig) -> None:
    if config.hidden_act not in ops.ACTIVATIONS:
        raise UnsupportedModel(
            f"Activation {config.hidden_act!r} is not implemented; known ones: {', '.join(ops.ACTIVATIONS)}"
        )


def pre_norm_layers(d: Decoder, x: Tensor, *, qkv_bias: bool = False, qk_norm: bool = False) -> Tensor:
    """All layers of the Llama kind: each block sees the normed stream and is added to it."""
    for layer in range(d.config.num_layers):
        prefix = f"model.layers.{layer}"
        with x.tracer.scope(f"layers.{layer}"):
            h = d.norm(x, f"{prefix}.input_layernorm")
            x = ops.add(x, self_attention(d, h, layer, qkv_bias=qkv_bias, qk_norm=qk_norm))
            h = d.norm(x, f"{prefix}.post_attention_layernorm")
            x = ops.add(x, feed_forward(d, h, layer))
    return x


def sandwich_norm_layers(d: Decoder, x: Tensor, *, qkv_bias: bool = False, qk_norm: bool = False) -> Tensor:
    """All layers of the Gemma 2 kind: each block is normed before and after, then added to the stream."""
    for layer in range(d.config.num_layers):
        prefix = f"model.layers.{layer}"
        with x.tracer.scope(f"layers.{layer}"):
            h = d.norm(x, f"{prefix}.input_layernorm")
            h = self_attention(d, h, layer, qkv_bias=qkv_bias, qk_norm=qk_norm)
            x = ops.add(x, d.norm(h, f"{prefix}.post_attention_layernorm"))
            h = d.norm(x, f"{prefix}.pre_feedforward_layernorm")
            x = ops.add(x, d.norm(mlp(d, h, layer), f"{prefix}.post_feedforward_layernorm"))
    return x


def head(d: Decoder, x: Tensor) -> Tensor:
    """Final norm and logits `[tokens, vocab_size]`; the embedding's weights serve again where they are tied."""
    config = d.config
    x = d.norm(x, "model.norm")
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    logits = ops.linear(x, d.weights.matrix(name, config.vocab_size, config.hidden_size))
    return ops.softcap(logits, config.final_logit_softcap) if config.final_logit_softcap else logits
