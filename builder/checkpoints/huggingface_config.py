"""`config.json` of a Hugging Face folder → `ModelConfig`.

Fields that a file may leave out have the defaults of transformers' own config classes: the nested `text_config` of
multimodal Gemma 3 files states only what differs from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aotllm.builder.checkpoints.expected import SANDWICH_NORM_ARCHITECTURES
from aotllm.builder.checkpoints.fields import REQUIRED, Fields
from aotllm.builder.checkpoints.huggingface_fp8 import refuse_other_quantizations
from aotllm.builder.checkpoints.huggingface_rope import read_rope
from aotllm.builder.checkpoints.validate import MAX_LAYERS
from aotllm.builder.config import ModelConfig
from aotllm.errors import CheckpointError, UnsupportedModel

_MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
_CLASSES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class _Defaults:
    """What a family's config class assumes where the file is silent; REQUIRED = the file must say."""

    head_dim: int | None = None
    """None = hidden_size / num_heads"""
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    vocab_size: Any = REQUIRED
    num_heads: Any = REQUIRED
    num_kv_heads: int | None = None
    """None = num_heads"""
    max_position_embeddings: Any = REQUIRED
    rms_norm_eps: Any = REQUIRED
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None


_GEMMA2 = _Defaults(
    head_dim=256,
    tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=4096,
    attn_logit_softcap=50.0,
    final_logit_softcap=30.0,
)
_GEMMA3 = _Defaults(
    head_dim=256,
    tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    sliding_window=4096,
    vocab_size=262_208,
    num_heads=8,
    num_kv_heads=4,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-6,
)
_DEFAULTS = {
    "llama": _Defaults(),
    "mistral": _Defaults(sliding_window=4096),
    "mixtral": _Defaults(num_kv_heads=8),
    "qwen2": _Defaults(sliding_window=4096),
    "qwen3": _Defaults(head_dim=128, sliding_window=4096),
    "qwen3_moe": _Defaults(num_kv_heads=4, sliding_window=4096),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
}


