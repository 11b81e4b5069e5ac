"""Checkpoints in memory, and ways to run a graph: what tests of the builder share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from aotllm.builder.checkpoints.base import Checkpoint, TensorInfo, TokenizerAssets
from aotllm.builder.config import ModelConfig, RopeConfig
from aotllm.errors import CheckpointError

TINY = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)

GEMMA = replace(
    TINY,
    rms_norm_weight_offset=1.0,
    hidden_act="gelu_tanh",
    tie_word_embeddings=True,
    query_scale=24**-0.5,
    embedding_scale=48**0.5,
)

EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

CONFIGS: dict[str, ModelConfig] = {
    "llama": replace(TINY, name="tiny llama"),
    "llama-partial-rotary": replace(TINY, rope=RopeConfig(rotary_dim=8), tie_word_embeddings=True),
    "llama-all-biases": replace(TINY, qkv_bias=True, attention_out_bias=True, mlp_bias=True),
    "llama-attention-biases": replace(TINY, qkv_bias=True, attention_out_bias=True),
    "llama-yarn": replace(
        TINY, rope=RopeConfig(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), num_kv_heads=6
    ),
    "mistral": replace(TINY, architecture="mistral", layer_windows=(5, 5, 5)),
    "qwen2": replace(TINY, architecture="qwen2", qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(TINY, architecture="qwen3"),
    "mixtral": replace(TINY, architecture="mixtral", **EXPERTS, norm_topk_prob=True),
    "qwen3-moe": replace(TINY, architecture="qwen3_moe", **EXPERTS, dense_layers=(1,)),
    "qwen3-moe-normalized": replace(
        TINY, architecture="qwen3_moe", **EXPERTS, norm_topk_prob=True, hidden_act="gelu_tanh", qkv_bias=True
    ),
    "gemma2": replace(
        GEMMA, architecture="gemma2", layer_windows=(5, 0, 5), attn_logit_softcap=5.0, final_logit_softcap=3.0
    ),
    "gemma3": replace(
        GEMMA,
        architecture="gemma3",
        layer_windows=(5, 5, 0),
        rope=RopeConfig(rope_type="linear", theta=1e6, factor=8.0),
        rope_local=RopeConfig(theta=1e4),
    ),
}
"""One tiny model per architecture, and variants that exercise what the architectures leave out"""


class MemoryCheckpoint(Checkpoint):
    """Arrays by canonical name."""

    path = Path("memory")

    def __init__(self, config: ModelConfig, arrays: dict[str, np.ndarray]):
        self.config = config
        self.arrays = {name: np.asarray(array, np.float32) for name, array in arrays.items()}

    def tensors(self):
        return {name: TensorInfo(name, a.shape, "f32", a.nbytes) for name, a in self.arrays.items()}

    def read(self, name):
        if name not in self.arrays:
            raise CheckpointError(f"no tensor {name}")
        return self.arrays[name]

    def read_stored(self, name):
        return self.read(name)

    def tokenizer(self) -> TokenizerAssets:
        raise CheckpointError("a checkpoint in memory has no tokenizer")


class UnreadableCheckpoint(Checkpoint):
    """Names and shapes without data: any read fails the test."""

    path = Path("unreadable")

    def __init__(self, config: ModelConfig):
        self.config = config

    def tensors(self):
        return {name: TensorInfo(name, shape, "bf16", 0) for name, shape in tensor_shapes(self.config).items()}

    def read(self, name):
        raise AssertionError(f"{name} was read")

    read_stored = read

    def tokenizer(self) -> TokenizerAssets:
        raise AssertionError("the tokenizer was read")


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical names and shapes of a model, written down from the format and not from the definitions under test."""
    c, hidden = config, config.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    gemma = c.architecture.startswith("gemma")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        linears = {
            "self_attn.q_proj": (q, hidden, c.qkv_bias),
            "self_attn.k_proj": (kv, hidden, c.qkv_bias),
            "self_attn.v_proj": (kv, hidden, c.qkv_bias),
            "self_attn.o_proj": (hidden, q, c.attention_out_bias),
        }
        mlps = {"mlp": (c.intermediate_size, c.mlp_bias)}
        if c.num_experts and i not in c.dense_layers:
            shapes[f"{layer}.mlp.gate.weight"] = (c.num_experts, hidden)
            mlps = {f"mlp.experts.{expert}": (c.moe_intermediate_size, False) for expert in range(c.num_experts)}
        for mlp, (inner, bias) in mlps.items():
            linears |= {f"{mlp}.{part}_proj": (inner, hidden, bias) for part in ("gate", "up")}
            linears[f"{mlp}.down_proj"] = (hidden, inner, bias)
        for name, (n, k, bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (n, k)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (n,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in norms}
        if c.architecture in ("qwen3", "qwen3_moe", "gemma3"):
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (c.head_dim,) for x in "qk"}
    shapes["model.norm.weight"] = (hidden,)
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes


def random_checkpoint(config: ModelConfig, seed: int = 0) -> MemoryCheckpoint:
    """Weights of a size that keeps activations near one, so that tolerances mean something."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2:
            arrays[name] = rng.normal(size=shape) * (1.5 / shape[1] ** 0.5)
        elif name.endswith(".bias"):
            arrays[name] = rng.normal(size=shape) * 0.3
        else:
            arrays[name] = 1.0 - config.rms_norm_weight_offset + rng.normal(size=shape) * 0.2
    return MemoryCheckpoint(config, arrays)


def run_onnx(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs of a graph, by onnxruntime. Older versions take one overload of a local function for another."""
    onnxruntime = pytest.importorskip("onnxruntime", minversion="1.28", reason="opset 24 and overloads of functions")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def run_graph(model: ir.Model, token_ids: list[int], start: int = 0) -> np.ndarray:
    """Logits `[tokens, vocab_size]` of a model of one sequence that begins at position `start`."""
    ids = np.asarray(token_ids, np.int64)
    (logits,) = run_onnx(model, {"input_ids": ids, "positions": start + np.arange(len(ids))})
    return logits


def random_tokens(config: ModelConfig, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, n).tolist()
