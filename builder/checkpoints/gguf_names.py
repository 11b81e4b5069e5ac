"""GGUF tensor names ↔ canonical names."""

from __future__ import annotations

import re

_WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_PRE_NORM_LAYER = {**_LAYER, "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORM_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS = {
    "llama": _PRE_NORM_LAYER,
    "qwen2": _PRE_NORM_LAYER,
    "qwen3": _PRE_NORM_LAYER,
    "qwen3moe": _PRE_NORM_LAYER,
    "gemma2": _SANDWICH_NORM_LAYER,
    "gemma3": _SANDWICH_NORM_LAYER,
}
GGUF_ARCHITECTURES = tuple(_LAYERS)
"""Values of `general.architecture` that are read."""

MODEL_ARCHITECTURES = {"qwen3moe": "qwen3_moe"}
"""`general.architecture` → key of `ModelConfig.architecture`, where they differ; a llama with experts is a mixtral."""

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of RoPE's inverse frequencies; part of the config here."""

_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)", re.ASCII)
_EXPERT_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.ffn_(gate|up|down)\.(0|[1-9][0-9]{0,5})\.weight", re.ASCII)
"""Of files from before experts were stacked"""
_CANONICAL_LAYER_NAME = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.(weight|bias)", re.ASCII)

_ONE_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.", re.ASCII)


def canonical_name(name: str, architecture: str) -> str:
    """`blk.0.attn_q.weight` → `model.layers.0.self_attn.q_proj.weight`; names without a counterpart stay.

    A tensor of all experts becomes `model.layers.0.mlp.experts.gate_proj.weight`.
    """
    if match := _EXPERT_NAME.fullmatch(name):
        return f"model.layers.{match[1]}.mlp.experts.{match[3]}.{match[2]}_proj.weight"
    if match := _LAYER_NAME.fullmatch(name):
        part = _LAYERS[architecture].get(match[2])
        return f"model.layers.{match[1]}.{part}.{match[3]}" if part else name
    stem, _, kind = name.rpartition(".")
    part = _WHOLE_MODEL.get(stem)
    return f"{part}.{kind}" if part and kind in ("weight", "bias") else name


def gguf_name(name: str, architecture: str) -> str:
    """The reverse of `canonical_name`; for a matrix of one expert the tensor of all of them."""
    if match := _CANONICAL_LAYER_NAME.fullmatch(name):
        parts = {canonical: gguf for gguf, canonical in _LAYERS[architecture].items()}
        part = _ONE_EXPERT.sub("mlp.experts.", match[2])
        return f"blk.{match[1]}.{parts[part]}.{match[3]}" if part in parts else name
    stem, _, kind = name.rpartition(".")
    parts = {canonical: gguf for gguf, canonical in _WHOLE_MODEL.items()}
    return f"{parts[stem]}.{kind}" if stem in parts else name