def read_config(values: dict[str, Any], generation: dict[str, Any], source: str) -> ModelConfig:
    """The model that `config.json` describes, not yet validated.

    Gemma's `embedding_scale` is exact (`hidden_size ** 0.5`); the caller rounds it to the embeddings' type.

    Args:
        values: content of `config.json`.
        generation: content of `generation_config.json`; its end-of-sequence ids add to those of the config.
        source: path of `config.json`, for messages.

    Raises:
        CheckpointError: a field is missing or ill-typed.
        UnsupportedModel: another architecture, or a feature that is not implemented.
    """
    top = Fields(source, values)
    architecture = _architecture(top)
    text = top.child("text_config") or top if architecture == "gemma3" else top
    _refuse_unsupported(top, text)

    defaults = _DEFAULTS[architecture]
    num_layers = text.integer("num_hidden_layers", maximum=MAX_LAYERS)
    hidden_size = text.integer("hidden_size")
    num_heads = text.integer("num_attention_heads", defaults.num_heads)
    head_dim = text.integer("head_dim", defaults.head_dim or max(1, hidden_size // num_heads))
    max_positions = text.integer("max_position_embeddings", defaults.max_position_embeddings)
    rope, rope_local = read_rope(text, architecture, head_dim, max_positions)
    gemma = architecture in SANDWICH_NORM_ARCHITECTURES
    attention_bias = architecture not in ("mistral", "mixtral", "qwen2") and text.boolean("attention_bias", False)
    bos = (top.token_ids("bos_token_id") or text.token_ids("bos_token_id"))[:1]
    eos = top.token_ids("eos_token_id") or text.token_ids("eos_token_id")
    eos += Fields(source.replace("config.json", "generation_config.json"), generation).token_ids("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=text.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=text.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=text.integer("num_key_value_heads", defaults.num_kv_heads or num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=text.number("rms_norm_eps", defaults.rms_norm_eps),
        rms_norm_weight_offset=1.0 if gemma else 0.0,
        hidden_act=_activation(text, defaults, "hidden_activation" if gemma else "hidden_act"),
        tie_word_embeddings=_tied(top, text, defaults),
        qkv_bias=architecture == "qwen2" or attention_bias,
        attention_out_bias=attention_bias,
        mlp_bias=architecture == "llama" and text.boolean("mlp_bias", False),
        query_scale=text.number("query_pre_attn_scalar", 256.0) ** -0.5 if gemma else None,
        embedding_scale=hidden_size**0.5 if gemma else 1.0,
        attn_logit_softcap=_softcap(text, "attn_logit_softcapping", defaults.attn_logit_softcap) if gemma else 0.0,
        final_logit_softcap=_softcap(text, "final_logit_softcapping", defaults.final_logit_softcap) if gemma else 0.0,
        layer_windows=_layer_windows(text, architecture, num_layers),
        **_experts(text, architecture, num_layers),
        rope=rope,
        rope_local=rope_local,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        name=(top.string("_name_or_path", "") or "").rstrip("/").rsplit("/", 1)[-1],
    )


def _architecture(top: Fields) -> str:
    """From `model_type` and `architectures`, which must agree where both are given."""
    model_type = top.string("model_type", None)
    classes = top.raw("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        top.fail("architectures", "a list of class names")
    if model_type is None and not classes:
        raise CheckpointError(
            f"{top.source}: neither 'model_type' nor 'architectures' is given; expected one of {', '.join(_CLASSES)}"
        )
    for name, known in ((model_type, _MODEL_TYPES), (classes[0] if classes else None, _CLASSES)):
        if name is not None and name not in known:
            raise UnsupportedModel(
                f"{top.source}: architecture '{name}' is not implemented; known are {', '.join(_CLASSES)} "
                f"(model_type {', '.join(_MODEL_TYPES)})"
            )
    if model_type is None:
        return _CLASSES[classes[0]]
    if classes and _CLASSES[classes[0]] != _MODEL_TYPES[model_type]:
        raise CheckpointError(f"{top.source}: model_type '{model_type}' contradicts architectures {classes}")
    return _MODEL_TYPES[model_type]


def _refuse_unsupported(top: Fields, text: Fields) -> None:
    quantization = top.child("quantization_config") or text.child("quantization_config")
    if quantization is not None:
        refuse_other_quantizations(quantization)
    if text.boolean("use_bidirectional_attention", False):
        raise UnsupportedModel(f"{top.source}: bidirectional attention is not implemented; only causal models are")


def _activation(text: Fields, defaults: _Defaults, field: str) -> str:
    name = text.string(field, defaults.hidden_act)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{text.source}: {field} '{name}' is not implemented; known are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _tied(top: Fields, text: Fields, defaults: _Defaults) -> bool:
    for fields in (top, text):
        if "tie_word_embeddings" in fields:
            return fields.boolean("tie_word_embeddings")
    return defaults.tie_word_embeddings


def _experts(text: Fields, architecture: str, num_layers: int) -> dict[str, Any]:
    """The fields of `ModelConfig` about experts; defaults are those of `MixtralConfig` and `Qwen3MoeConfig`."""
    if architecture == "mixtral":
        return {
            "num_experts": text.integer("num_local_experts", text.integer("num_experts", 8)),
            "num_experts_per_tok": text.integer("num_experts_per_tok", 2),
            "moe_intermediate_size": text.integer("intermediate_size"),
            "norm_topk_prob": True,
        }
    if architecture != "qwen3_moe":
        return {}
    step = text.integer("decoder_sparse_step", 1)
    plain = text.raw("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer) is int and layer >= 0 for layer in plain):
        text.fail("mlp_only_layers", "a list of layers")
    plain = set(plain)
    return {
        "num_experts": text.integer("num_experts", text.integer("num_local_experts", 128, minimum=0), minimum=0),
        "num_experts_per_tok": text.integer("num_experts_per_tok", 8),
        "moe_intermediate_size": text.integer("moe_intermediate_size", 768),
        "norm_topk_prob": text.boolean("norm_topk_prob", False),
        "dense_layers": tuple(layer for layer in range(num_layers) if layer in plain or (layer + 1) % step),
    }


def _softcap(text: Fields, name: str, default: float | None) -> float:
    """Absent = the family's default; null = off."""
    if not text.states(name):
        return default or 0.0
    return text.number(name, 0.0, positive=False)


def _layer_windows(text: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    """Sliding window per layer.

    transformers masks `key <= query - sliding_window` (`masking_utils.sliding_window_overlay`): a query sees
    `sliding_window` tokens, itself included, which is what `ModelConfig.layer_windows` means.
    """
    if architecture == "llama":
        return ()
    window = text.integer("sliding_window", None)
    if not text.states("sliding_window"):
        window = _DEFAULTS[architecture].sliding_window
    if architecture in ("qwen2", "qwen3", "qwen3_moe") and not text.boolean("use_sliding_window", False):
        window = None
    if architecture in ("mistral", "mixtral", "qwen3_moe"):
        return (window,) * num_layers if window else ()
    sliding = _sliding_layers(text, architecture, num_layers, window)
    if not any(sliding):
        return ()
    if window is None:
        raise CheckpointError(f"{text.source}: 'layer_types' names sliding_attention, but no sliding_window is in use")
    return tuple(window if is_sliding else 0 for is_sliding in sliding)


def _sliding_layers(text: Fields, architecture: str, num_layers: int, window: int | None) -> list[bool]:
    """Which layers slide: as listed, else by the family's pattern."""
    layer_types = text.raw("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            text.fail("layer_types", f"a list of {num_layers} layer types")
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise UnsupportedModel(
                    f"{text.source}: layer type {layer_type!r} is not implemented; "
                    "known are full_attention and sliding_attention"
                )
        return [layer_type == "sliding_attention" for layer_type in layer_types]
    if architecture in ("qwen2", "qwen3"):
        first = text.integer("max_window_layers", 28, minimum=0)
        return [window is not None and layer >= first for layer in range(num_layers)]
    period = text.integer("sliding_window_pattern", 6) if architecture == "gemma3" else 2
    return [(layer + 1) % period != 0 for layer in range(num_layers)]
