"""GGUF metadata → `ModelConfig`.

GGUF does not state everything that a model needs. What it leaves out is derived as llama.cpp, the format's reference
implementation, derives it (`llama_model::load_hparams`): defaults of optional keys, Gemma's sliding-window patterns,
attention scale and local RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotllm.builder.checkpoints.expected import EMBEDDING, LM_HEAD, SANDWICH_NORM_ARCHITECTURES
from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.checkpoints.gguf_names import GGUF_ARCHITECTURES, MODEL_ARCHITECTURES
from aotllm.builder.checkpoints.gguf_rope import read_rope
from aotllm.builder.checkpoints.validate import MAX_LAYERS
from aotllm.builder.config import ModelConfig
from aotllm.errors import CheckpointError, UnsupportedModel

_GEMMA2_WINDOW = 4096
_SLIDING_PERIOD = {"gemma2": 2, "gemma3": 6}
"""Every how many layers one has full attention."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The one size of each family whose attention scale is not `head_dim ** -0.5`."""
_EXPERT_ARCHITECTURES = ("llama", "qwen3moe")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_architecture(metadata: Mapping[str, Any], source: str) -> str:
    """`general.architecture`. Raises UnsupportedModel where it is not one of `GGUF_ARCHITECTURES`."""
    architecture = Fields(source, metadata).string("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"{source}: architecture '{architecture}' is not implemented; known are {', '.join(GGUF_ARCHITECTURES)}"
        )
    return architecture


