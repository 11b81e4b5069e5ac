"""`validate`: the sanity of a `ModelConfig`, whichever reader made it."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from aotllm.builder.checkpoints.expected import ARCHITECTURES
from aotllm.builder.config import ModelConfig, RopeConfig
from aotllm.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

MAX_LAYERS = 10_000
MAX_EXPERTS = 1024
"""Of a layer"""
MAX_ALL_EXPERTS = 1 << 17
"""Of all layers: a few lines of a config must not ask for gigabytes of names"""
_POSITIVE_INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


def validate(config: ModelConfig, source: str) -> ModelConfig:
    """The config itself, sound: what the builder may rely on without looking again.

    Token ids outside the vocabulary can never be sampled; they are dropped with a warning.

    Raises:
        CheckpointError: sizes are out of range or contradict each other; the message starts with `source`.
    """

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise CheckpointError(f"{source}: {message}")

    need(config.architecture in ARCHITECTURES, f"architecture '{config.architecture}' is not known")
    for name in _POSITIVE_INTEGERS:
        value = getattr(config, name)
        need(isinstance(value, int) and value > 0, f"{name} is {value!r}; expected an integer above zero")
    need(config.num_layers <= MAX_LAYERS, f"num_layers is {config.num_layers}; at most {MAX_LAYERS} are supported")
    need(
        config.num_heads % config.num_kv_heads == 0,
        f"{config.num_heads} attention heads are no multiple of {config.num_kv_heads} key/value heads",
    )
    need(config.head_dim % 2 == 0, f"head_dim is {config.head_dim}; RoPE needs an even number")
    need(
        0 < config.rms_norm_eps < 1,
        f"rms_norm_eps is {config.rms_norm_eps}; expected a number between 0 and 1 (usually 1e-5 or 1e-6)",
    )
    need(config.hidden_act in ("silu", "gelu_tanh"), f"hidden_act '{config.hidden_act}' is not known")
    scale = config.query_scale
    need(scale is None or 0 < scale < math.inf, f"query_scale is {scale}; expected a finite number above zero")
    for name in ("attn_logit_softcap", "final_logit_softcap"):
        value = getattr(config, name)
        need(0 <= value < math.inf, f"{name} is {value}; expected 0 (off) or a finite number above zero")
    need(
        len(config.layer_windows) in (0, config.num_layers),
        f"{len(config.layer_windows)} sliding windows for {config.num_layers} layers",
    )
    need(all(window >= 0 for window in config.layer_windows), "a sliding window is negative")
    _validate_experts(config, source)
    for rope in (config.rope, config.rope_local):
        if rope is not None:
            _validate_rope(rope, config, source)
    return _drop_ids_outside_vocabulary(config, source)


def _validate_experts(config: ModelConfig, source: str) -> None:
    count, chosen, neurons = config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size
    if not 0 <= count <= MAX_EXPERTS:
        raise CheckpointError(f"{source}: {count} experts; expected 0 (none) to {MAX_EXPERTS}")
    if count * config.num_layers > MAX_ALL_EXPERTS:
        raise CheckpointError(
            f"{source}: {count} experts in {config.num_layers} layers; at most {MAX_ALL_EXPERTS} in all are supported"
        )
    if count and not 1 <= chosen <= count:
        raise CheckpointError(f"{source}: a token takes {chosen} of {count} experts; expected 1 to {count}")
    if count and neurons < 1:
        raise CheckpointError(f"{source}: experts of {neurons} neurons; expected an integer above zero")


def _validate_rope(rope: RopeConfig, config: ModelConfig, source: str) -> None:
    def need(condition: bool, message: str) -> None:
        if not condition:
            raise CheckpointError(f"{source}: RoPE: {message}")

    need(rope.rope_type in ROPE_TYPES, f"type '{rope.rope_type}' is not known; known are {', '.join(ROPE_TYPES)}")
    need(1 < rope.theta < math.inf, f"theta is {rope.theta}; expected a finite number above 1")
    need(0 < rope.factor < math.inf, f"scaling factor is {rope.factor}; expected a finite number above zero")
    rotary_dim = rope.rotary_dim if rope.rotary_dim is not None else config.head_dim
    need(
        0 < rotary_dim <= config.head_dim and rotary_dim % 2 == 0,
        f"{rotary_dim} rotated dimensions; expected an even number up to head_dim ({config.head_dim})",
    )
    need(rope.rope_type != "dynamic" or rotary_dim > 2, "dynamic scaling needs more than 2 rotated dimensions")
    for name in ("short_factor", "long_factor", "freq_factors"):
        factors = getattr(rope, name)
        if factors is not None:
            need(len(factors) == rotary_dim // 2, f"{name} has {len(factors)} values; expected {rotary_dim // 2}")
            need(all(0 < f < math.inf for f in factors), f"{name} holds a value that is not finite and above zero")
    if rope.rope_type == "longrope":
        need(rope.short_factor is not None and rope.long_factor is not None, "longrope needs short and long factors")
    if rope.rope_type in ("llama3", "yarn", "longrope"):
        original = rope.original_max_position_embeddings
        need(
            original is not None and original > 1,
            f"{rope.rope_type} needs original_max_position_embeddings above 1, got {original}",
        )
    if rope.rope_type == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        need(
            low is not None and high is not None and 0 < low < high,
            f"llama3 needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}",
        )


def _drop_ids_outside_vocabulary(config: ModelConfig, source: str) -> ModelConfig:
    eos = tuple(i for i in dict.fromkeys(config.eos_token_ids) if 0 <= i < config.vocab_size)
    bos = config.bos_token_id
    if bos is not None and not 0 <= bos < config.vocab_size:
        bos = None
    outside = [i for i in (config.bos_token_id, *config.eos_token_ids) if i is not None and i >= config.vocab_size]
    if outside:
        warnings.warn(
            f"{source}: token ids {sorted(set(outside))} are outside the vocabulary of {config.vocab_size} tokens "
            "and are ignored",
            stacklevel=4,
        )
    return replace(config, bos_token_id=bos, eos_token_ids=eos)
