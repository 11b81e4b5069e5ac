"""Tiny random models of every architecture, made by transformers and written in both formats.

Sizes are all different, so that a swapped pair of them cannot go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Rows are multiples of 32, so that 32-value block formats fit."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"head_dim": 16}),
    "qwen2 with windows": (
        "Qwen2",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3", {"sliding_window": 24, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
}


def make_model(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> transformers.PreTrainedModel:
    """A model of `MODELS` with random weights, norms and biases included."""
    family, options = MODELS[name]
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    sizes = {key: value for key, value in SIZES.items() if not (family == "Qwen2" and key == "head_dim")}
    options = {key: value for key, value in options.items() if not (family == "Qwen2" and key == "head_dim")}
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**sizes, **options, **overrides})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def state(model: transformers.PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    """The weights by canonical name as float32, without the copy that a tied output matrix is."""
    weights: dict[str, npt.NDArray[np.float32]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.ndim < 3:
            weights[name] = tensor.float().numpy()
        else:
            weights.update(by_expert(name, tensor.float().numpy()))
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def by_expert(name: str, stack: npt.NDArray[np.float32]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """A tensor of all experts, as transformers holds it in memory, under the name of each matrix."""
    stem, _, part = name.rpartition(".")
    for expert, matrix in enumerate(stack):
        halves = np.split(matrix, 2) if part == "gate_up_proj" else [matrix]
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        yield from ((f"{stem}.{expert}.{p}.weight", half) for p, half in zip(parts, halves, strict=True))


def interleave_rows(matrix: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of Q or K as GGUF wants them: row `j · d / 2 + i` of a head of `d` becomes row `2i + j`."""
    dim = matrix.shape[0] // num_heads
    order = [head * dim + j * (dim // 2) + i for head in range(num_heads) for i in range(dim // 2) for j in range(2)]
    return matrix[order]


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
PLAIN_NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_architecture(model: transformers.PreTrainedModel) -> str:
    """GGUF keeps Mistral and Mixtral models as llama."""
    names = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    return names.get(model.config.model_type, model.config.model_type)


def gguf_tensors(model: transformers.PreTrainedModel) -> dict[str, npt.NDArray[np.float32]]:
    """The weights under GGUF names: Q and K of llama interleaved, 1 added to Gemma's norms, experts in one tensor."""
    architecture, config = gguf_architecture(model), model.config
    gemma = architecture.startswith("gemma")
    names = {**GGUF_NAMES, **(GEMMA_NORMS if gemma else PLAIN_NORMS)}
    tensors = {}
    weights: dict[str, Any] = {}
    for name, weight in state(model).items():
        stacked = re.sub(r"\.experts\.[0-9]+\.", ".experts.", name)
        if stacked == name:
            weights[name] = weight
        else:
            weights.setdefault(stacked, []).append(weight)
    for name, weight in weights.items():
        weight = np.stack(weight) if isinstance(weight, list) else weight
        stem, _, kind = name.rpartition(".")
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            weight = interleave_rows(weight, heads)
        if gemma and stem.endswith("norm"):
            weight = weight + np.float32(1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            tensors[f"blk.{layer}.{names[part]}.{kind}"] = weight
        else:
            tensors[f"{names[stem]}.{kind}"] = weight
    return tensors


def add_metadata(writer: gguf.GGUFWriter, model: transformers.PreTrainedModel) -> None:
    """The keys that converters write for these architectures."""
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if (experts := getattr(config, "num_local_experts", 0)) > 0:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if gguf_architecture(model).startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if gguf_architecture(model) == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)


def write_gguf(
    path: Path,
    model: transformers.PreTrainedModel,
    *,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra_keys: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    extra_tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    **writer_options: Any,
) -> dict[str, npt.NDArray[Any]]:
    """Writes a model with GGUFWriter; matrices as `matrix_type`, vectors as F32. Returns the tensors as stored."""
    writer = gguf.GGUFWriter(path, gguf_architecture(model), **writer_options)
    add_metadata(writer, model)
    extra_keys(writer)
    stored: dict[str, npt.NDArray[Any]] = {}
    for name, weight in {**gguf_tensors(model), **(extra_tensors or {})}.items():
        type_ = matrix_type if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored[name] = gguf.quants.quantize(weight, type_)
        writer.add_tensor(name, stored[name], raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def edit(folder: Path, file: str = "config.json", drop: tuple[str, ...] = (), **fields: Any) -> None:
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    content = {key: value for key, value in content.items() if key not in drop}
    (folder / file).write_text(json.dumps({**content, **fields}))