def read_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    freq_factors: tuple[float, ...] | None,
    source: str,
) -> ModelConfig:
    """The model that the metadata describes, not yet validated.

    Args:
        metadata: of the (first) file.
        shapes: of all tensors under canonical names: they tell the vocabulary, tied embeddings and biases.
        freq_factors: content of `rope_freqs.weight`, where the file has it.
        source: the file, for messages.

    Raises:
        CheckpointError: a key is missing or ill-typed, or the file holds a vocabulary only.
        UnsupportedModel: a feature that is not implemented.
    """
    architecture = read_architecture(metadata, source)
    if EMBEDDING not in shapes:
        only = "" if shapes else ": it holds a vocabulary only, no weights"
        raise CheckpointError(f"{source}: tensor 'token_embd.weight' is missing{only}")
    model = Fields(source, metadata, f"{architecture}.", flat=True)
    tokenizer = Fields(source, metadata, "tokenizer.ggml.", flat=True)
    num_layers = model.integer("block_count", maximum=MAX_LAYERS)
    hidden_size = model.integer("embedding_length")
    num_heads = _same_in_all_layers(model, "attention.head_count")
    head_dim = _head_dim(model, hidden_size // num_heads)
    windows = _layer_windows(model, architecture, num_layers)
    rope, rope_local = read_rope(model, architecture, head_dim, freq_factors, any(windows))
    gemma = architecture in SANDWICH_NORM_ARCHITECTURES
    is_gemma2 = architecture == "gemma2"
    inner = _same_in_all_layers(model, "feed_forward_length")
    experts = _experts(model, architecture, inner, num_layers, shapes)
    named = "mixtral" if architecture == "llama" and experts else MODEL_ARCHITECTURES.get(architecture, architecture)
    return ModelConfig(
        architecture=named,
        vocab_size=shapes[EMBEDDING][0],
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(model, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=model.integer("context_length"),
        rms_norm_eps=model.number("attention.layer_norm_rms_epsilon"),
        rms_norm_weight_offset=0.0,  # converters store Gemma's 1 + weight
        hidden_act="gelu_tanh" if gemma else "silu",
        tie_word_embeddings=LM_HEAD not in shapes,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in shapes or architecture == "qwen2",
        attention_out_bias="model.layers.0.self_attn.o_proj.bias" in shapes,
        mlp_bias="model.layers.0.mlp.down_proj.bias" in shapes,
        query_scale=_gemma_query_scale(architecture, num_layers, hidden_size, num_heads, head_dim) if gemma else None,
        embedding_scale=float(np.sqrt(np.float32(hidden_size))) if gemma else 1.0,
        attn_logit_softcap=model.number("attn_logit_softcapping", 50.0, positive=False) if is_gemma2 else 0.0,
        final_logit_softcap=(
            model.number("final_logit_softcapping", 30.0 if is_gemma2 else 0.0, positive=False) if gemma else 0.0
        ),
        layer_windows=windows,
        **experts,
        rope=rope,
        rope_local=rope_local,
        bos_token_id=next(iter(tokenizer.token_ids("bos_token_id")), None),
        eos_token_ids=tuple(dict.fromkeys(i for key in _END_KEYS for i in tokenizer.token_ids(key))),
        name=Fields(source, metadata).string("general.name", ""),
    )


def _experts(
    model: Fields, architecture: str, inner: int, num_layers: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """The fields of `ModelConfig` about experts.

    llama.cpp divides the weights of both architectures' experts by their sum, whatever the model was trained with; a
    file may say otherwise.
    """
    count = model.integer("expert_count", 0, minimum=0)
    if not count:
        return {}
    softmax, unscaled = 1, (0.0, 1.0)
    shared = model.integer("expert_shared_count", 0, minimum=0)
    if architecture not in _EXPERT_ARCHITECTURES or shared > 0:
        raise UnsupportedModel(
            f"{model.source}: experts of a {architecture} model, or shared ones, are not implemented; known are those "
            f"of {' and '.join(_EXPERT_ARCHITECTURES)}"
        )
    if model.integer("expert_gating_func", softmax, minimum=0) not in (0, softmax):
        raise UnsupportedModel(f"{model.source}: expert_gating_func is not implemented but for 1 (softmax)")
    if model.number("expert_weights_scale", 1.0, positive=False) not in unscaled:
        raise UnsupportedModel(f"{model.source}: expert_weights_scale is not implemented")
    if model.integer("expert_group_count", 0, minimum=0) > 1:
        raise UnsupportedModel(f"{model.source}: groups of experts are not implemented")
    chosen = model.integer("expert_used_count")
    default = inner if architecture == "llama" else max(1, inner // chosen)
    layers = (f"model.layers.{layer}.mlp" for layer in range(num_layers))
    dense = [f"{mlp}.gate.weight" not in shapes and f"{mlp}.gate_proj.weight" in shapes for mlp in layers]
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": model.integer("expert_feed_forward_length", default),
        "norm_topk_prob": model.boolean("expert_weights_norm", True),
        "dense_layers": tuple(layer for layer, is_dense in enumerate(dense) if is_dense),
    }


def _same_in_all_layers(model: Fields, name: str, default: int | None = None) -> int:
    """An integer that GGUF also allows as an array of one per layer."""
    value = model.raw(name)
    if isinstance(value, np.ndarray):
        if value.size == 0 or value.dtype.kind not in "iu":
            model.fail(name, "an integer, or an array of one per layer")
        if (value != value[0]).any():
            raise UnsupportedModel(f"{model.source}: {name} differs from layer to layer, which is not implemented")
        model = Fields(model.source, {name: int(value[0])})
    return model.integer(name) if default is None else model.integer(name, default)


def _head_dim(model: Fields, default: int) -> int:
    head_dim = model.integer("attention.key_length", max(1, default))
    value_dim = model.integer("attention.value_length", max(1, default))
    if value_dim != head_dim:
        raise UnsupportedModel(
            f"{model.source}: key_length {head_dim} and value_length {value_dim} differ, which is not implemented"
        )
    return head_dim


def _layer_windows(model: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """Sliding window per layer. llama.cpp masks keys at a distance of `sliding_window` or more, as our config means."""
    if architecture not in _SLIDING_PERIOD:
        return ()
    window = model.integer("attention.sliding_window", _GEMMA2_WINDOW if architecture == "gemma2" else 0, minimum=0)
    if window == 0:
        return ()
    name = "attention.sliding_window_pattern"
    pattern = model.raw(name)
    if isinstance(pattern, np.ndarray):
        if len(pattern) != num_layers or pattern.dtype != np.bool_:
            model.fail(name, f"an integer, or an array of {num_layers} booleans")
        sliding = [bool(is_sliding) for is_sliding in pattern]
    else:
        period = model.integer(name, _SLIDING_PERIOD[architecture])
        sliding = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return tuple(window if is_sliding else 0 for is_sliding in sliding) if any(sliding) else ()


def _gemma_query_scale(architecture: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    """`query_pre_attn_scalar ** -0.5`, which no key states: the 27B models use hidden_size / num_heads."""
    if num_layers == _LAYERS_OF_27B[architecture]:
        return float((hidden_size // num_heads) ** -0.5)
    return float(head_dim**-0.5)
