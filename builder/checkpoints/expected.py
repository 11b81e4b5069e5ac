"""What an architecture needs: its tensors under canonical names, and the check of a checkpoint against that table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from aotllm.builder.checkpoints.base import TensorInfo
from aotllm.builder.config import ModelConfig
from aotllm.errors import CheckpointError

ARCHITECTURES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")
"""Keys of `ModelConfig.architecture` that the readers produce."""

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

QK_NORM_ARCHITECTURES = ("qwen3", "qwen3_moe", "gemma3")
"""RMSNorm on each head of Q and K."""
SANDWICH_NORM_ARCHITECTURES = ("gemma2", "gemma3")
"""RMSNorm after attention and after the MLP too, before their residual additions."""


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes (`[out_features, in_features]` for matrices) of all tensors of the model, embeddings first."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        for name, shape in _layer_tensors(config, layer).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_rows, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_rows, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_rows, config.attention_out_bias),
        **_feed_forward(config, layer),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.architecture in QK_NORM_ARCHITECTURES:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.architecture in SANDWICH_NORM_ARCHITECTURES:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes.update({f"{norm}.weight": (hidden,) for norm in norms})
    return shapes


def _feed_forward(config: ModelConfig, layer: int) -> dict[str, tuple[int, int, bool]]:
    """Module → rows, columns, whether it has a bias."""
    hidden = config.hidden_size

    def mlp(prefix: str, inner: int, has_bias: bool) -> dict[str, tuple[int, int, bool]]:
        return {
            f"{prefix}.gate_proj": (inner, hidden, has_bias),
            f"{prefix}.up_proj": (inner, hidden, has_bias),
            f"{prefix}.down_proj": (hidden, inner, has_bias),
        }

    if not config.has_experts(layer):
        return mlp("mlp", config.intermediate_size, config.mlp_bias)
    modules = {"mlp.gate": (config.num_experts, hidden, False)}
    for expert in range(config.num_experts):
        modules |= mlp(f"mlp.experts.{expert}", config.moe_intermediate_size, False)
    return modules


def select_tensors(
    found: Mapping[str, TensorInfo],
    config: ModelConfig,
    source: str,
    stored_name: Callable[[str], str] = str,
) -> dict[str, TensorInfo]:
    """The tensors that the architecture uses, in file order; one warning tells of those that it does not use.

    Args:
        found: all tensors of the checkpoint under canonical names (where they have one), in file order.
        config: a validated config.
        source: file or folder, for messages.
        stored_name: canonical name → name in the file, for messages.

    Raises:
        CheckpointError: a tensor is missing or has another shape than the config says.
    """
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{source}: tensor '{stored_name(missing[0])}'{more} is missing; {config.architecture} with "
            f"{config.num_layers} layers needs {len(expected)} tensors"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise CheckpointError(
                f"{source}: tensor '{stored_name(name)}' has shape {list(found[name].shape)}; "
                f"its config asks for {list(shape)}"
            )
    unused = [name for name in found if name not in expected and not _is_harmless(name, config)]
    if unused:
        shown = ", ".join(f"'{name}'" for name in unused[:3]) + (", …" if len(unused) > 3 else "")
        warnings.warn(
            f"{source}: {len(unused)} tensors that {config.architecture} does not use are ignored: {shown}",
            stacklevel=4,
        )
    return {name: info for name, info in found.items() if name in expected}


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Copies that carry nothing: the output matrix of tied models, and RoPE tables of old checkpoints."""
    return (name == LM_HEAD and config.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")
